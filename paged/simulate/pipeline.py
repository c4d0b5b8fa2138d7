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
from ..runner.sizes import GIB, SWAP_SPACE, Sizes
from ..scheduler.schedule import Schedule
from .cost import DataSheet, StepCost, Work, WorkCost, element_bytes, weight_bytes
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


def with_seats(ranks: list[Sizes], sheet: DataSheet) -> list[Sizes]:
    """Return the sizes with as many seats as the states of sequences have room for on every rank."""
    if not ranks[0].model.states or ranks[0].config.max_num_seqs is not None:
        return ranks
    usable = sheet.memory_gib * GIB * ranks[0].config.gpu_memory_utilization
    rooms = [int(usable - weight_bytes(Portion.of(each.model, each.part))) for each in ranks]
    from ..runner.states import seats_in

    found = (seats_in(each, room).config.num_seats for each, room in zip(ranks, rooms, strict=True))
    config = replace(ranks[0].config, max_num_seqs=min(found))
    return [replace(each, config=config) for each in ranks]


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
    """

    def __init__(self, stages: Sequence[StageCost], link: RankLink, num_ranks: int) -> None:
        self._stages = stages
        self._link = link
        self._message_s = link.latency_s if num_ranks > 1 else 0.0  # from the driver to all others
        self._free_at = [0.0] * len(stages)  # when a stage has computed what it got
        self._sent_at = [0.0] * len(stages)  # when the link to the next stage has sent what it got

    @property
    def num_in_flight(self) -> int:
        """How many steps are in flight at once."""
        return len(self._stages)

    def end_of(self, schedule: Schedule, now: float) -> float:
        """Return when a step ends that begins now."""
        at = now + self._message_s
        for number, stage in enumerate(self._stages):
            at = max(at, self._free_at[number]) + stage.cost.seconds(schedule)
            self._free_at[number] = at
            if stage.stream_bytes and schedule.num_tokens:
                num_bytes = stage.stream_bytes * schedule.num_tokens
                sent_at = max(at, self._sent_at[number]) + num_bytes / self._link.bytes_per_s
                self._sent_at[number] = sent_at
                at = sent_at + self._link.latency_s
        return at
