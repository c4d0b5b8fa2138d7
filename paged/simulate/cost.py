"""Step times and KV cache sizes, from data sheets or from a fit to measured steps.

Portion: what one rank holds of a model, in numbers of weights.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from ..architectures.config import ModelConfig
from ..architectures.spec import ExpertsSpec, LayerSpec
from ..base.errors import ConfigError, ResourceError
from ..base.validation import check_number
from ..model.part import ModelPart, Shard
from ..runner.sizes import GIB
from ..scheduler.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Portion:
    """The layers that a rank computes, and its part of the tables.

    model: the config with only these layers, each reduced to the rank's shard.
    num_head_params: how many weights of the output head the rank multiplies by; 0 before the last stage.
    num_table_params: how many weights of embedding, head and positions the rank holds.
    """

    model: ModelConfig
    num_head_params: int
    num_table_params: int

    @classmethod
    def of(cls, model: ModelConfig, part: ModelPart | None = None) -> Self:
        """Return the portion of the model that one rank computes.

        part: the rank's part of the model; None is the whole model.
        """
        part = part or ModelPart.whole(model.num_layers)
        shard = part.shard
        table = len(shard.tokens(model.vocab_size)) * model.hidden_size
        num_tables = part.is_first + part.is_last
        if num_tables == 2 and model.tie_word_embeddings:
            num_tables = 1
        params = num_tables * table
        if part.is_first and model.learned_positions:
            params += model.max_position_embeddings * model.hidden_size
        inputs = model.layer_inputs
        if inputs is not None:
            if part.is_first:
                params += len(shard.tokens(inputs.vocab_size)) * inputs.size * model.num_layers
            inputs = replace(inputs, size=len(shard.share(inputs.size)))
        layers = tuple(_shard_of(model.layers[index], shard) for index in part.layers)
        return cls(replace(model, layers=layers, layer_inputs=inputs), table * part.is_last, params)

    @property
    def num_step_params(self) -> int:
        """The number of weights that a step with many tokens reads."""
        return self.model.num_layer_params + self.num_head_params


def _shard_of(layer: LayerSpec, shard: Shard) -> LayerSpec:
    """Return what a shard computes of a layer. One with experts is never divided."""
    mlp = layer.feed_forward
    if shard.is_whole or isinstance(mlp, ExpertsSpec):
        return layer
    own = mlp and replace(mlp, size=len(shard.share(mlp.size)))
    attention = layer.attention and shard.attention(layer.attention)
    return replace(
        layer, attention=attention, state=layer.state and shard.state(layer.state), feed_forward=own
    )


@dataclass(frozen=True, slots=True)
class DataSheet:
    """Peak figures of one GPU. Kernels reach only a share of them, see the efficiencies in `FleetConfig`.

    tflops: dense bfloat16 on the matrix units, in 10^12 operations per second.
    memory_gb_per_s: bandwidth of the GPU's memory, in 10^9 bytes per second.
    memory_gib: size of the GPU's memory.
    link_gb_per_s: bandwidth to the host in one direction, in 10^9 bytes per second.
    target: what kernels are compiled for.
    peer_gb_per_s: bandwidth to GPUs of the same machine in one direction, by NVLink or Infinity Fabric; 0
        without either.
    """

    tflops: float
    memory_gb_per_s: float
    memory_gib: float
    link_gb_per_s: float
    target: str
    peer_gb_per_s: float = 0.0

    @property
    def has_e4m3(self) -> bool:
        """Whether the engine supports kv_cache_dtype "fp8" on this GPU."""
        return self.target.startswith("sm_") and int(self.target[3:]) >= 89


# The SXM or OAM module where there is one. Links: PCIe 4.0 x16 has 32 GB/s, 5.0 has 64.
DATA_SHEETS = {
    "A100-80G": DataSheet(312, 2039, 80, 32, "sm_80", 300),
    "H100": DataSheet(989, 3350, 80, 64, "sm_90", 450),
    "H200": DataSheet(989, 4800, 141, 64, "sm_90", 450),
    "B200": DataSheet(2250, 8000, 180, 64, "sm_100", 900),
    "MI300X": DataSheet(1307, 5300, 192, 64, "gfx942", 448),
    "L4": DataSheet(121, 300, 24, 32, "sm_89"),
    "RTX4090": DataSheet(165, 1008, 24, 32, "sm_89"),
}


class Work(NamedTuple):
    """The amount of work of a step. `context` and `pairs` are means over layers, since their windows may
    differ.

    context: number of tokens whose K and V are read, including the step's own tokens.
    pairs: number of pairs of a query and a key that the query attends to.
    """

    num_tokens: int
    num_seqs: int
    num_sampled: int
    context: float
    pairs: float


# Sliding windows, and the share of layers that have each.
WindowShares = Sequence[tuple[int | None, float]]


def window_shares(model: ModelConfig) -> WindowShares:
    """Return the sliding windows of a model, each with its share of the layers with attention."""
    windows = Counter(attention.window for attention in model.attentions.values())
    num_layers = max(1, len(model.attentions))  # a stage may have none
    return [(window, n / num_layers) for window, n in windows.items()]


def work_of(schedule: Schedule, windows: WindowShares) -> Work:
    """Return the work of a step. Call this before `Scheduler.update` counts the step's tokens as computed."""
    computed = schedule.num_computed_tokens
    means = _mean_attention(computed, schedule.num_new_tokens, schedule.num_decode_tokens, windows)
    num_sampled = len(schedule.sampled) + sum(map(len, schedule.drafts))
    return Work(schedule.num_tokens, len(computed), num_sampled, *means)


def decode_work(num_seqs: int, length: int, windows: WindowShares) -> Work:
    """Return the work of a step in which num_seqs sequences of `length` tokens decode one token each."""
    means = _mean_attention([length - 1] * num_seqs, [1] * num_seqs, num_seqs, windows)
    return Work(num_seqs, num_seqs, num_seqs, *means)


def prompt_work(length: int, max_step_tokens: int, windows: WindowShares) -> list[Work]:
    """Return the work of each step that computes one prompt alone."""
    steps = []
    for start in range(0, length, max_step_tokens):
        new = min(max_step_tokens, length - start)
        means = _mean_attention([start], [new], 0, windows)
        steps.append(Work(new, 1, int(start + new == length), *means))
    return steps


def _mean_attention(
    computed: list[int], num_new: list[int], num_decodes: int, windows: WindowShares
) -> tuple[float, float]:
    """Return `Work.context` and `Work.pairs`."""
    context = pairs = 0.0
    for window, share in windows:
        reads, sees = _attention(computed, num_new, num_decodes, window)
        context += share * reads
        pairs += share * sees
    return context, pairs


def _attention(
    computed: list[int], num_new: list[int], num_decodes: int, window: int | None
) -> tuple[int, int]:
    """Return the keys read and the query-key pairs of a layer with this window. Decodes come first."""
    if window is None:
        context = sum(computed[:num_decodes]) + num_decodes
    else:
        context = sum(min(start + 1, window) for start in computed[:num_decodes])
    pairs = context
    for start, new in zip(computed[num_decodes:], num_new[num_decodes:], strict=True):
        # The first `below` queries attend to all keys up to their own, the others to a full window.
        below = new if window is None else min(new, max(0, window - start))
        seen = 0 if window is None else max(0, start - window + 1)
        context += start + new - seen
        pairs += below * start + below * (below + 1) // 2 + (new - below) * (window or 0)
    return context, pairs


class WorkCost(Protocol):
    """A cost model for steps: their duration in seconds."""

    def seconds(self, work: Work) -> float:
        """Return the seconds that this work takes."""


class Roofline:
    """The roofline model of Williams et al., 2009: overhead + max(flops / peak, bytes / bandwidth).

    flops: 2 for each weight of the layers and token, 2 for each weight of the output head and sampled token,
        and 2 for each dimension of a head's keys and values and each query-key pair.
    bytes: all weights once, except the embedding; K and V of the context; and K and V of the new tokens.
        Experts are counted as often as the step's tokens choose them, if all experts are equally likely.

    Norms, biases and activations (about one percent) are not counted, nor is it counted that most tokens of a
    prompt skip a part of the last layer.

    portion: the part of the model that computes the step.
    kv_bytes: bytes of one token's K and V in all layers.
    overhead: seconds per step for launches, scheduling and sampling.
    flops_efficiency, bandwidth_efficiency: the shares of the data sheet's figures that kernels reach.
    weight_bytes: the bytes of weights that a step reads; None computes them from the config.
    """

    def __init__(
        self,
        portion: Portion,
        sheet: DataSheet,
        kv_bytes: float,
        *,
        overhead: float,
        flops_efficiency: float,
        bandwidth_efficiency: float,
        weight_bytes: float | None = None,
    ) -> None:
        model = portion.model
        self._flops_per_token = 2 * model.num_active_layer_params
        self.flops_per_sample = 2 * portion.num_head_params
        self._flops_per_pair = 2 * model.num_attention_dims
        if weight_bytes is None:
            weight_bytes = layer_bytes(model) + table_bytes(model, portion.num_head_params)
        self._weight_bytes = weight_bytes
        self._num_layer_params = model.num_layer_params
        # None: a step reads all, however few tokens it has.
        is_dense = model.num_active_layer_params == model.num_layer_params
        self._num_read = None if is_dense else model.num_read_layer_params
        self._bytes_per_weight = weight_bytes / portion.num_step_params
        self._kv_bytes = kv_bytes
        self._state_bytes = sum(spec.num_bytes(element_bytes(model)) for spec in model.states.values())
        self.flops_per_s = sheet.tflops * 1e12 * flops_efficiency
        self.bytes_per_s = sheet.memory_gb_per_s * 1e9 * bandwidth_efficiency
        self._overhead = overhead

    def seconds(self, work: Work) -> float:
        """Return the duration of the step in seconds."""
        flops = (
            self._flops_per_token * work.num_tokens
            + self.flops_per_sample * work.num_sampled
            + self._flops_per_pair * work.pairs
        )
        moved = self._weight_bytes
        if self._num_read is not None:  # not of experts that no token has
            unread = self._num_layer_params - self._num_read(work.num_tokens)
            moved -= unread * self._bytes_per_weight
        moved += self._kv_bytes * (work.context + work.num_tokens)
        moved += 2 * self._state_bytes * work.num_seqs  # read and written
        return self._overhead + max(flops / self.flops_per_s, moved / self.bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """A linear fit to measured step times, as made by `python -m benchmarks.simulate`.

    step_s: seconds per step.
    token_s: seconds per computed token.
    seq_s: seconds per sequence in the step.
    context_s: seconds per token whose K and V are read.
    pair_s: seconds per pair of a query and a key that the query attends to.
    """

    step_s: float
    token_s: float = 0.0
    seq_s: float = 0.0
    context_s: float = 0.0
    pair_s: float = 0.0

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read a JSON object with these names from a file. Raises ConfigError naming the file."""
        names = [field.name for field in fields(cls)]
        try:
            given = json.loads(file.read_bytes())
            if not isinstance(given, dict) or "step_s" not in given or not set(given) <= set(names):
                raise ConfigError(f"must be an object with step_s and any of {', '.join(names[1:])}")
            for name, value in given.items():
                check_number(ConfigError, name, value, 0.0)
        except ValueError as error:  # from json, and our own
            raise ConfigError(f"{file}: {error}") from error
        return cls(**given)

    def divided(self, share: float) -> Coefficients:
        """Return the cost model of a process that does this share of the work."""
        return Coefficients(**{field.name: share * getattr(self, field.name) for field in fields(self)})

    def seconds(self, work: Work) -> float:
        """Return the duration of the step in seconds."""
        computed = self.token_s * work.num_tokens + self.seq_s * work.num_seqs
        return self.step_s + computed + self.context_s * work.context + self.pair_s * work.pairs


class StepCost:
    """The duration of a step on one device: for computing, and for swapping and copying blocks."""

    def __init__(self, compute: WorkCost, model: ModelConfig, sheet: DataSheet, block_bytes: int) -> None:
        self._compute = compute
        self._windows = window_shares(model)
        self._block_bytes = block_bytes
        self._link_bytes_per_s = sheet.link_gb_per_s * 1e9
        self._memory_bytes_per_s = sheet.memory_gb_per_s * 1e9

    def seconds(self, schedule: Schedule) -> float:
        """Return the duration of the step in seconds."""
        seconds = 0.0
        if schedule.requests:
            seconds = self._compute.seconds(work_of(schedule, self._windows))
        if schedule.swap_out or schedule.swap_in:
            swapped = (len(schedule.swap_out) + len(schedule.swap_in)) * self._block_bytes
            seconds += swapped / self._link_bytes_per_s
        if schedule.copies:  # read and written
            seconds += 2 * len(schedule.copies) * self._block_bytes / self._memory_bytes_per_s
        return seconds


# Sizes


def element_bytes(model: ModelConfig) -> int:
    """Return the size of one float weight in bytes."""
    return 4 if model.dtype == "float32" else 2


def layer_bytes(model: ModelConfig) -> float:
    """Return the size of all weights of the layers in bytes."""
    return model.num_layer_params * (model.layer_bits or 8 * element_bytes(model)) / 8


def table_bytes(model: ModelConfig, num_params: int) -> float:
    """Return the size in bytes of num_params weights of embedding and head."""
    return num_params * (model.table_bits or 8 * element_bytes(model)) / 8


def weight_bytes(portion: Portion) -> float:
    """Return the size in bytes of all weights that a rank holds."""
    return layer_bytes(portion.model) + table_bytes(portion.model, portion.num_table_params)


def blocks_that_fit(
    portion: Portion, sheet: DataSheet, utilization: float, block_bytes: int, all_state_bytes: int = 0
) -> int:
    """Return how many blocks fit in memory in addition to a rank's weights. Raises ResourceError if none
    fits.

    utilization: the share of the GPU's memory that may be used. all_state_bytes: the bytes of the recurrent
        states of all sequences.
    """
    usable_gib = sheet.memory_gib * utilization
    weights = weight_bytes(portion)
    left = sheet.memory_gib * GIB * utilization - weights - all_state_bytes
    num_blocks = math.floor(left / max(1, block_bytes))  # none where all layers keep states
    if num_blocks < 1:
        states = f" and {all_state_bytes / GIB:.1f} GiB of states" if all_state_bytes else ""
        raise ResourceError(
            f"no block fits beside {weights / GIB:.1f} GiB of weights{states} in {usable_gib:.1f} GiB; "
            "take a larger GPU or several (tensor_parallel_size, pipeline_parallel_size), or give num_blocks"
        )
    return num_blocks
