"""Pipeline: the ranks of a replica, the links between them, and when each of its steps ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from ..architectures.config import ModelConfig
from ..architectures.layer_sizes import mixer_numbers
from ..architectures.spec import AttentionSpec, ExpertsSpec
from ..base.errors import ConfigError
from ..base.validation import shown
from ..model.part import ModelPart, Shard
from ..model.stream_shape import StreamShape
from ..options.config import EngineConfig
from ..ranks.layout import RankLayout
from ..runner.sizes import GIB, SWAP_SPACE, Sizes
from ..scheduler.schedule import Schedule
from .cost import (
    DATA_SHEETS,
    DataSheet,
    Portion,
    StepCost,
    Work,
    WorkCost,
    element_bytes,
    weight_bytes,
)

# Assumed: microseconds from the call that sends to the return of the one that receives, beside the bytes.
_LATENCY_US = {"nvlink": 5.0, "pcie": 10.0, "100gbe": 30.0, "10gbe": 60.0}
_NETWORK_GB_PER_S = {"100gbe": 12.5, "10gbe": 1.25}


@dataclass(frozen=True, slots=True)
class RankLink:
    """The link between two ranks: its speed in each direction."""

    bytes_per_s: float
    latency_s: float

    @classmethod
    def of(cls, text: str | None, gpu: str) -> Self:
        """Return the link with this name, or for a text such as "12.5,200": GB/s and microseconds.

        gpu: the GPU whose data sheet has the bandwidth of NVLink and PCIe.

        A text of None takes NVLink if the GPU has it, else PCIe. Raises ConfigError.
        """
        sheet = DATA_SHEETS[gpu]
        rates = {"pcie": sheet.link_gb_per_s, **_NETWORK_GB_PER_S}
        if sheet.peer_gb_per_s:
            rates = {"nvlink": sheet.peer_gb_per_s, **rates}
        name = next(iter(rates)) if text is None else text.casefold()
        if name in rates:
            return cls(rates[name] * 1e9, _LATENCY_US[name] / 1e6)
        without = f"; {gpu} has no nvlink" if name == "nvlink" else ""
        try:
            gb_per_s, latency_us = map(float, name.split(","))
            is_known = 0 < gb_per_s < math.inf and 0 <= latency_us < math.inf
        except ValueError:
            is_known = False
        if not is_known:
            raise ConfigError(
                f"link must be one of {', '.join(rates)}, or GB/s and microseconds such as 12.5,200; "
                f"got {shown(text)}{without}"
            )
        return cls(gb_per_s * 1e9, latency_us / 1e6)

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds until num_bytes have arrived."""
        return self.latency_s + num_bytes / self.bytes_per_s


class Exchanges:
    """The exchanges among the shards of a stage within a step; see docs/parallel.md.

    Each shard sends its columns to all other shards and receives theirs. All shards wait for each other.
    """

    def __init__(self, model: ModelConfig, part: ModelPart, link: RankLink) -> None:
        self._link = link
        self._num = 0
        self._columns = 0.0  # that a shard gets of each token
        self._sampled_columns = 0.0  # of each sampled one
        self._element_bytes = element_bytes(model)
        if part.shard.is_whole:
            return
        lacking = 1 - 1 / part.shard.count
        hidden = model.hidden_size
        for index in part.layers:
            layer = model.layers[index]
            assert not isinstance(layer.feed_forward, ExpertsSpec), "experts are not divided"
            _, attended = mixer_numbers(layer)
            for inner in (attended, *(part.size for part in layer.feed_forwards)):
                if inner:  # else the layer lacks this part
                    self._add(lacking * inner, lacking * hidden)
            if layer.attention is not None and layer.attention.qk_norm == "projection":
                self._add(lacking * _normed_columns(layer.attention, part))
            if model.layer_inputs is not None:
                self._add(lacking * model.layer_inputs.size, lacking * hidden)
        if part.is_first:  # each shard sends a row for all tokens, though one of them has the right one
            self._add((part.shard.count - 1) * hidden)
            if model.layer_inputs is not None:
                columns = model.layer_inputs.size * model.num_layers
                self._add((part.shard.count - 1) * columns, lacking * columns)
        if part.is_last:
            self._num += 1
            self._sampled_columns = (part.shard.count - 1) * len(part.shard.tokens(model.vocab_size))

    def _add(self, *columns: float) -> None:
        self._num += len(columns)
        self._columns += sum(columns)

    def seconds(self, work: Work) -> float:
        """Return the duration of the exchanges of a step in seconds."""
        if not self._num:
            return 0.0
        numbers = self._columns * work.num_tokens + self._sampled_columns * work.num_sampled
        return self._num * self._link.latency_s + numbers * self._element_bytes / self._link.bytes_per_s


def _normed_columns(attention: AttentionSpec, part: ModelPart) -> int:
    """Return the columns of Q and K of all shards. Several shards may have the same KV head."""
    own = part.shard.attention(attention)
    return part.shard.count * (own.num_heads + own.kv.num_kv_heads) * own.kv.key_dim


def rank_sizes(config: EngineConfig, model: ModelConfig, target: str) -> list[Sizes]:
    """Return the sizes of the first shard of each stage. The other shards' sizes are not larger.

    Raises ConfigError if the model cannot be divided as the options demand.
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
    """Return the sizes with as many seats and snapshots as states have room for on every rank."""
    if not ranks[0].model.states:
        return ranks
    usable = sheet.memory_gib * GIB * ranks[0].config.gpu_memory_utilization
    rooms = [int(usable - weight_bytes(Portion.of(each.model, each.part))) for each in ranks]
    from ..runner.states import seats_in, with_snapshots

    found = (seats_in(each, room).config.num_seats for each, room in zip(ranks, rooms, strict=True))
    config = replace(ranks[0].config, max_num_seqs=min(found))
    ranks = [replace(each, config=config) for each in ranks]
    given = config.num_blocks is not None
    left = (None if given else room - each.all_state_bytes for each, room in zip(ranks, rooms, strict=True))
    kept = (with_snapshots(each, room).config.state_snapshots for each, room in zip(ranks, left, strict=True))
    least = min((number for number in kept if number is not None), default=None)
    return [replace(each, config=replace(config, state_snapshots=least)) for each in ranks]


@dataclass(frozen=True, slots=True)
class StageWork:
    """The work of a step on each rank of a stage: computing, and exchanges among the shards."""

    compute: WorkCost
    exchanges: Exchanges

    def seconds(self, work: Work) -> float:
        """Return the duration of the work in seconds."""
        return self.compute.seconds(work) + self.exchanges.seconds(work)


@dataclass(frozen=True, slots=True)
class StageCost:
    """The duration of steps on one stage of a pipeline.

    stream_bytes: the bytes per token that are sent to the next stage; 0 for the last stage.
    """

    cost: StepCost
    stream_bytes: int

    @classmethod
    def of(cls, compute: WorkCost, sizes: Sizes, sheet: DataSheet, link: RankLink) -> Self:
        """Return the cost of a stage whose ranks have these sizes.

        compute: the cost model of one of the ranks.
        """
        model = sizes.model
        part = sizes.part
        assert part is not None, "sizes of no rank"
        own = StageWork(compute, Exchanges(model, part, link))
        columns = 0 if part.is_last else sum(StreamShape.before(part.layers.stop, model))
        cost = StepCost(own, Portion.of(model, part).model, sheet, sizes.block_bytes)
        return cls(cost, columns * element_bytes(model))


class Pipeline:
    """The stages of a replica. Each stage computes one step after the other.

    A step passes through all stages. While the last stage computes a step, the earlier stages compute later
    steps.

    host_s: the seconds that the host needs for a step, if it prepares the next step while the device
        computes; a step then takes as long as the slower of the two. None if the stages' own times include
        the host's.
    waited_s: the total seconds that the device has waited for the host between steps.
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
        """The number of steps in flight at once."""
        return len(self._stages) if self._host_s is None else 2

    @property
    def runs_ahead(self) -> bool:
        """Whether the steps in flight may compute the same requests."""
        return self._host_s is not None

    def end_of(self, schedule: Schedule, now: float) -> float:
        """Return when a step that begins now will end."""
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
