"""Grouped-query attention over the paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...architectures.config import LAYERS, ModelConfig
from ...architectures.spec import AttentionSpec
from ...checkpoints.stored import StoredRows
from ...kernels.attention_options import AttentionOptions
from ...kernels.steps import call_within_step
from ..batch import Batch, Queries
from ..cache.kv_cache import KVCache
from ..exchanges import gather, group_of
from ..part import Shard
from ..weights.loading import KVScales, Loadable, Loader
from .linear import Linear
from .norms import RMSNorm
from .rotary import TokenRows, rotated_order

if TYPE_CHECKING:
    from ...kernels.operations import Kernels


class Attention(Loadable):
    """Grouped-query attention over the paged cache, for the heads of this process's shard."""

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels, shard: Shard) -> None:
        whole = config.attentions[layer]
        spec = whole if shard.is_whole else shard.attention(whole)
        name = f"{LAYERS}{layer}.self_attn"
        sinks_stored = StoredRows({name: whole.num_heads})
        super().__init__(sinks_stored if shard.is_whole else sinks_stored.take(shard.share(whole.num_heads)))
        shape = spec.kv
        assert shape.value_dim == shape.key_dim, f"layer {layer} has K and V of different head dimensions"
        self.spec = spec
        self.shard = shard
        self.kv_heads = shard.kv_heads(whole.kv.num_kv_heads)
        self._first_heads = shard.share(whole.num_heads).start, self.kv_heads.start
        self.layer = layer
        self.kernels = kernels
        self.head_dim = shape.key_dim
        # Layers that agree in these share the plan of a step.
        self.plan_key = spec.window, [*config.kv_shapes.values()].index(whole.kv)
        # Whether tokens of an image see later ones.
        only_in_windows = config.vision is not None and config.vision.only_in_windows
        self.sees_later = spec.window is not None or not only_in_windows
        self.rope = config.ropes.index((spec.rope, self.head_dim))  # whose angles it takes
        q_size = spec.num_heads * self.head_dim
        kv_size = shape.num_kv_heads * self.head_dim
        self.split_sizes = [q_size, kv_size, kv_size] if spec.has_kv else [q_size]
        self.num_gates = spec.num_heads if spec.gate else 0  # heads before those of the query
        # Not None where dimensions of a head are rotated in other pairs than by the kernels.
        order = rotated_order(spec.rope, self.head_dim)
        stored = _stored_qkv(config, layer, order)
        output = StoredRows({f"{name}.o_proj": config.hidden_size}, transposed=config.transposed_weights)
        if not shard.is_whole:
            stored = stored.take(*_own_rows(whole, shard))
            output = output.take(shard.share(config.hidden_size))
        self.qkv = Linear(
            config.hidden_size,
            stored,
            bias=spec.qkv_bias,
            num_precise=sum(self.split_sizes[1:]),
        )
        self.output = Linear(whole.num_heads * self.head_dim, output, bias=spec.output_bias)
        self.norm_by_head = spec.qk_norm == "head"
        # float32 in a model of any dtype, as the kernels take them.
        sinks = torch.empty(spec.num_heads, dtype=torch.float32)
        self.sinks = nn.Parameter(sinks, requires_grad=False) if spec.sinks else None
        self.kv_scales = KVScales(None, None)
        self.query_norm = self.key_norm = self.value_norm = None
        eps = config.norm.eps
        unit_offset = config.norm.unit_offset
        if spec.qk_norm is not None:
            num_heads = (1, 1) if self.norm_by_head else (whole.num_heads, whole.kv.num_kv_heads)
            q_size, kv_size = (number * self.head_dim for number in num_heads)

            def norm_of(part: str, size: int) -> RMSNorm:
                index = None if order is None else _in_order(torch.arange(size, device="cpu"), order)
                stored_as = f"{name}.{part}_norm"
                return RMSNorm(size, eps, kernels, stored_as, index=index, unit_offset=unit_offset)

            self.query_norm = norm_of("q", q_size)
            if spec.has_kv:
                self.key_norm = norm_of("k", kv_size)
        if spec.value_norm and spec.has_kv:
            self.value_norm = RMSNorm(self.head_dim, eps, kernels, name=None)

    def load(self, loader: Loader) -> None:
        """Read the sinks, and the scales of a quantised cache."""
        super().load(loader)
        scales = loader.kv_scales.get(self.layer, self.kv_scales)
        heads = slice(self.kv_heads.start, self.kv_heads.stop)
        self.kv_scales = KVScales(*(None if each is None else each[heads] for each in scales))

    def project(
        self, hidden: Tensor, rows: TokenRows, batch: Batch, kv_cache: KVCache
    ) -> Tensor:  # [num_tokens, hidden_size] -> [num_tokens, num_heads, head_dim]
        """Write K and V of the new tokens into the cache, if the layer has its own. Return the tokens'
        queries.

        If queries have gates, the gates come first, as num_heads further heads.
        """
        angles = rows.angles[self.rope]
        made: Tensor = self.qkv(hidden, rows.adapters)
        qkv = made[:, self.num_gates * self.head_dim :] if self.num_gates else made
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
                self._norm_projections(qkv)
        qkv = qkv.view(-1, sum(self.split_sizes) // self.head_dim, self.head_dim)
        if self.value_norm is not None:
            values = qkv[:, -self.spec.kv.num_kv_heads :]
            self.value_norm.into(values, values)
        caches: tuple[Tensor | None, Tensor | None, Tensor | None] = None, None, None
        if self.spec.has_kv:
            key_cache, value_cache, key_scales, value_scales = kv_cache.layer(self.layer)
            options |= {"key_scales": key_scales, "value_scales": value_scales}
            if key_scales is not None:
                options |= {
                    "fixed_key_scales": self.kv_scales.key,
                    "fixed_value_scales": self.kv_scales.value,
                }
            caches = key_cache, value_cache, batch.slot_mapping[kv_cache.group_of[self.layer]]
        query = self.kernels.rotary_store_kv(qkv, angles.cos, angles.sin, *caches, **options)
        if angles.query_factors is not None:
            self.kernels.scale_rows(query.view(len(query), -1), angles.query_factors.view(-1))
        if self.num_gates:  # the query is where it was made
            gates_and_query = made[:, : 2 * self.num_gates * self.head_dim]
            return gates_and_query.view(-1, 2 * self.num_gates, self.head_dim)
        return query

    def _norm_projections(self, qkv: Tensor) -> None:
        """Normalise Q over all its heads, and K over all of its own, in place."""
        norms = [norm for norm in (self.query_norm, self.key_norm) if norm is not None]
        if self.shard.is_whole:
            for part, norm in zip(torch.split(qkv, self.split_sizes, dim=1), norms, strict=False):
                norm.into(part, part)
            return

        def exchange(qkv: Tensor) -> None:
            own = torch.split(qkv, self.split_sizes, dim=1)[: len(norms)]
            gathered = group_of(self.shard).gather(torch.cat(own, dim=1))
            by_shard = gathered.view(len(qkv), self.shard.count, -1)
            whole = torch.split(by_shard, self.split_sizes[: len(norms)], dim=2)
            for part, norm, of_shards, first in zip(own, norms, whole, self._first_heads, strict=False):
                # Several shards may have the same KV head.
                num_copies = of_shards.shape[1] * of_shards.shape[2] // len(norm.weight)
                heads = of_shards[:, ::num_copies].reshape(len(qkv), -1)
                norm.into(heads, heads)
                start = first * self.head_dim
                part.copy_(heads[:, start : start + part.shape[1]])

        call_within_step(exchange, qkv)

    def _max_decode_q(self, query: Tensor, key_cache: Tensor, queries: Queries) -> int:
        """Return the maximum number of new tokens of a decode: what is asked for, or what fits in a tile."""
        most = queries.max_decode_q
        if most > 1:
            group = query.shape[1] // key_cache.shape[2]
            most = min(most, self.kernels.most_decode_q(self.head_dim, group, query.dtype, key_cache.dtype))
        return most

    def attend(
        self, query: Tensor, queries: Queries, kv_cache: KVCache, adapters: Tensor | None = None
    ) -> Tensor:
        """Attend to the cache: [num_queries, num_heads, head_dim] -> [num_queries, hidden_size]."""
        gates = None
        if self.num_gates:
            gates, query = torch.split(query, self.num_gates, dim=1)
        key_cache, value_cache, key_scales, value_scales = kv_cache.layer(self.layer)
        table = queries.block_tables[kv_cache.group_of[self.layer]]
        options = AttentionOptions(
            scale=self.spec.scale,
            max_seqlen_q=queries.max_seqlen_q,
            min_seqlen_q=queries.min_seqlen_q,
            max_decode_q=self._max_decode_q(query, key_cache, queries),
            max_seq_len=queries.max_seq_len,
            sliding_window=self.spec.window,
            softcap=self.spec.softcap,
            sinks=self.sinks,
            key_scales=key_scales,
            value_scales=value_scales,
            last_keys=queries.last_keys if self.sees_later else None,
        )
        inputs = (query, key_cache, value_cache, table, queries.seq_lens, queries.cu_seqlens_q, options)
        plan = queries.plans.get(key := (*self.plan_key, query.stride(0), table.shape[1]))
        if plan is None:
            plan = queries.plans[key] = self.kernels.plan_attention(*inputs)
        attended = self.kernels.paged_attention(*inputs, plan).flatten(1)
        if gates is not None:
            self.kernels.scale_by_sigmoid(attended, gates.flatten(1))
        return gather(self.output(gather(attended, self.shard), adapters), self.shard)


def _stored_qkv(config: ModelConfig, layer: int, order: Tensor | None) -> StoredRows:
    """Return the stored rows of Q, K and V, in the order in which the kernels take them.

    order: the order of the dimensions in each head of Q and K. Q Kᵀ is the same in any order.
    """
    spec = config.attentions[layer]
    name = f"{LAYERS}{layer}.self_attn"
    head_dim = spec.kv.key_dim
    q_size = spec.num_heads * head_dim
    kv_size = spec.kv.num_kv_heads * head_dim
    sizes = {"q": q_size, "k": kv_size, "v": kv_size} if spec.has_kv else {"q": q_size}
    if spec.gate:
        sizes["q"] *= 2
    total = sum(sizes.values())
    as_stored = torch.arange(total, device="cpu")
    index = as_stored.clone()
    if spec.keys_as_values:
        del sizes["v"]
        index[-kv_size:] -= kv_size
    if spec.stored == "by_head":
        index = index.view(spec.num_heads, 3, head_dim).transpose(0, 1).flatten()
    first = 0
    if spec.gate:  # stored behind the query of each head, and made before all queries
        first = q_size
        halves = index[: 2 * q_size].view(spec.num_heads, 2, head_dim).transpose(0, 1).flip(0)
        index[: 2 * q_size] = halves.flatten()
    if order is not None:
        rotated = slice(first, first + q_size + kv_size)
        index[rotated] = _in_order(index[rotated], order)
    parts = {f"{name}.{part}_proj": size for part, size in sizes.items()}
    if spec.stored != "separate":
        parts = {f"{name}.qkv_proj": total}
    return StoredRows(parts, None if torch.equal(index, as_stored) else index, config.transposed_weights)


def _own_rows(whole: AttentionSpec, shard: Shard) -> Iterator[range]:
    """Yield the rows of gates, Q, K and V that belong to a shard's heads."""
    head_dim = whole.kv.key_dim
    heads = shard.kv_heads(whole.kv.num_kv_heads)
    q_heads = shard.share(whole.num_heads)
    counts = [whole.num_heads] * whole.gate + [whole.num_heads, whole.kv.num_kv_heads]
    starts = [0, *accumulate(counts)]
    owned = [q_heads] * whole.gate + ([q_heads, heads, heads] if whole.has_kv else [q_heads])
    for first, own in zip(starts, owned, strict=False):
        yield range((first + own.start) * head_dim, (first + own.stop) * head_dim)


def _in_order(rows: Tensor, order: Tensor) -> Tensor:
    """Order the rows of each head."""
    return rows.view(-1, len(order))[:, order].flatten()
