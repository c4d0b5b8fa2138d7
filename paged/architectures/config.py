"""ModelConfig: the shape and options of a decoder. `hf_config` reads it from a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .spec import AttentionSpec, KVShape, LayerSpec, LongContext, NormSpec, RopeConfig

if TYPE_CHECKING:
    from .states import StateSpec
    from .towers import VisionSpec

DEMO = Path(__file__).parents[1] / "demo"  # the checkpoint that model="demo" stands for


LAYERS = "model.layers."  # how the names of tensors of layers begin in a checkpoint of Llama
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.*)")  # a tensor of an expert within a layer
# Of rotary embeddings, which old versions of transformers and some trainers saved.
ROTARY_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with the same window and KVShape. They share block tables, since they see the same tokens."""

    window: int | None
    layers: tuple[int, ...]


class ExpertStack(NamedTuple):
    """A tensor of a layer that holds the same tensor of all experts, stacked along its first dimension.

    parts: the names, below experts.N, of the tensors among which each expert's rows are divided equally.
    flat: whether the last two dimensions are merged into one.
    num_inputs: the inputs of each row, if experts may be stored transposed, [in, out]; 0 if they never are.
        If a tensor's shape fits both, it is taken as transposed.
    """

    name: str  # within a layer, as `TensorNames.in_decoder` gives it
    parts: tuple[str, ...]
    flat: bool = False
    num_inputs: int = 0

    @property
    def rank(self) -> int:
        """The number of dimensions of the stacked tensor."""
        return 4 if self.flat else 2 if self.parts[0].endswith("bias") else 3


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The names of tensors in a checkpoint that holds more than the decoder.

    prefixes: pairs of a prefix in this checkpoint and the prefix in a checkpoint of the decoder alone.
    parts: pairs of a prefix within a layer and Llama's prefix for it.
    skipped_prefixes: the prefixes of tensors that are not loaded, such as other parts of the model and
        multi-token prediction.
    ignored_suffixes: the suffixes of tensors that are not parameters.
    factors: pairs of a tensor's name within a layer (as given by `in_decoder`) and its factors. These are
        pairs of a number of rows and the factor by which these rows are multiplied when they are read. For a
        weight in codes, its scales are multiplied instead. None: unknown, as the file has them multiplied.
    stacks: the stacked tensors that a checkpoint may have in place of one tensor for each expert.
    only_stacks: whether error messages name the tensors of experts by their place in a stack.
    """

    # The last is for checkpoints of the model without its head, such as Qwen3-Embedding.
    prefixes: tuple[tuple[str, str], ...] = (("model.", "model."), ("lm_head.", "lm_head."), ("", "model."))
    parts: tuple[tuple[str, str], ...] = ()
    skipped_prefixes: tuple[str, ...] = ()
    ignored_suffixes: tuple[str, ...] = ROTARY_BUFFERS
    factors: tuple[tuple[str, tuple[tuple[int, float], ...]], ...] | None = ()
    stacks: tuple[ExpertStack, ...] = ()
    only_stacks: bool = False

    def is_read(self, name: str) -> bool:
        """Return whether the tensor of this name may be a parameter of the decoder."""
        return not (name.startswith(self.skipped_prefixes) or name.endswith(self.ignored_suffixes))

    def in_decoder(self, name: str) -> str | None:
        """Return a tensor's name in a checkpoint of the decoder alone; None for an unknown tensor."""
        found = _with_other_start(name, self.prefixes)
        if found is None or not self.parts or not found.startswith(LAYERS):
            return found
        layer, _, part = found.removeprefix(LAYERS).partition(".")
        return f"{LAYERS}{layer}.{_with_other_start(part, self.parts) or part}"

    def stack_of(self, name: str) -> ExpertStack | None:
        """Return the expert stack in a tensor, given its name from `in_decoder`; None if it has none."""
        for stack in self.stacks:
            if name.endswith(stack.name) and name.startswith(LAYERS):
                _, _, part = name.removeprefix(LAYERS).partition(".")
                if part == stack.name:
                    return stack
        return None

    def in_checkpoint(self, name: str) -> str:
        """Return a name in this checkpoint that `in_decoder` would turn into `name`."""
        return next(iter(self.all_in_checkpoint(name)), name)

    def all_in_checkpoint(self, name: str) -> Iterator[str]:
        """Yield every name in this checkpoint that `in_decoder` would turn into `name`."""
        if name.startswith(LAYERS):
            layer, _, part = name.removeprefix(LAYERS).partition(".")
            parts = tuple((ours, theirs) for theirs, ours in self.parts)
            if self.only_stacks:
                part = self._in_stack(part)
            name = f"{LAYERS}{layer}.{_with_other_start(part, parts) or part}"
        for theirs, ours in self.prefixes:
            if name.startswith(ours):
                yield theirs + name[len(ours) :]

    def _in_stack(self, part: str) -> str:
        """Return the name of an expert's tensor as the name of its place in a stack."""
        expert = _EXPERT.fullmatch(part)
        if expert is None:
            return part
        return next((f"{s.name}[{expert[1]}]" for s in self.stacks if expert[2] in s.parts), part)


LLAMA_NAMES = TensorNames()


def _with_other_start(name: str, starts: tuple[tuple[str, str], ...]) -> str | None:
    """Replace the first listed prefix that a name begins with; None if it begins with none of them."""
    for old, new in starts:
        if name.startswith(old):
            return name if old == new else new + name[len(old) :]
    return None


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Per-layer embeddings (PLE): a vector of `size` for each token and layer; see `layers.layer_inputs`."""

    size: int
    vocab_size: int  # the number of tokens that have such vectors


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder: its layers, and the embedding, the norm and the head around them."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    max_position_embeddings: int
    rope: RopeConfig  # that of layers with full attention, which decides the longest context
    tie_word_embeddings: bool
    dtype: str  # of the checkpoint
    # Of a quantised checkpoint, on average: the bits of a weight of the layers, and of embedding and head.
    layer_bits: float | None = None
    table_bits: float | None = None
    learned_positions: bool = False  # a table of positions is added to the embeddings
    layer_inputs: LayerInputs | None = None
    transposed_weights: bool = False  # projections are stored as [in_features, out_features]
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what a sublayer adds to the residual
    logits_divisor: float = 1.0
    logits_softcap: float | None = None
    context_is_scaled: bool = False  # max_position_embeddings includes the factor of linear rope
    long_context: LongContext | None = None  # where longrope changes its factors, if requests grow so long
    exceeds_float16: bool = False  # activations may be larger than float16 represents
    tensor_names: TensorNames = LLAMA_NAMES
    max_model_len: int | None = None  # of an engine, which sets it; vLLM's ModelConfig has it, too
    # Whether tokens can be sampled. Without a head, as models that make embeddings are stored, the embedding
    # stands in for it, so that all else is as in any model.
    has_head: bool = True
    # Token ids that stand for images, audio or video, whose part of the model is not loaded; and their names
    placeholders: tuple[tuple[int, str], ...] = ()
    vision: VisionSpec | None = None  # what it sees images with, if that is loaded

    @property
    def max_context(self) -> int:
        """The longest sequence that the position embedding supports. A scaled rope may support more."""
        if self.rope.type in ("linear", "dynamic") and not self.context_is_scaled:
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.type == "yarn":
            extended = int(self.rope.original_max_position_embeddings * self.rope.factor)
            return max(self.max_position_embeddings, extended)
        return self.max_position_embeddings

    @property
    def residual_norm(self) -> NormSpec:
        """The norm of the residual stream, which is stored divided by residual_multiplier.

        With m = residual_multiplier, x / sqrt(mean(x²) + eps) does not change if x becomes x / m and eps
        becomes eps / m².
        """
        return replace(self.norm, eps=self.norm.eps / self.residual_multiplier**2)

    def for_context(self, max_model_len: int) -> ModelConfig:
        """Return the config for an engine whose sequences have at most this many tokens."""
        for rope, _ in self.ropes:
            if rope.grows_long(max_model_len):
                first_long = rope.original_max_position_embeddings + 1
                return replace(self, long_context=LongContext(first_long, max_model_len))
        return self

    # What follows from the layers, and is found once, as every layer asks for it

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        """The largest number of query heads of any layer."""
        return max(attention.num_heads for attention in self.attentions.values())

    @cached_property
    def attentions(self) -> dict[int, AttentionSpec]:
        """The attention of each layer that has attention, by layer."""
        return {i: layer.attention for i, layer in enumerate(self.layers) if layer.attention is not None}

    @cached_property
    def states(self) -> dict[int, StateSpec]:
        """The recurrent state of each layer that has one, by layer."""
        return {i: layer.state for i, layer in enumerate(self.layers) if layer.state is not None}

    @cached_property
    def ropes(self) -> tuple[tuple[RopeConfig, int], ...]:
        """The pairs of a rotary embedding and a head dimension that occur in the layers, each pair once."""
        return tuple(dict.fromkeys((each.rope, each.kv.key_dim) for each in self.attentions.values()))

    @cached_property
    def kv_shapes(self) -> dict[int, KVShape]:
        """The shape of the K and V that each layer reads, by layer."""
        return {i: attention.kv for i, attention in self.attentions.items()}

    @cached_property
    def kv_sources(self) -> dict[int, int]:
        """The layer whose K and V each layer reads, by layer; for most layers, the layer itself."""
        return {i: i if each.source is None else each.source for i, each in self.attentions.items()}

    @cached_property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """The layers that store K and V, in groups of one window and shape that take about equal bytes.

        Blocks of one pool serve all groups, so the layers of each group must fit into one block. A block is
        as large as the smallest set of layers with one window and shape, and at least as large as the largest
        layer. Larger sets are divided into groups of that size. Smaller groups leave space in their blocks
        unused.
        """
        sets: dict[tuple[int | None, KVShape], list[int]] = {}
        for index, attention in self.attentions.items():
            if attention.has_kv:
                sets.setdefault((attention.window, attention.kv), []).append(index)
        sizes = {shape: sum(shape.part_sizes) for _, shape in sets}
        room = max(*sizes.values(), min(len(layers) * sizes[key[1]] for key, layers in sets.items()))
        groups = []
        for (window, shape), layers in sets.items():
            count = room // sizes[shape]
            groups += [LayerGroup(window, tuple(layers[i : i + count])) for i in range(0, len(layers), count)]
        return tuple(groups)

    @property
    def num_params(self) -> int:
        """The number of weights, without norms and biases."""
        rows = self.vocab_size * (1 if self.tie_word_embeddings else 2)
        if self.learned_positions:
            rows += self.max_position_embeddings
        inputs = 0
        if self.layer_inputs is not None:
            inputs = self.layer_inputs.vocab_size * self.layer_inputs.size * self.num_layers
        return self.num_layer_params + rows * self.hidden_size + inputs

    @property
    def num_layer_params(self) -> int:
        """The number of weights in all layers, without embedding, head, norms and biases."""
        return self._outside_feed_forward + sum(
            part.num_params(self.hidden_size) for layer in self.layers for part in layer.feed_forwards
        )

    @property
    def num_active_layer_params(self) -> int:
        """The number of weights in all layers that take part in computing one token."""
        return self._outside_feed_forward + sum(
            part.num_active_params(self.hidden_size) for layer in self.layers for part in layer.feed_forwards
        )

    def num_read_layer_params(self, num_tokens: float) -> float:
        """Return how many weights of all layers a step with num_tokens tokens reads."""
        return self._outside_feed_forward + sum(
            part.num_read_params(self.hidden_size, num_tokens)
            for layer in self.layers
            for part in layer.feed_forwards
        )

    @property
    def num_active_params(self) -> int:
        """The number of weights, embedding and head included, that take part in computing one token."""
        return self.num_params - self.num_layer_params + self.num_active_layer_params

    @property
    def _outside_feed_forward(self) -> int:
        mixing = sum(layer.num_mixing_params(self.hidden_size) for layer in self.layers)
        inputs = 0 if self.layer_inputs is None else 3 * self.layer_inputs.size * self.num_layers
        return mixing + self.hidden_size * inputs

    @property
    def num_attention_dims(self) -> int:
        """The dimensions of a query and a value, summed over heads and layers.

        For each key that a token attends to, attention does this many multiply-adds.
        """
        attentions = self.attentions.values()
        return sum(each.num_heads * (each.kv.key_dim + each.kv.value_dim) for each in attentions)
