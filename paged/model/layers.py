"""The layers of a decoder, thin over the kernels. Activations are ragged: one row per scheduled token."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.attention_options import AttentionOptions
from ..kernels.backend import Kernels
from .batch import Batch, Queries
from .cache.kv_cache import KVCache
from .config import ModelConfig, RopeConfig
from .linear import Linear, split_rows
from .parts.norms import RMSNorm


class Angles(NamedTuple):
    """The cosines and sines that rotate each token's query and key, and the factor of its query.

    query_factors: multiply each token's queries; None: all of them are 1.
    """

    cos: Tensor  # f32[num_tokens, head_dim // 2]
    sin: Tensor  # like cos
    query_factors: Tensor | None  # f32[num_tokens, 1]

    def of_rows(self, take: Callable[[Tensor], Tensor]) -> Angles:
        """Return those of some tokens, whose rows `take` takes out of a tensor."""
        factors = self.query_factors
        return Angles(take(self.cos), take(self.sin), None if factors is None else take(factors))


class RotaryEmbedding(nn.Module):
    """The angles of every token's position, computed once per step for all layers with these frequencies."""

    inv_freq: Tensor  # f32[rotary_dim // 2]
    long_inv_freq: Tensor  # like inv_freq, for positions from long_offset on, if that is not 0

    def __init__(self, rope: RopeConfig, head_dim: int, config: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self._table: Angles | None = None
        self.rope, self.head_dim = rope, head_dim
        self.rotary_dim = rope.rotary_dim or head_dim
        self.max_position_embeddings = config.max_position_embeddings
        # Frequencies are float32 in a model of any dtype.
        with torch.device("cpu"):
            frequencies = scaled_frequencies(rope, self.rotary_dim)
            long = scaled_frequencies(rope, self.rotary_dim, is_long=True)
        self.long_offset = config.long_context.offset if config.long_context else 0
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.register_buffer("long_inv_freq", long, persistent=False)

    @property
    def is_tabulated(self) -> bool:
        """Whether a step takes its angles from a table."""
        return self._table is not None

    def tabulate(self, num_positions: int) -> None:
        """Precompute the angles of the first positions. Call once: recorded steps point into the table."""
        assert self._table is None, "the table must not move"
        positions = torch.arange(num_positions, device=self.inv_freq.device)
        angles = self._angles(positions, self.inv_freq)
        if self.long_offset:
            angles = _with_long_rows(angles, self._angles(positions, self.long_inv_freq), self.long_offset)
        if num_positions <= self.rope.original_max_position_embeddings:
            angles = angles._replace(query_factors=None)
        self._table = angles

    def forward(self, batch: Batch) -> Angles:
        if self._table is None:
            if self.rope.type == "dynamic":
                return self._angles(batch.positions, self._dynamic_frequencies(batch))
            if not self.long_offset:
                return self._angles(batch.positions, self.inv_freq)
            is_long = (batch.positions >= self.long_offset)[:, None]
            frequencies = torch.where(is_long, self.long_inv_freq, self.inv_freq)
            return self._angles(batch.positions % self.long_offset, frequencies)
        take_rows, positions, (cos, sin, factors) = self.kernels.take_rows, batch.positions, self._table
        if factors is not None:
            factors = take_rows(factors, positions)
        return Angles(take_rows(cos, positions), take_rows(sin, positions), factors)

    def _angles(self, positions: Tensor, frequencies: Tensor) -> Angles:
        """Compute the angles of positions: cos 1 and sin 0 for dimensions that are not rotated."""
        angles = positions[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin_()
        if self.rope.attention_factor != 1.0:
            cos, sin = cos.mul_(self.rope.attention_factor), sin.mul_(self.rope.attention_factor)
        if kept := (self.head_dim - self.rotary_dim) // 2:
            cos, sin = F.pad(cos, (0, kept), value=1.0), F.pad(sin, (0, kept))
        return Angles(cos, sin, self._query_factors(positions))

    def _query_factors(self, positions: Tensor) -> Tensor | None:
        """Compute the factors of queries, which grow with the position and sharpen attention (Llama 4)."""
        beta, trained = self.rope.query_scaling_beta, self.rope.original_max_position_embeddings
        if not beta:
            return None
        spans = positions.div(trained, rounding_mode="floor")  # trained contexts before the token's own
        return (1 + beta * torch.log(1 + spans.float()))[:, None]

    def _dynamic_frequencies(self, batch: Batch) -> Tensor:  # f32[num_tokens, rotary_dim // 2]
        """Grow the base with the sequence, as transformers does for a request that runs alone.

        The length is a property of the token's request (see Batch.rope_lens), so that chunked prefill,
        preemption and other requests do not change the result.
        """
        assert batch.rope_lens is not None, "dynamic rope needs the lengths of the sequences"
        trained = self.max_position_embeddings
        lengths = batch.rope_lens.clamp(min=trained)
        if lengths.is_cuda:
            return inverse_frequencies(
                dynamic_base(self.rope, self.rotary_dim, trained, lengths[:, None]), self.rotary_dim
            )
        # On a CPU the last bit of torch's powers depends on where a number lies in a tensor.
        rows = (_dynamic_row(self.rope, self.rotary_dim, trained, length) for length in lengths.tolist())
        return torch.stack([*rows])


Length = TypeVar("Length", Tensor, float)


def dynamic_base(rope: RopeConfig, rotary_dim: int, trained: int, length: Length) -> Length:
    """Return the base of dynamic rope for sequences of a length, which is at least the trained one."""
    stretch = rope.factor * length / trained - (rope.factor - 1)
    base: Length = rope.theta * stretch ** (rotary_dim / (rotary_dim - 2))
    return base


@lru_cache(maxsize=1024)
def _dynamic_row(rope: RopeConfig, rotary_dim: int, trained: int, length: int) -> Tensor:
    base = dynamic_base(rope, rotary_dim, trained, float(length))
    return inverse_frequencies(torch.tensor([base], dtype=torch.float32), rotary_dim)


def _with_long_rows(short: Angles, long: Angles, offset: int) -> Angles:
    """Return one table with the rows of `long` from `offset` on. Nothing reads the rows between."""

    def joined(first: Tensor, second: Tensor) -> Tensor:
        rows = first.new_empty(offset + len(second), first.shape[1])
        rows[: len(first)], rows[offset:] = first, second
        return rows

    factors = short.query_factors, long.query_factors
    return Angles(
        joined(short.cos, long.cos),
        joined(short.sin, long.sin),
        None if factors[0] is None or factors[1] is None else joined(factors[0], factors[1]),
    )


def inverse_frequencies(base: Tensor, rotary_dim: int) -> Tensor:  # [..., 1] -> [..., rotary_dim // 2]
    """Compute base^(-2i / rotary_dim); Su et al., RoFormer (2021)."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=base.device) / rotary_dim
    return 1.0 / base.float() ** exponent


def scaled_frequencies(
    rope: RopeConfig, rotary_dim: int, *, is_long: bool = False
) -> Tensor:  # f32[rotary_dim // 2]
    """Compute the frequencies; dynamic rope scales them in each step.

    is_long: those of longrope for requests beyond the trained context.
    """
    frequencies = inverse_frequencies(torch.tensor([rope.theta], dtype=torch.float32), rotary_dim)
    if rope.type == "none":
        return torch.zeros_like(frequencies)
    if rope.type == "proportional":
        frequencies[int(rope.rotated_part * rotary_dim // 2) :] = 0
    if rope.type in ("linear", "proportional"):
        return frequencies / rope.factor
    if rope.type == "longrope":
        factors = rope.long_factors if is_long else rope.short_factors
        return frequencies / torch.tensor(factors, dtype=torch.float32)
    if rope.type == "yarn":
        kept = _yarn_kept(rope, rotary_dim)
        return (1 - kept) * frequencies / rope.factor + kept * frequencies
    if rope.type != "llama3":
        return frequencies
    # Llama 3.1: interpolate long wavelengths, keep short ones, blend those between.
    wavelength = 2 * math.pi / frequencies
    turns = rope.original_max_position_embeddings / wavelength
    blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn_kept(rope: RopeConfig, rotary_dim: int) -> Tensor:
    """Return the share of each frequency that is kept; the rest is interpolated (Peng et al., YaRN, 2023)."""

    def dimension(rotations: float) -> float:
        """Return the dimension whose frequency makes so many rotations within the trained context."""
        wavelength = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = (torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    return 1 - ramp.clamp(0.0, 1.0)


def rotated_order(rope: RopeConfig, head_dim: int) -> Tensor | None:  # i64[head_dim]
    """Return the order of a head's dimensions in which the kernels rotate i with i + head_dim // 2.

    Those that are not rotated come behind the others of each half. None: the order of the checkpoint.
    """
    rotary_dim = rope.rotary_dim or head_dim
    if rotary_dim == head_dim and not rope.interleaved:
        return None
    dims = torch.arange(head_dim, device="cpu")
    rotated, others = dims[:rotary_dim], dims[rotary_dim:]
    halves = (rotated[::2], rotated[1::2]) if rope.interleaved else rotated.chunk(2)
    both = zip(halves, others.tensor_split(2), strict=True)
    return torch.cat([part for half in both for part in half])


class Attention(nn.Module):
    """Grouped-query attention over the paged cache."""

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels) -> None:
        super().__init__()
        shape = config.kv_shapes[layer]
        assert shape.value_dim == shape.key_dim, f"layer {layer} has K and V of different head dimensions"
        self.num_heads, self.num_kv_heads = config.num_heads, shape.num_kv_heads
        self.head_dim, self.softcap = shape.key_dim, config.attention_softcap
        self.scale = config.attention_scale or self.head_dim**-0.5
        self.layer, self.kernels = layer, kernels
        self.window = config.layer_windows[layer]
        # Layers that agree in these share the plan of a step.
        self.plan_key = self.window, config.kv_shapes.index(shape)
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        # Whether the layer has K and V of its own; it reads another layer's otherwise.
        self.has_kv = config.kv_sources[layer] == layer
        self.split_sizes = [q_size, kv_size, kv_size] if self.has_kv else [q_size]
        self.qkv = Linear(config.hidden_size, sum(self.split_sizes), bias=config.qkv_bias)
        self.output = Linear(q_size, config.hidden_size, bias=config.output_bias)
        self.fused, self.by_head = config.fused_qkv, config.qkv_by_head
        # Where dimensions of a head are rotated in other pairs than by the kernels.
        self.dim_order = rotated_order(config.layer_ropes[layer], self.head_dim)
        self.norm_by_head = config.qk_norm == "head"
        # float32 in a model of any dtype, as the kernels take them.
        sinks = torch.empty(self.num_heads, dtype=torch.float32)
        self.sinks = nn.Parameter(sinks, requires_grad=False) if config.attention_sinks else None
        self.keys_as_values = layer in config.keys_as_values
        self.query_norm = self.key_norm = self.value_norm = None
        eps, unit_offset = config.rms_norm_eps, config.norm_unit_offset
        if config.qk_norm is not None:
            q_size, kv_size = (self.head_dim,) * 2 if self.norm_by_head else (q_size, kv_size)
            self.query_norm = RMSNorm(q_size, eps, kernels, unit_offset=unit_offset)
            if self.has_kv:
                self.key_norm = RMSNorm(kv_size, eps, kernels, unit_offset=unit_offset)
        if config.value_norm and self.has_kv:
            self.value_norm = RMSNorm(self.head_dim, eps, kernels)

    def project(
        self, hidden: Tensor, angles: Angles, batch: Batch, kv_cache: KVCache
    ) -> Tensor:  # [num_tokens, hidden_size] -> [num_tokens, num_heads, head_dim]
        """Write K and V of the new tokens into the cache, if the layer has its own. Return their queries."""
        qkv: Tensor = self.qkv(hidden)
        options: dict[str, Any] = {}
        if self.query_norm is not None:
            if self.norm_by_head:
                options = {
                    "query_norm_weight": self.query_norm.weight,
                    "key_norm_weight": self.key_norm.weight if self.key_norm is not None else None,
                    "eps": self.query_norm.eps,
                    "unit_offset": self.query_norm.unit_offset,
                }
            else:
                query, *others = torch.split(qkv, self.split_sizes, dim=1)
                self.query_norm.into(query, query)
                if self.key_norm is not None:
                    key, _ = others
                    self.key_norm.into(key, key)
        qkv = qkv.view(-1, sum(self.split_sizes) // self.head_dim, self.head_dim)
        if self.value_norm is not None:
            values = qkv[:, -self.num_kv_heads :]
            self.value_norm.into(values, values)
        caches: tuple[Tensor | None, Tensor | None, Tensor | None] = None, None, None
        if self.has_kv:
            key_cache, value_cache, key_scales, value_scales = kv_cache.layer(self.layer)
            options |= {"key_scales": key_scales, "value_scales": value_scales}
            caches = key_cache, value_cache, batch.slot_mapping[kv_cache.group_of[self.layer]]
        query = self.kernels.rotary_store_kv(qkv, angles.cos, angles.sin, *caches, **options)
        if angles.query_factors is not None:
            self.kernels.scale_rows(query.view(len(query), -1), angles.query_factors.view(-1))
        return query

    def attend(self, query: Tensor, queries: Queries, kv_cache: KVCache) -> Tensor:
        """Attend to the cache: [num_queries, num_heads, head_dim] -> [num_queries, hidden_size]."""
        key_cache, value_cache, key_scales, value_scales = kv_cache.layer(self.layer)
        table = queries.block_tables[kv_cache.group_of[self.layer]]
        options = AttentionOptions(
            scale=self.scale,
            max_seqlen_q=queries.max_seqlen_q,
            min_seqlen_q=queries.min_seqlen_q,
            sliding_window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
            key_scales=key_scales,
            value_scales=value_scales,
        )
        inputs = (query, key_cache, value_cache, table, queries.seq_lens, queries.cu_seqlens_q, options)
        plan = queries.plans.get(key := (*self.plan_key, query.stride(0), table.shape[1]))
        if plan is None:
            plan = queries.plans[key] = self.kernels.plan_attention(*inputs)
        attended = self.kernels.paged_attention(*inputs, plan)
        out: Tensor = self.output(attended.flatten(1))
        return out

    def hf_tensors(self) -> dict[str, Tensor]:
        """Return views of the parameters under their Hugging Face names, relative to the layer."""
        sizes = self.split_sizes
        names = [f"self_attn.{part}_proj" for part in "qkv"[: len(sizes)]]
        if self.fused:
            names, sizes = ["self_attn.qkv_proj"], [sum(sizes)]
        output = split_rows(["self_attn.o_proj"], self.output, [self.output.out_features])
        tensors = {**split_rows(names, self.qkv, sizes), **output}
        if self.keys_as_values:
            tensors = {name: x for name, x in tensors.items() if ".v_proj." not in name}
        if self.query_norm is not None:
            tensors["self_attn.q_norm.weight"] = self.query_norm.weight
        if self.key_norm is not None:
            tensors["self_attn.k_norm.weight"] = self.key_norm.weight
        if self.sinks is not None:
            tensors["self_attn.sinks"] = self.sinks
        return tensors

    def finish_loading(self) -> None:
        """Fill the weights that the checkpoint lacks, and order the others as the kernels take them: Q, K, V,
        and dimensions of Q and K as rotated.

        Q Kᵀ is the same in any order of its dimensions.
        """
        if self.value_norm is not None:
            self.value_norm.weight.fill_(1.0)
        if self.keys_as_values:
            for fused in (self.qkv.weight, self.qkv.bias):
                if fused is not None:
                    _, key, value = torch.split(fused.detach(), self.split_sizes)
                    value.copy_(key)
        if self.by_head:
            for stored in (self.qkv.weight, self.qkv.bias):
                if stored is not None:
                    by_head = stored.view(self.num_heads, 3, -1)
                    stored.copy_(by_head.transpose(0, 1).reshape(stored.shape))
        if self.dim_order is None:
            return
        order = self.dim_order.to(self.qkv.weight.device)
        num_rotated = sum(self.split_sizes[:2])
        ordered = [x.detach()[:num_rotated] for x in (self.qkv.weight, self.qkv.bias) if x is not None]
        ordered += [norm.weight.detach() for norm in (self.query_norm, self.key_norm) if norm is not None]
        for x in ordered:
            x.copy_(x.view(-1, self.head_dim, *x.shape[1:])[:, order].flatten(0, 1))
