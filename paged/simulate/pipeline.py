"""Pipeline: the ranks of a replica, and when each of its steps ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from ..architectures.config import ModelConfig
from ..model.part import ModelPart, Shard
from ..model.stream import StreamShape
from ..options.config import EngineConfig
from ..ranks.layout import RankLayout
from ..runner.sizes import SWAP_SPACE, Sizes
from ..scheduler.schedule import Schedule
from .cost import DataSheet, StepCost, Work, WorkCost, element_bytes
from .links import Exchanges, RankLink
from .portion import Portion


def rank_sizes(config: EngineConfig, model: ModelConfig, target: str) -> list[Sizes]:
    """Return the sizes of the first shard of each stage: those of the others are no larger.

    Raises ConfigError where the model cannot be divided as the options say.
    """
    layout = RankLayout.of(config, model)
    if layout.num_ranks > 1 and config.preemption_mode != "recompute":
        # Divided among the ranks, as on one machine.
        space = SWAP_SPACE["cuda"] if config.swap_space is None else config.swap_space
        config = replace(config, swap_space=space / layout.num_ranks)
    shard = Shard(0, layout.num_shards)
    parts = [ModelPart(layers, model.num_layers, shard) for layers in layout.layers]
    return [Sizes(config, model, "cuda", model.dtype, target, part=part) for part in parts]


@dataclass(frozen=True, slots=True)
class StageWork:
    """What a step takes on each rank of a stage: its computation, and the exchanges among the shards."""

    compute: WorkCost
    exchanges: Exchanges

    def seconds(self, work: Work) -> float:
        """Return how many seconds it takes."""
        return self.compute.seconds(work) + self.exchanges.seconds(work)


@dataclass(frozen=True, slots=True)
class StageCost:
    """What steps take on a stage. stream_bytes: what the next one gets of each token; 0 of the last one."""

    cost: StepCost
    stream_bytes: int

    @classmethod
    def of(cls, compute: WorkCost, sizes: Sizes, sheet: DataSheet, link: RankLink) -> Self:
        """Return the stage whose ranks have these sizes. compute: what one of them computes."""
        model = sizes.model
        part = sizes.part
        assert part is not None, "sizes of no rank"
        own = StageWork(compute, Exchanges(model, part, link))
        columns = 0 if part.is_last else sum(StreamShape.before(part.layers.stop, model))
        cost = StepCost(own, Portion.of(model, part).model, sheet, sizes.block_bytes)
        return cls(cost, columns * element_bytes(model))


class Pipeline:
    """The stages of a replica, each of which computes one step after the other.

    A step goes through all of them. While the last stage computes one, those before compute later ones.

    host_s: what the host takes for a step, where it begins one while the device computes the one before, so
        that a step takes the longer of both. None: steps begin one after another, and stages know their time.
    waited_s: how long the device has waited for the host between two steps, while both had work.
    """

    def __init__(
        self, stages: Sequence[StageCost], link: RankLink, num_ranks: int, host_s: float | None = None
    ) -> None:
        assert host_s is None or len(stages) == 1, "steps of several stages are of different requests"
        self._stages = stages
        self._host_s = host_s
        self._host_free_at = 0.0
        self.waited_s = 0.0
        self._link = link
        self._message_s = link.latency_s if num_ranks > 1 else 0.0  # from the driver to all others
        self._free_at = [0.0] * len(stages)  # when a stage has computed what it got
        self._sent_at = [0.0] * len(stages)  # when the link to the next stage has sent what it got

    @property
    def num_in_flight(self) -> int:
        """How many steps are in flight at once."""
        return len(self._stages) if self._host_s is None else 2

    @property
    def runs_ahead(self) -> bool:
        """Whether the steps in flight are of the same requests."""
        return self._host_s is not None

    def end_of(self, schedule: Schedule, now: float) -> float:
        """Return when a step ends that begins now."""
        at = now + self._message_s
        if self._host_s is not None:
            at = self._host_free_at = max(at, self._host_free_at) + self._host_s
            if 0.0 < self._free_at[0] >= now:  # a step was in flight until now, at least
                self.waited_s += max(0.0, at - self._free_at[0])
        for number, stage in enumerate(self._stages):
            at = max(at, self._free_at[number]) + stage.cost.seconds(schedule)
            self._free_at[number] = at
            if stage.stream_bytes and schedule.num_tokens:
                num_bytes = stage.stream_bytes * schedule.num_tokens
                sent_at = max(at, self._sent_at[number]) + num_bytes / self._link.bytes_per_s
                self._sent_at[number] = sent_at
                at = sent_at + self._link.latency_s
        return at
