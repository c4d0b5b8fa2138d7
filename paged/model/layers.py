"""The layers of a decoder, thin over the kernels. Activations are ragged: one row per scheduled token."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..kernels.attention_options import AttentionOptions
from ..kernels.backend import Kernels
from .batch import Batch, Queries
from .config import ModelConfig, RopeConfig
from .kv_cache import KVCache
from .linear import Linear, TableForm


class Embedding(nn.Module):
    """Lookup of token ids in a table. Like `Linear`, it is loaded and then takes a form."""

    form: TableForm

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:  # i64[num_tokens] -> [num_tokens, hidden_size]
        return self.form.rows(token_ids)

    def take_form(self, form: Callable[[Tensor], TableForm]) -> None:
        """Replace the loaded weight by its form."""
        self.form = form(self.weight.detach())
        del self.weight


class RMSNorm(nn.Module):
    """Root mean square normalisation, see `kernels.rms_norm`."""

    def __init__(self, size: int, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps
        self.kernels = kernels

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps, residual)


class RotaryEmbedding(nn.Module):
    """cos and sin of every token's position, computed once per step for all layers."""

    inv_freq: Tensor  # f32[head_dim // 2]

    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self._table: tuple[Tensor, Tensor] | None = None
        self.rope, self.head_dim = config.rope, config.head_dim
        self.max_position_embeddings = config.max_position_embeddings
        # Frequencies are float32 in a model of any dtype.
        with torch.device("cpu"):
            frequencies = scaled_frequencies(config.rope, config.head_dim)
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def tabulate(self, num_positions: int) -> None:
        """Precompute cos and sin of the first positions. Call once: recorded steps point into the table."""
        assert self._table is None, "the table must not move"
        positions = torch.arange(num_positions, device=self.inv_freq.device)
        self._table = _cos_sin(positions, self.inv_freq)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:  # cos, sin: f32[num_tokens, head_dim // 2]
        if self._table is None:
            frequencies = self._dynamic_frequencies(batch) if self.rope.type == "dynamic" else self.inv_freq
            return _cos_sin(batch.positions, frequencies)
        cos, sin = self._table
        return self.kernels.take_rows(cos, batch.positions), self.kernels.take_rows(sin, batch.positions)

    def _dynamic_frequencies(self, batch: Batch) -> Tensor:  # f32[num_tokens, head_dim // 2]
        """Grow the base with the sequence, as transformers does for a request that runs alone.

        The length is a property of the token's request (see Batch.rope_lens), so that chunked prefill,
        preemption and other requests do not change the result.
        """
        assert batch.rope_lens is not None, "dynamic rope needs the lengths of the sequences"
        length = batch.rope_lens.clamp(min=self.max_position_embeddings)
        stretch = self.rope.factor * length / self.max_position_embeddings - (self.rope.factor - 1)
        base = self.rope.theta * stretch ** (self.head_dim / (self.head_dim - 2))
        return inverse_frequencies(base[:, None], self.head_dim)


def _cos_sin(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions[:, None] * frequencies
    return angles.cos(), angles.sin_()


def inverse_frequencies(base: Tensor, head_dim: int) -> Tensor:  # [..., 1] -> [..., head_dim // 2]
    """Compute base^(-2i / head_dim); Su et al., RoFormer (2021)."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=base.device) / head_dim
    return 1.0 / base.float() ** exponent


def scaled_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:  # f32[head_dim // 2]
    """Compute the frequencies that do not depend on the length: default, linear and Llama 3's."""
    frequencies = inverse_frequencies(torch.tensor([rope.theta], dtype=torch.float32), head_dim)
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type != "llama3":
        return frequencies
    # Llama 3.1: interpolate long wavelengths, keep short ones, blend those between.
    wavelength = 2 * math.pi / frequencies
    turns = rope.original_max_position_embeddings / wavelength
    blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


class Attention(nn.Module):
    """Grouped-query attention over the paged cache."""

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.scale = config.head_dim, config.head_dim**-0.5
        self.layer, self.window, self.kernels = layer, config.layer_windows[layer], kernels
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.split_sizes = [q_size, kv_size, kv_size]
        self.qkv = Linear(config.hidden_size, q_size + 2 * kv_size, bias=config.qkv_bias)
        self.output = Linear(q_size, config.hidden_size, bias=config.output_bias)
        self.eps = config.rms_norm_eps
        self.query_norm_weight = self.key_norm_weight = None
        if config.qk_norm:
            self.query_norm_weight = nn.Parameter(torch.empty(self.head_dim), requires_grad=False)
            self.key_norm_weight = nn.Parameter(torch.empty(self.head_dim), requires_grad=False)

    def project(
        self, hidden: Tensor, cos_sin: tuple[Tensor, Tensor], batch: Batch, kv_cache: KVCache
    ) -> Tensor:  # [num_tokens, hidden_size] -> [num_tokens, num_heads, head_dim]
        """Write K and V of the new tokens into the cache. Return their queries."""
        qkv = self.qkv(hidden).view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        key_cache, value_cache, key_scales, value_scales = kv_cache.layer(self.layer)
        return self.kernels.rotary_store_kv(
            qkv,
            *cos_sin,
            key_cache,
            value_cache,
            batch.slot_mapping[kv_cache.group_of[self.layer]],
            query_norm_weight=self.query_norm_weight,
            key_norm_weight=self.key_norm_weight,
            eps=self.eps,
            key_scales=key_scales,
            value_scales=value_scales,
        )

    def attend(self, query: Tensor, queries: Queries, kv_cache: KVCache) -> Tensor:
        """Attend to the cache: [num_queries, num_heads, head_dim] -> [num_queries, hidden_size]."""
        key_cache, value_cache, key_scales, value_scales = kv_cache.layer(self.layer)
        table = queries.block_tables[kv_cache.group_of[self.layer]]
        options = AttentionOptions(
            scale=self.scale,
            max_seqlen_q=queries.max_seqlen_q,
            min_seqlen_q=queries.min_seqlen_q,
            sliding_window=self.window,
            key_scales=key_scales,
            value_scales=value_scales,
        )
        inputs = (query, key_cache, value_cache, table, queries.seq_lens, queries.cu_seqlens_q, options)
        plan = queries.plans.get(key := (self.window, table.shape[1]))
        if plan is None:
            plan = queries.plans[key] = self.kernels.plan_attention(*inputs)
        attended = self.kernels.paged_attention(*inputs, plan)
        out: Tensor = self.output(attended.flatten(1))
        return out

    def hf_tensors(self) -> dict[str, Tensor]:
        """Return views of the parameters under their Hugging Face names, relative to the layer."""
        tensors: dict[str, Tensor] = {"self_attn.o_proj.weight": self.output.weight}
        names = [f"self_attn.{part}_proj" for part in "qkv"]
        tensors |= _split_rows(names, self.qkv, self.split_sizes)
        if self.output.bias is not None:
            tensors["self_attn.o_proj.bias"] = self.output.bias
        if self.query_norm_weight is not None and self.key_norm_weight is not None:
            tensors["self_attn.q_norm.weight"] = self.query_norm_weight
            tensors["self_attn.k_norm.weight"] = self.key_norm_weight
        return tensors


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). Gate and up are one product, which may include silu(gate) * up."""

    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        inner = config.intermediate_size
        self.split_sizes = [inner, inner]
        self.gate_up = Linear(config.hidden_size, 2 * inner, bias=config.mlp_bias, gated=True)
        self.down = Linear(inner, config.hidden_size, bias=config.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:  # [num_tokens, hidden_size] -> the same
        hidden = self.gate_up(hidden)
        out: Tensor = self.down(hidden if self.gate_up.form.gated else self.kernels.silu_and_mul(hidden))
        return out

    def hf_tensors(self) -> dict[str, Tensor]:
        """Return views of the parameters under their Hugging Face names, relative to the layer."""
        tensors: dict[str, Tensor] = {"mlp.down_proj.weight": self.down.weight}
        tensors |= _split_rows(["mlp.gate_proj", "mlp.up_proj"], self.gate_up, self.split_sizes)
        if self.down.bias is not None:
            tensors["mlp.down_proj.bias"] = self.down.bias
        return tensors


def _split_rows(names: list[str], fused: Linear, sizes: list[int]) -> dict[str, Tensor]:
    parts = dict(zip([f"{name}.weight" for name in names], torch.split(fused.weight, sizes), strict=True))
    if fused.bias is not None:
        parts |= zip([f"{name}.bias" for name in names], torch.split(fused.bias, sizes), strict=True)
    return parts
