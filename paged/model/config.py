"""ModelConfig: the shape and options of a decoder. `hf_config` reads it from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

DEMO = Path(__file__).parents[1] / "demo"  # the checkpoint that model="demo" stands for


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A rotary embedding: its base, what it rotates, and how it is scaled beyond the trained context."""

    type: str  # a key of `families.rope.ROPE_TYPES`, or "none": nothing is rotated
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    rotary_dim: int | None = None  # the first dimensions of a head, which are rotated; None: all
    interleaved: bool = False  # pairs are neighbours in the checkpoint, not half a rotary_dim apart
    attention_factor: float = 1.0  # multiplies cos and sin
    rotated_part: float = 1.0  # of proportional's frequencies, the first ones; the others are 0
    beta_fast: float = 32.0  # yarn's rotations within the trained context above which a dimension is kept
    beta_slow: float = 1.0  # and below which it is interpolated
    truncate: bool = True  # whether yarn rounds the bounds between these to whole dimensions
    short_factors: tuple[float, ...] = ()  # longrope's divisors of frequencies within the trained context
    long_factors: tuple[float, ...] = ()  # and beyond it
    # Queries are multiplied by 1 + beta log(1 + floor(position / original_max_position_embeddings))
    query_scaling_beta: float = 0.0

    def grows_long(self, max_model_len: int) -> bool:
        """Return whether sequences of up to so many tokens may need the long factors."""
        return self.type == "longrope" and max_model_len > self.original_max_position_embeddings


LAYERS = "model.layers."  # how the names of tensors of layers begin in a checkpoint of Llama
NO_ROPE = RopeConfig("none", 1.0)
# Of rotary embeddings, which old versions of transformers and some trainers saved.
ROTARY_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


class LongContext(NamedTuple):
    """The length from which longrope rotates a request by its long factors.

    A request that reaches num_tokens is recomputed, with `offset` added to its positions. The offset selects
    the rows of long requests in the tables of all rotary embeddings.
    """

    num_tokens: int
    offset: int


@dataclass(frozen=True, slots=True)
class KVShape:
    """What the cache keeps of a token for one layer.

    value_in_key: V is the first value_dim numbers of each key, as in the latent of MLA (DeepSeek-V2, 2024).
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    value_in_key: bool = False

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """How many numbers a token has in K, and in V unless V lies in K."""
        key, value = self.num_kv_heads * self.key_dim, self.num_kv_heads * self.value_dim
        return (key,) if self.value_in_key else (key, value)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one window and one KVShape. They share block tables because they see the same tokens."""

    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NormNames:
    """Where a layer normalises, by the names of the norms in a checkpoint; None: not there."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None  # of the output of attention, before it is added to the residual
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The names of tensors in a checkpoint that holds more than the decoder.

    prefixes: pairs of a prefix in this checkpoint and the prefix in a checkpoint of the decoder alone.
    parts: pairs of a prefix within a layer and that of Llama.
    skipped_prefixes: of tensors that are not loaded: those of other parts, and of multi-token prediction.
    ignored_suffixes: of tensors that are not parameters.
    """

    # The last is for checkpoints of the model without its head, such as Qwen3-Embedding.
    prefixes: tuple[tuple[str, str], ...] = (("model.", "model."), ("lm_head.", "lm_head."), ("", "model."))
    parts: tuple[tuple[str, str], ...] = ()
    skipped_prefixes: tuple[str, ...] = ()
    ignored_suffixes: tuple[str, ...] = ROTARY_BUFFERS

    def is_read(self, name: str) -> bool:
        """Return whether a tensor may be a parameter of the decoder."""
        return not (name.startswith(self.skipped_prefixes) or name.endswith(self.ignored_suffixes))

    def around(self, text: TensorNames) -> TensorNames:
        """Return the names of this checkpoint, if its decoder has those of `text` as well."""
        skipped = tuple(
            theirs + name[len(ours) :]
            for theirs, ours in self.prefixes
            for name in text.skipped_prefixes
            if name.startswith(ours)
        )
        return replace(self, skipped_prefixes=self.skipped_prefixes + skipped)

    def in_decoder(self, name: str) -> str | None:
        """Return the name in a checkpoint of the decoder alone, or None for a tensor of nothing known."""
        found = _with_other_start(name, self.prefixes)
        if found is None or not found.startswith(LAYERS):
            return found
        layer, _, part = found.removeprefix(LAYERS).partition(".")
        return f"{LAYERS}{layer}.{_with_other_start(part, self.parts) or part}"

    def in_checkpoint(self, name: str) -> str:
        """Return a name by which `in_decoder` would find the tensor of this name."""
        if name.startswith(LAYERS):
            layer, _, part = name.removeprefix(LAYERS).partition(".")
            parts = tuple((ours, theirs) for theirs, ours in self.parts)
            name = f"{LAYERS}{layer}.{_with_other_start(part, parts) or part}"
        return _with_other_start(name, tuple((ours, theirs) for theirs, ours in self.prefixes)) or name


LLAMA_NAMES = TensorNames()


def _with_other_start(name: str, starts: tuple[tuple[str, str], ...]) -> str | None:
    """Replace the first of the starts that a name has; None: it has none."""
    return next((new + name[len(old) :] for old, new in starts if name.startswith(old)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder. The supported architectures differ in the flags only."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: Literal["head", "projection"] | None  # what the norms of Q and K go over
    layer_windows: tuple[int | None, ...]  # each layer's sliding window in tokens; None: full attention
    dtype: str  # of the checkpoint
    layer_ropes: tuple[RopeConfig, ...]  # each layer's; `rope` is that of layers with full attention
    layer_kv: tuple[KVShape, ...] = ()  # of each layer; empty: num_kv_heads of head_dim everywhere
    layer_sources: tuple[int, ...] = ()  # the layer whose K and V each layer reads; empty: its own
    layer_mlps: tuple[int, ...] = ()  # the inner size of each layer's MLP; empty: intermediate_size
    # Layers whose V is made of what W_k makes; their checkpoints have no W_v.
    keys_as_values: tuple[int, ...] = ()
    value_norm: bool = False  # each head of V is normalised, without a weight
    norms: NormNames = NormNames()
    norm_unit_offset: bool = False  # norms multiply by 1 + weight
    layer_norm: bool = False  # norms subtract the mean and have a bias
    activation: Literal["silu", "gelu_tanh", "gelu"] = "silu"
    gated_mlp: bool = True
    parallel_residual: bool = False  # attention and MLP both normalise and extend the same residual
    learned_positions: bool = False  # a table of positions is added to the embeddings
    fused_qkv: bool = False  # the checkpoint has one tensor self_attn.qkv_proj
    qkv_by_head: bool = False  # in which Q, K and V of one head follow those of another
    fused_gate_up: bool = False  # and one mlp.gate_up_proj
    transposed_weights: bool = False  # projections are stored as [in_features, out_features]
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_softcap: float | None = None
    attention_sinks: bool = False  # each head has a learned logit that takes a share of the softmax
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what a sublayer adds to the residual
    layer_scalars: bool = False  # the checkpoint has a number for each layer, which multiplies its output
    layer_input_size: int = 0  # of per-layer embeddings (PLE): see `parts.layer_inputs`; 0: there are none
    layer_input_vocab_size: int = 0  # the number of tokens that have such vectors
    logits_divisor: float = 1.0
    logits_softcap: float | None = None
    context_is_scaled: bool = False  # max_position_embeddings includes the factor of linear rope
    long_context: LongContext | None = None  # where longrope changes its factors, if requests grow so long
    exceeds_float16: bool = False  # activations may be larger than float16 represents
    tensor_names: TensorNames = LLAMA_NAMES
    # Token ids that stand for images, audio or video, whose part of the model is not loaded; and their names
    placeholders: tuple[tuple[int, str], ...] = ()

    @property
    def max_context(self) -> int:
        """The longest sequence that positions exist for; scaling may extend it."""
        if self.rope.type in ("linear", "dynamic") and not self.context_is_scaled:
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.type == "yarn":
            extended = int(self.rope.original_max_position_embeddings * self.rope.factor)
            return max(self.max_position_embeddings, extended)
        return self.max_position_embeddings

    @property
    def residual_eps(self) -> float:
        """The eps of norms of the residual, which is kept divided by residual_multiplier.

        x / sqrt(mean(x²) + eps) is the same number for x / m and eps / m².
        """
        return self.rms_norm_eps / self.residual_multiplier**2

    @property
    def ropes(self) -> tuple[tuple[RopeConfig, int], ...]:
        """The rotary embeddings of all layers and the dimensions of their heads, each pair once."""
        dims = (shape.key_dim for shape in self.kv_shapes)
        return tuple(dict.fromkeys(zip(self.layer_ropes, dims, strict=True)))

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """What each layer reads of a token."""
        return self.layer_kv or (KVShape(self.num_kv_heads, self.head_dim, self.head_dim),) * self.num_layers

    @property
    def kv_sources(self) -> tuple[int, ...]:
        """The layer whose K and V each layer reads."""
        return self.layer_sources or tuple(range(self.num_layers))

    @property
    def mlp_sizes(self) -> tuple[int, ...]:
        """The inner size of each layer's MLP."""
        return self.layer_mlps or (self.intermediate_size,) * self.num_layers

    def for_context(self, max_model_len: int) -> ModelConfig:
        """Return the model of an engine with sequences of up to so many tokens."""
        for rope in self.layer_ropes:
            if rope.grows_long(max_model_len):
                first_long = rope.original_max_position_embeddings + 1
                return replace(self, long_context=LongContext(first_long, max_model_len))
        return self

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """The layers with K and V of their own by window and shape, in groups that take about equal bytes.

        One pool's blocks fit every group. A block is as large as the smallest set of layers, and at least as
        large as the largest layer. Larger sets are divided into groups of that size. Smaller groups leave
        space in their blocks unused.
        """
        sets: dict[tuple[int | None, KVShape], list[int]] = {}
        for layer, source in enumerate(self.kv_sources):
            if source == layer:
                sets.setdefault((self.layer_windows[layer], self.kv_shapes[layer]), []).append(layer)
        sizes = {shape: sum(shape.part_sizes) for _, shape in sets}
        room = max(*sizes.values(), min(len(layers) * sizes[key[1]] for key, layers in sets.items()))
        groups = []
        for (window, shape), layers in sets.items():
            count = room // sizes[shape]
            groups += [LayerGroup(window, tuple(layers[i : i + count])) for i in range(0, len(layers), count)]
        return tuple(groups)

    @property
    def num_layer_params(self) -> int:
        """The number of weights in all layers, without embedding, head, norms and biases."""
        num_mlp = 3 if self.gated_mlp else 2
        width, numbers = self.hidden_size, num_mlp * sum(self.mlp_sizes)
        numbers += 3 * self.layer_input_size * self.num_layers
        for layer, (shape, source) in enumerate(zip(self.kv_shapes, self.kv_sources, strict=True)):
            numbers += self.num_heads * (shape.key_dim + shape.value_dim)  # Q and O
            numbers += sum(shape.part_sizes) * (source == layer)
        return width * numbers

    @property
    def num_attention_dims(self) -> int:
        """The dimensions of a query and a value, summed over heads and layers.

        For each key that a token attends to, attention multiplies and adds so many numbers.
        """
        return self.num_heads * sum(shape.key_dim + shape.value_dim for shape in self.kv_shapes)
