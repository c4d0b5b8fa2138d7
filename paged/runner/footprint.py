"""Footprint: what an engine will take of a device's memory, before a weight is read or memory allocated."""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch

from ..architectures.layer_sizes import mixer_numbers
from ..architectures.spec import ExpertsSpec, FeedForwardSpec
from ..base.errors import ConfigError
from ..device.devices import is_here
from ..model.weights.loading import StoredWeights
from ..options.config import QUANTIZATIONS
from .draft_sizes import draft_sizes
from .fit import largest_step, max_partial_bytes
from .load import new_kernels, open_model
from .memory import Memory
from .sizes import ELEMENT_BYTES, GIB, Sizes

if TYPE_CHECKING:
    from ..kernels.operations import Kernels
    from ..model.weights.samples import SampledWeight

# The parts of a model by the beginning of a module's name, or of its place in a layer.
_PARTS = {
    "embedding": "embedding",
    "positions": "embedding",
    "inputs": "embedding",
    "head": "output head",
    "mixer": "attention",  # or a state
    "mlp": "feed-forward",
    "tower": "vision tower",
}
_OTHERS = "norms and the rest"
# What a sampler keeps of each request with penalties: a count and a flag for each token it may draw.
_HISTORY_BYTES = 5
# What the driver and torch's libraries take of a GPU. An assumption, for GPUs that are not there.
GPU_OVERHEAD = GIB // 2


class ModelSizes(NamedTuple):
    """The sizes of a model's parameters.

    by_part: the bytes in memory, by part of the model.
    in_files: the bytes in the files, by format.
    per_step: the bytes that a step reads: all but tables that are only looked up.
    layers, head: the weights that a step multiplies by; weights that are stored in the same way are joined.
    """

    by_part: Counter[str]
    in_files: StoredWeights
    per_step: int
    layers: list[SampledWeight]
    head: list[SampledWeight]

    @property
    def num_bytes(self) -> int:
        """The size of all parameters in memory, in bytes."""
        return self.by_part.total()


def model_sizes(sizes: Sizes, device: torch.device, directory: Path, kernels: Kernels) -> ModelSizes:
    """Return the sizes of the checkpoint in this directory. Raises the errors of `load_model`.

    device: the device for the weights. This machine need not have it.
    """
    from ..model.weights.samples import SampledWeight, WeightSampler

    if sizes.part is not None:  # other processes need not be there, nor plan the same
        sizes = replace(sizes, part=sizes.part.apart)
    model_config = sizes.model.for_context(sizes.max_model_len)
    by_part = Counter[str]()
    in_files = Counter[str]()
    per_step = 0
    layers: dict[int, SampledWeight] = {}
    head: dict[int, SampledWeight] = {}
    with open_model(sizes, model_config, device, directory, kernels) as (model, loader):
        sampler = WeightSampler(loader, device if is_here(device) else torch.device("cpu"))
        names = {module: name for name, module in model.named_modules()}
        for module in model.loadables():
            found = sampler.module(module)
            by_part[_part_of(names[module])] += found.num_bytes
            in_files += found.file_bytes
            if module.role == "table" or (module is model.embedding and not model.config.tie_word_embeddings):
                continue
            per_step += found.num_bytes
            alike = head if module in (model.head, model.embedding) else layers
            for sample, num_rows in found.weights:
                before = alike.get(id(sample))
                rows = num_rows if before is None else num_rows + before.num_rows
                alike[id(sample)] = SampledWeight(sample, rows)
        if sizes.config.enable_lora:
            from ..model.lora import slot_bytes

            config = sizes.config
            by_part["LoRA adapters"] = config.max_loras * slot_bytes(
                model, config.max_lora_rank, config.lora_target_modules
            )
    files = StoredWeights(in_files)
    return ModelSizes(by_part, files, per_step, [*layers.values()], [*head.values()])


def _part_of(name: str) -> str:
    first, *rest = name.split(".")
    place = rest[1] if first == "layers" and len(rest) > 1 else first
    return _PARTS.get(place, _OTHERS)


@dataclass(frozen=True, eq=False)
class Footprint:
    """A prediction of the memory that an engine of these sizes takes."""

    sizes: Sizes
    memory: Memory
    device: torch.device
    directory: Path
    kernels: Kernels
    model: ModelSizes
    draft: ModelSizes | None = None

    @classmethod
    def of(
        cls, sizes: Sizes, memory: Memory, device: torch.device, directory: Path, kernels: Kernels
    ) -> Self:
        """Return the footprint of the checkpoint in this directory. Raises the errors of `load_model`."""
        model = model_sizes(sizes, device, directory, kernels)
        draft = None
        if sizes.draft is not None:
            own = new_kernels(sizes.draft, device, checked=False)  # its heads may need others
            draft = model_sizes(sizes.draft, device, Path(sizes.draft.config.model), own)
        found = cls(sizes, memory, device, directory, kernels, model, draft)
        if not sizes.state_bytes:
            return found
        from .states import seats_in, with_snapshots

        found = replace(found, sizes=seats_in(sizes, found.room))
        room = None if sizes.config.num_blocks else found.kv_room
        return replace(found, sizes=with_snapshots(found.sizes, room))

    def with_options(self, **options: Any) -> Self:
        """Return the footprint with other options. Raises ConfigError for options that the engine refuses."""
        sizes = replace(self.sizes, config=replace(self.sizes.config, **options))
        if sizes.draft is not None:
            draft = sizes.draft
            sizes = replace(sizes, draft=draft_sizes(sizes, draft.model, Path(draft.config.model)))
        if "quantization" in options:
            return self.of(sizes, self.memory, self.device, self.directory, self.kernels)
        return replace(self, sizes=sizes)

    @property
    def on_gpu(self) -> bool:
        """Whether the engine computes on a GPU, which then also stores the state of requests."""
        return self.sizes.device == "cuda"

    @cached_property
    def activation_bytes(self) -> int:
        """The bytes of the largest step's activations: of the widest layer, or of the logits if they are
        larger.

        Partial results of split decodes are included, although the largest step may have none.
        """
        own = _activation_bytes(self.sizes, self.kernels)
        draft = self.sizes.draft
        return own if draft is None else max(own, _activation_bytes(draft, self.kernels))

    @cached_property
    def graph_bytes(self) -> int:
        """The bytes of CUDA graphs, including the memory reserved for graphs that are captured later."""
        if not self.on_gpu:
            return 0
        from .graph_memory import planned_bytes, planned_sizes

        total = 0
        for sizes in (self.sizes, self.sizes.draft):
            captured = [] if sizes is None else planned_sizes(sizes, self.kernels)
            if sizes is not None and captured:
                most = captured[-1]
                own = _bytes_of_step(sizes, most, most) + max_partial_bytes(sizes, self.kernels, most)
                total += planned_bytes(sizes, self.kernels, captured, own)
        return total

    @property
    def weight_bytes(self) -> int:
        """The bytes of all weights in memory."""
        return self.model.num_bytes + (0 if self.draft is None else self.draft.num_bytes)

    @property
    def state_bytes(self) -> int:
        """The bytes of recurrent states and, on a GPU, of requests' block tables and penalty counts."""
        return self.sizes.all_state_bytes + self._request_bytes

    @property
    def _request_bytes(self) -> int:
        if not self.on_gpu:
            return 0
        sizes = self.sizes
        entries = -(-sizes.max_model_len // sizes.block_size) * len(sizes.layout.groups)
        if sizes.draft is not None:
            entries += -(-sizes.draft.max_model_len // sizes.block_size)
        return sizes.config.num_seats * (4 * entries + _HISTORY_BYTES * sizes.model.vocab_size)

    @property
    def kv_room(self) -> int:
        """The bytes left for KV and rope tables; negative if everything else alone does not fit."""
        return self.room - self.sizes.all_state_bytes

    @property
    def room(self) -> int:
        """The bytes left for KV, rope tables and recurrent states."""
        config = self.sizes.config
        left = self.memory.free - self.weight_bytes
        if not self.on_gpu:
            return int(left * config.cpu_memory_utilization)
        kept = self.memory.total - int(self.memory.total * config.gpu_memory_utilization)
        return left - kept - self.activation_bytes - self.graph_bytes - self._request_bytes

    @property
    def rope_bytes(self) -> int:
        """The bytes of rope tables."""
        return self.sizes.all_rope_bytes(max(1, self.num_blocks))

    @cached_property
    def num_blocks(self) -> int:
        """The number of KV blocks: as the option says, or else as many as fit; 0 if no token fits."""
        return self.sizes.config.num_blocks or self.sizes.blocks_in(self.kv_room)

    @property
    def kv_bytes(self) -> int:
        """The bytes of the KV cache."""
        return self.num_blocks * self.sizes.block_bytes

    @property
    def num_bytes(self) -> int:
        """The bytes of everything together."""
        own = self.weight_bytes + self.activation_bytes + self.graph_bytes + self.state_bytes
        return own + self.rope_bytes + self.kv_bytes

    @property
    def longest(self) -> int:
        """The length in tokens of the longest request that fits, at most max_model_len; 0 if none fits."""
        if not self.num_blocks or (self.sizes.config.num_blocks and self.num_bytes > self.memory.free):
            return 0
        return self.sizes.new_block_manager(self.num_blocks).longest_fit(self.sizes.max_model_len)

    @property
    def fits(self) -> bool:
        """Whether a request of max_model_len tokens can run."""
        return self.longest == self.sizes.max_model_len

    def num_sequences(self, length: int) -> int:
        """Return how many requests with this many tokens can run at once."""
        if self.longest < length:
            return 0
        manager = self.sizes.new_block_manager(self.num_blocks)
        return min(self.num_blocks // manager.most_blocks(length), self.sizes.config.num_seats)

    def __str__(self) -> str:
        parts = {
            "weights": self.model.num_bytes,
            "draft model": 0 if self.draft is None else self.draft.num_bytes,
            "activations": self.activation_bytes,
            "CUDA graphs": self.graph_bytes,
            "states of requests": self.state_bytes,
            "KV cache": self.kv_bytes,
        }
        listed = ", ".join(f"{name} {size / GIB:,.2f} GiB" for name, size in parts.items() if size)
        return (
            f"{listed} of {self.memory.free / GIB:,.2f} GiB that are free; KV of a token takes "
            f"{self.sizes.kv_bytes_per_token / 1024:,.4g} KiB"
        )


def _activation_bytes(sizes: Sizes, kernels: Kernels) -> int:
    """Return the bytes of activations of a model's largest step, as of `Footprint.activation_bytes`."""
    lengths = largest_step(sizes)
    return _bytes_of_step(sizes, sum(lengths), len(lengths)) + max_partial_bytes(sizes, kernels)


def _bytes_of_step(sizes: Sizes, num_tokens: int, num_logits: int) -> int:
    """Return the bytes of activations of a step that computes so many tokens and rows of logits."""
    model = sizes.model
    element = ELEMENT_BYTES[sizes.dtype]
    widest = 0
    for layer in model.layers:
        mixed, attended = mixer_numbers(layer)
        inner = sum(_inner_numbers(part, model.hidden_size) for part in layer.feed_forwards)
        own = 4 * model.hidden_size + (mixed + inner) // sizes.shard.count
        gathered = 0
        if not sizes.shard.is_whole:  # a model without experts
            gathered = (
                2 * attended if layer.state is not None else attended
            )  # norms of it take its gate along
            gathered += sum(part.size for part in layer.feed_forwards)
        widest = max(widest, own + gathered)
    angles = 4 * sum(head_dim for _, head_dim in model.ropes)
    layers = num_tokens * (widest * element + angles)
    logits = num_logits * model.vocab_size * 4 * 2
    return max(layers, logits)


def _inner_numbers(spec: FeedForwardSpec | ExpertsSpec, hidden_size: int) -> int:
    """Return how many numbers a token has within a feed-forward part at most."""
    if isinstance(spec, FeedForwardSpec):
        return spec.size * (3 if spec.gated else 1)
    shared = 0 if spec.shared is None else _inner_numbers(spec.shared, hidden_size)
    # Each expert has a copy of its input and its output; logits are float32.
    outer = spec.latent_size or hidden_size
    inner = spec.num_chosen * (2 * outer + (3 if spec.gated else 1) * spec.size)
    return max(shared, inner) + 2 * (spec.latent_size or 0) + 2 * spec.num_experts


def ways_to_fit(footprint: Footprint) -> list[str]:
    """Return changes of options, each of which alone would make a request of max_model_len fit.

    Some changes also need shorter requests. The last change is to the largest max_model_len that fits without
    any other change.
    """
    config = footprint.sizes.config
    found = []
    choices = [*(("quantization", name) for name in QUANTIZATIONS), ("kv_cache_dtype", "int8")]
    for name, value in choices:
        longest = 0 if getattr(config, name) == value else _longest(footprint, **{name: value})
        if longest > footprint.longest:
            shorter = f" with max_model_len={longest}" if longest < footprint.sizes.max_model_len else ""
            found.append(f"{name}={value!r}{shorter}")
    if footprint.graph_bytes:
        eager = footprint.with_options(enforce_eager=True)
        if eager.longest > footprint.longest:
            shorter = f" with max_model_len={eager.longest}" if not eager.fits else ""
            found.append(f"enforce_eager=True{shorter}")
    counts = {}
    if footprint.on_gpu or footprint.sizes.state_bytes:
        counts["max_num_seqs"] = config.num_seats
    if footprint.on_gpu:
        counts["max_num_batched_tokens"] = footprint.sizes.max_num_batched_tokens
    for name, most in counts.items():
        if largest := _largest_that_fits(footprint, name, most):
            found.append(f"{name}={largest}")
    if config.num_blocks is not None and (most := footprint.with_options(num_blocks=None).num_blocks):
        found.append(f"num_blocks={most}")
    if largest := _largest_that_fits(footprint, "max_model_len", footprint.sizes.max_model_len):
        found.append(f"max_model_len={largest}")
    return found


def _longest(footprint: Footprint, **options: Any) -> int:
    """Return the most tokens of a request with other options; 0 if they are refused."""
    try:
        return footprint.with_options(**options).longest
    except ConfigError:  # such as for weights that are quantised already
        return 0


def _largest_that_fits(footprint: Footprint, name: str, most: int) -> int:
    """Return the largest value of an option, if all smaller ones fit too; 0 if none does."""
    return bisect.bisect_left(
        range(1, most + 1), True, key=lambda value: not footprint.with_options(**{name: value}).fits
    )


def shortage(footprint: Footprint) -> str:
    """Describe the memory of an engine that does not fit, and the options that would make it fit."""
    if footprint.fits:  # by these figures; what was measured differs
        return str(footprint)
    ways = " or ".join(ways_to_fit(footprint))
    return f"{footprint}; {f'would fit: {ways}' if ways else 'no option makes it fit'}"
