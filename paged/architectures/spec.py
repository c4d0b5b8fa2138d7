"""The records that describe a decoder layer: LayerSpec, and what it is made of. Families build them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from ..kernels.routing import RoutingOptions
    from .states import StateSpec


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A rotary embedding: its base, what it rotates, and how it is scaled beyond the trained context."""

    type: str  # a key of `families.reading.ROPE_TYPES`, or "none": nothing is rotated
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
        """Return whether sequences of up to max_model_len tokens may need the long factors."""
        return self.type == "longrope" and max_model_len > self.original_max_position_embeddings


NO_ROPE = RopeConfig("none", 1.0)


class LongContext(NamedTuple):
    """The length from which longrope rotates a request by its long scaling factors.

    A request that reaches num_tokens is recomputed with `offset` added to its positions. The offset selects
    the rows for long requests in the tables of all rotary embeddings.
    """

    num_tokens: int
    offset: int


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of a token's K and V in the cache, for one layer.

    value_in_key: whether V is the first value_dim numbers of each key, as in the latent of MLA (DeepSeek-V2,
        2024).
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    value_in_key: bool = False

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """Numbers per token in K and in V; only K's if V lies within K."""
        key = self.num_kv_heads * self.key_dim
        value = self.num_kv_heads * self.value_dim
        return (key,) if self.value_in_key else (key, value)


@dataclass(frozen=True, slots=True)
class NormSpec:
    """The norm used over the hidden size: RMSNorm or LayerNorm.

    unit_offset: whether the norm multiplies by 1 + weight.
    subtracts_mean: whether it is a LayerNorm; a LayerNorm also has a bias.
    """

    eps: float
    unit_offset: bool = False
    subtracts_mean: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Attention of one layer.

    source: the earlier layer whose K and V this layer reads; None if this layer has its own.
    """

    num_heads: int
    kv: KVShape  # what it reads of a token
    rope: RopeConfig
    scale: float  # of scores
    window: int | None = None  # in tokens; None: full attention
    softcap: float | None = None  # of scores
    sinks: bool = False  # each head has a learned logit that takes a share of the softmax
    source: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["head", "projection"] | None = None  # what the norms of Q and K go over
    value_norm: bool = False  # each head of V is normalised, without a weight
    keys_as_values: bool = False  # V is made of what W_k makes; the checkpoint has no W_v
    gate: bool = False  # q_proj has a gate behind each head's query: its sigmoid multiplies the output
    # How the checkpoint stores Q, K and V: a tensor each, all in self_attn.qkv_proj, or there head by head
    stored: Literal["separate", "fused", "by_head"] = "separate"

    @property
    def has_kv(self) -> bool:
        """Whether the layer has K and V of its own."""
        return self.source is None

    def num_params(self, hidden_size: int) -> int:
        """Return the number of weights, without norms and biases."""
        query_and_output = self.num_heads * (self.kv.key_dim * (1 + self.gate) + self.kv.value_dim)
        return hidden_size * (query_and_output + sum(self.kv.part_sizes) * self.has_kv)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardSpec:
    """The feed-forward part of one layer: down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate."""

    size: int  # of the inner activations
    activation: Literal["silu", "gelu_tanh", "gelu", "relu_squared"] = "silu"
    gated: bool = True
    bias: bool = False
    fused: bool = False  # the checkpoint stores gate and up as one tensor, mlp.gate_up_proj

    def num_params(self, hidden_size: int) -> int:
        """Return the number of weights, without biases."""
        return (3 if self.gated else 2) * self.size * hidden_size

    def num_active_params(self, hidden_size: int) -> int:
        """Return the number of weights that take part in computing one token."""
        return self.num_params(hidden_size)

    def num_read_params(self, hidden_size: int, num_tokens: float) -> float:  # noqa: ARG002
        """Return how many weights a step with num_tokens tokens reads: all of them."""
        return self.num_params(hidden_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts: a token's output is the weighted sum of the outputs of a few MLPs.

    The names of tensors are given as in a checkpoint, relative to a layer's mlp. or to its mlp.experts.N.
    """

    num_experts: int
    size: int  # of the inner activations of each expert
    routing: RoutingOptions
    activation: Literal["silu", "gelu_tanh", "clamped_swiglu", "relu_squared"] = "silu"
    gated: bool = True
    latent_size: int | None = (
        None  # of what experts take and give, between two projections; None: hidden_size
    )
    latent_bias: bool = False  # of these projections
    bias: bool = False  # of both projections of every expert
    limit: float = 7.0  # of clamped_swiglu, see `reference.clamped_swiglu`
    alpha: float = 1.702
    router: str = "gate"
    router_bias: bool = False
    router_scale: float | None = None  # the router has a norm of its own, whose output is multiplied by this
    correction_bias: bool = False  # the router has e_score_correction_bias, added to scores for choosing
    expert_scales: bool = False  # the router has per_expert_scale, a factor of each expert's weights
    parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # without a gate the last two
    # Gate and up are one tensor, gate_up_proj, whose rows alternate; projections are [in, out].
    interleaved: bool = False
    shared: FeedForwardSpec | None = None  # the MLP that every token has beside its experts
    shared_name: str = "shared_experts"
    shared_gate: str | None = None  # the sigmoid of this product multiplies its output

    @property
    def num_chosen(self) -> int:
        """The number of experts per token."""
        return self.routing.num_chosen

    def num_params(self, hidden_size: int) -> int:
        """Return the number of weights, without biases."""
        return self._beside(hidden_size) + self.num_experts * self.expert_params(hidden_size)

    def num_active_params(self, hidden_size: int) -> int:
        """Return the number of weights that take part in computing one token."""
        return self._beside(hidden_size) + self.num_chosen * self.expert_params(hidden_size)

    def num_read_params(self, hidden_size: int, num_tokens: float) -> float:
        """Return the expected number of weights that a step with num_tokens tokens reads, if all experts are
        equally likely.

        An expert is read unless no token chooses it. With t tokens that each choose k of E experts, E (1 - (1
        - k / E)^t) experts are read.
        """
        share: float = 1 - (1 - self.num_chosen / self.num_experts) ** num_tokens
        return self._beside(hidden_size) + share * self.num_experts * self.expert_params(hidden_size)

    def expert_params(self, hidden_size: int) -> int:
        """Return the number of weights of one expert."""
        return (3 if self.gated else 2) * self.size * (self.latent_size or hidden_size)

    def _beside(self, hidden_size: int) -> int:
        """Return the number of weights that every token is multiplied by."""
        shared = 0 if self.shared is None else self.shared.num_params(hidden_size)
        latent = 2 * (self.latent_size or 0)
        return shared + hidden_size * (self.num_experts + (self.shared_gate is not None) + latent)


@dataclass(frozen=True, slots=True)
class NormNames:
    """The checkpoint's names of the norms in a layer; None for a norm that the layer lacks."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None  # of the output of attention, before it is added to the residual
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One decoder layer. If it has both attention and a state, both read the same input, and their outputs
    are added.

    As in Nemotron-H, a layer may have no feed-forward part, or only a feed-forward part. Such a layer has one
    norm, before its only part.

    parallel: whether attention and the feed-forward part read the same residual, to which both outputs are
        added.
    scaled: whether the checkpoint has a scalar that multiplies the layer's output.
    """

    attention: AttentionSpec | None = None
    state: StateSpec | None = None
    feed_forward: FeedForwardSpec | ExpertsSpec | None
    norms: NormNames = NormNames()
    parallel: bool = False
    scaled: bool = False
    # Beside the MLP, as in Gemma 4: they read the residual, and each of the two is normalised.
    experts: ExpertsSpec | None = None

    @property
    def keeps(self) -> bool:
        """Whether the layer stores anything about earlier tokens: K and V of its own, or a state."""
        return self.state is not None or (self.attention is not None and self.attention.has_kv)

    def num_mixing_params(self, hidden_size: int) -> int:
        """Return the number of weights of the part that mixes tokens: attention, or a state."""
        parts = (self.attention, self.state)
        return sum(part.num_params(hidden_size) for part in parts if part is not None)

    @property
    def feed_forwards(self) -> tuple[FeedForwardSpec | ExpertsSpec, ...]:
        """The feed-forward parts that follow attention."""
        return tuple(part for part in (self.feed_forward, self.experts) if part is not None)
