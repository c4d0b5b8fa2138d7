"""RankLayout: which layers and which share of their weights each rank holds. Free of torch.

A model is cut into stages of contiguous layers, and each stage into shards of equal size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from ..architectures.config import ModelConfig
from ..base.errors import DivisionError
from ..model.division import check_shards
from ..options.config import EngineConfig


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The ranks of a model: `num_stages` stages of `num_shards` ranks each.

    Rank 0 schedules and samples. It is the first shard of the last stage, which has the final norm and the
    head. The first stage, which has the embedding, has the highest ranks.

    layers: the layers of each stage, first stage first.
    """

    num_stages: int
    num_shards: int
    layers: tuple[range, ...]

    @classmethod
    def of(cls, config: EngineConfig, model: ModelConfig) -> Self:
        """Divide a model as the options demand. Raises DivisionError if that is impossible."""
        num_stages = config.pipeline_parallel_size
        num_shards = config.tensor_parallel_size
        check_shards(model, num_shards)
        if num_stages > model.num_layers:
            raise DivisionError(
                f"pipeline_parallel_size {num_stages} is more than the {model.num_layers} layers of the model"
            )
        joined = _joined(model)
        if config.pipeline_layers is None:
            layers = cut_layers(_layer_costs(model), num_stages, joined)
        else:
            layers = _given_layers(config.pipeline_layers, model.num_layers, joined)
        return cls(num_stages, num_shards, layers)

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self.num_stages * self.num_shards

    def stage_of(self, rank: int) -> int:
        """Return the stage of a rank."""
        return self.num_stages - 1 - rank // self.num_shards

    def shard_of(self, rank: int) -> int:
        """Return the shard of its stage that a rank holds."""
        return rank % self.num_shards

    def rank_of(self, stage: int, shard: int) -> int:
        """Return the rank that holds this shard of a stage."""
        return (self.num_stages - 1 - stage) * self.num_shards + shard

    def ranks_of_stage(self, stage: int) -> range:
        """Return the ranks of a stage, in the order of their shards."""
        first = self.rank_of(stage, 0)
        return range(first, first + self.num_shards)

    def describe(self, rank: int) -> str:
        """Describe what a rank holds, as in "layers 12 to 21, shard 1 of 2"."""
        held = self.layers[self.stage_of(rank)]
        layers = f"layer {held[0]}" if len(held) == 1 else f"layers {held[0]} to {held[-1]}"
        return layers + (f", shard {self.shard_of(rank)} of {self.num_shards}" if self.num_shards > 1 else "")


def cut_layers(costs: Sequence[int], num_stages: int, joined: Iterable[tuple[int, int]]) -> tuple[range, ...]:
    """Divide layers into consecutive stages such that the most expensive stage costs as little as possible.

    costs: the cost of each layer.
    joined: pairs of layers that must be in one stage.

    Raises DivisionError if the joined layers allow only fewer stages.
    """
    num_layers = len(costs)
    cuts = _allowed_cuts(num_layers, joined)
    if num_stages > len(cuts) - 1:
        raise DivisionError(
            f"pipeline_parallel_size {num_stages}: layers that read the K and V of others stay with them, as "
            "layers at the end without attention or state stay with the last one that has it, and the first "
            "layers that add features of images stay with the vision tower, so this model can be cut into at "
            f"most {len(cuts) - 1} stages"
        )
    total = [0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[end]: the largest cost of the stages before a cut, and where the last of them begins.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(1, num_stages + 1):
        found: dict[int, tuple[float, tuple[int, ...]]] = {}
        for end in cuts:
            choices = [
                (max(cost, total[end] - total[start]), (*starts, start))
                for start, (cost, starts) in best.items()
                if start < end and (stage < num_stages or end == num_layers)
            ]
            if choices:
                found[end] = min(choices)
        best = found
    starts = best[num_layers][1]
    return tuple(range(a, b) for a, b in zip(starts, (*starts[1:], num_layers), strict=True))


def _layer_costs(model: ModelConfig) -> list[int]:
    """Return the weights of each layer; the embedding counts with the first, the head with the last one."""
    hidden = model.hidden_size
    inputs = 0 if model.layer_inputs is None else 3 * model.layer_inputs.size * hidden
    costs = [
        layer.num_mixing_params(hidden)
        + sum(part.num_params(hidden) for part in layer.feed_forwards)
        + inputs
        for layer in model.layers
    ]
    table = model.vocab_size * hidden
    costs[0] += table + (0 if model.vision is None else model.vision.tower.num_params)
    costs[-1] += table
    if model.layer_inputs is not None:
        costs[0] += model.layer_inputs.vocab_size * model.layer_inputs.size * model.num_layers
    return costs


def _joined(model: ModelConfig) -> list[tuple[int, int]]:
    """Return pairs of layers that must be in one stage: each layer that reads K and V of an earlier one with
    that, the last layer with the last one that keeps K and V or a state, and the first with those that add
    features of images, which the first stage alone has.
    """
    readers = [(source, layer) for layer, source in model.kv_sources.items() if source != layer]
    keeping = max(i for i, layer in enumerate(model.layers) if layer.keeps)
    features = 0 if model.vision is None else model.vision.num_features
    return [*readers, (keeping, model.num_layers - 1), *(((0, features - 1),) if features > 1 else ())]


def _allowed_cuts(num_layers: int, joined: Iterable[tuple[int, int]]) -> list[int]:
    """Return where a stage may begin or end: at a layer's number, if no joined layers are on both sides."""
    parted = {cut for source, reader in joined for cut in range(source + 1, reader + 1)}
    return [cut for cut in range(num_layers + 1) if cut not in parted]


def _given_layers(
    sizes: Sequence[int], num_layers: int, joined: Iterable[tuple[int, int]]
) -> tuple[range, ...]:
    """Return the layers of stages of these sizes. Raises DivisionError if they do not fit the model."""
    if sum(sizes) != num_layers:
        raise DivisionError(
            f"pipeline_layers {[*sizes]} are {sum(sizes)} layers, and the model has {num_layers}"
        )
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    for source, reader in joined:
        for end in ends[:-1]:
            if source < end <= reader:
                raise DivisionError(
                    f"pipeline_layers {[*sizes]} part layer {reader} from layer {source}, whose K and V it "
                    "reads, behind which no layer keeps any, or with which it adds features of images; cuts "
                    "are possible at "
                    f"{_listed(_allowed_cuts(num_layers, joined)[1:-1])}"
                )
    return tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))


def _listed(cuts: Sequence[int]) -> str:
    return ", ".join(map(str, cuts)) or "no layer"


def split_evenly(cores: Sequence[Sequence[int]], index: int, count: int) -> list[int]:
    """Return the CPUs of rank number `index` of `count`: an equal share of whole cores.

    cores: the hardware threads of each core.
    """
    size = len(cores) // count
    return sorted(cpu for core in cores[index * size : (index + 1) * size] for cpu in core)
