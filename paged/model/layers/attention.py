"""Grouped-query attention over the paged cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.attention_options import AttentionOptions
from ...kernels.backend import Kernels
from ..batch import Batch, Queries
from ..cache.kv_cache import KVCache
from ..config import ModelConfig
from .linear import Linear, split_rows
from .norms import RMSNorm
from .rotary import rotated_order
from .token_rows import TokenRows


class Attention(nn.Module):
    """Grouped-query attention over the paged cache."""

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels) -> None:
        super().__init__()
        spec = config.layers[layer].attention
        shape = spec.kv
        assert shape.value_dim == shape.key_dim, f"layer {layer} has K and V of different head dimensions"
        self.spec = spec
        self.layer = layer
        self.kernels = kernels
        self.head_dim = shape.key_dim
        # Layers that agree in these share the plan of a step.
        self.plan_key = spec.window, config.kv_shapes.index(shape)
        self.rope = config.ropes.index((spec.rope, self.head_dim))  # whose angles it takes
        q_size = spec.num_heads * self.head_dim
        kv_size = shape.num_kv_heads * self.head_dim
        self.split_sizes = [q_size, kv_size, kv_size] if spec.has_kv else [q_size]
        self.qkv = Linear(config.hidden_size, sum(self.split_sizes), bias=spec.qkv_bias)
        self.output = Linear(q_size, config.hidden_size, bias=spec.output_bias)
        # Where dimensions of a head are rotated in other pairs than by the kernels.
        self.dim_order = rotated_order(spec.rope, self.head_dim)
        self.norm_by_head = spec.qk_norm == "head"
        # float32 in a model of any dtype, as the kernels take them.
        sinks = torch.empty(spec.num_heads, dtype=torch.float32)
        self.sinks = nn.Parameter(sinks, requires_grad=False) if spec.sinks else None
        self.query_norm = self.key_norm = self.value_norm = None
        eps = config.norm.eps
        unit_offset = config.norm.unit_offset
        if spec.qk_norm is not None:
            q_size, kv_size = (self.head_dim,) * 2 if self.norm_by_head else (q_size, kv_size)
            self.query_norm = RMSNorm(q_size, eps, kernels, unit_offset=unit_offset)
            if spec.has_kv:
                self.key_norm = RMSNorm(kv_size, eps, kernels, unit_offset=unit_offset)
        if spec.value_norm and spec.has_kv:
            self.value_norm = RMSNorm(self.head_dim, eps, kernels)

    def project(
        self, hidden: Tensor, rows: TokenRows, batch: Batch, kv_cache: KVCache
    ) -> Tensor:  # [num_tokens, hidden_size] -> [num_tokens, num_heads, head_dim]
        """Write K and V of the new tokens into the cache, if the layer has its own. Return their queries."""
        angles = rows.angles[self.rope]
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
            values = qkv[:, -self.spec.kv.num_kv_heads :]
            self.value_norm.into(values, values)
        caches: tuple[Tensor | None, Tensor | None, Tensor | None] = None, None, None
        if self.spec.has_kv:
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
            scale=self.spec.scale,
            max_seqlen_q=queries.max_seqlen_q,
            min_seqlen_q=queries.min_seqlen_q,
            sliding_window=self.spec.window,
            softcap=self.spec.softcap,
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
        if self.spec.stored != "separate":
            names = ["self_attn.qkv_proj"]
            sizes = [sum(sizes)]
        output = split_rows(["self_attn.o_proj"], self.output, [self.output.out_features])
        tensors = {**split_rows(names, self.qkv, sizes), **output}
        if self.spec.keys_as_values:
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
        if self.spec.keys_as_values:
            for fused in (self.qkv.weight, self.qkv.bias):
                if fused is not None:
                    _, key, value = torch.split(fused.detach(), self.split_sizes)
                    value.copy_(key)
        if self.spec.stored == "by_head":
            for stored in (self.qkv.weight, self.qkv.bias):
                if stored is not None:
                    by_head = stored.view(self.spec.num_heads, 3, -1)
                    stored.copy_(by_head.transpose(0, 1).reshape(stored.shape))
        if self.dim_order is None:
            return
        order = self.dim_order.to(self.qkv.weight.device)
        num_rotated = sum(self.split_sizes[:2])
        ordered = [x.detach()[:num_rotated] for x in (self.qkv.weight, self.qkv.bias) if x is not None]
        ordered += [norm.weight.detach() for norm in (self.query_norm, self.key_norm) if norm is not None]
        for x in ordered:
            x.copy_(x.view(-1, self.head_dim, *x.shape[1:])[:, order].flatten(0, 1))
