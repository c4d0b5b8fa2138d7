"""Launching `cpu.attention.attention`: checks, and which unit of work does what."""

from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...attention_options import AttentionOptions, check_attention, check_own_plan, check_plans
from ...checks import check_device, in_debug_mode
from ..products.amx import HAS_TILES
from ..simd.numbers import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, INT8
from .attention import ATTEND, MAX_ROWS, MERGE
from .softmax import padded
from .units import SPLIT, scratch_size

KINDS = {
    torch.float32: FLOAT32,
    torch.float16: FLOAT16,
    torch.bfloat16: BFLOAT16,
    torch.int8: INT8,
    torch.float8_e4m3fn: FLOAT8,
}
UNITS_PER_THREAD = 2  # at least, so that no thread waits long for the last
LEAST_ROWS = 64  # of a unit of a prompt, where it has as many
MAX_DECODE = 4  # new tokens of a sequence whose heads go together


class Plan(NamedTuple):
    """The work of one step, for every layer of the same shape."""

    units: NDArray[np.int64]  # [num_units, 8], see cpu.attention.attention.ATTEND
    merges: NDArray[np.int64]  # [num_merges, 8]
    num_parts: int
    max_rows: int  # of a unit, all its heads together


def paged_attention(
    query: Tensor,  # [num_tokens, num_heads, head_dim]
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, value_dim]
    block_tables: Tensor,  # i32[num_seqs, max_blocks_per_seq]
    seq_lens: Tensor,  # i32[num_seqs], computed and new tokens
    cu_seqlens_q: Tensor,  # i32[num_seqs + 1], exclusive prefix sum of the new tokens
    *,
    scale: float,
    max_seqlen_q: int,
    sliding_window: int | None = None,
    softcap: float | None = None,
    causal: bool = True,
    sinks: Tensor | None = None,  # f32[num_heads]
    alibi_slopes: Tensor | None = None,  # f32[num_heads]
    tree_mask: Tensor | None = None,  # i64[num_tokens]
    key_scales: Tensor | None = None,  # f32[num_blocks, num_kv_heads, block_size]
    value_scales: Tensor | None = None,  # like key_scales
    shared_prefix_len: int = 0,
    max_decode_q: int = 1,
    min_seqlen_q: int = 0,
    plans: dict[Any, Any] | None = None,
) -> Tensor:  # [num_tokens, num_heads, value_dim]
    """softmax(scale q kᵀ + causal mask) v over paged K and V on a CPU; see `paged_attention.paged_attention`.

    shared_prefix_len, max_decode_q and min_seqlen_q are hints that change nothing here. Raises ValueError
    where the tensors do not fit together.
    """
    num_tokens, num_heads, head_dim = query.shape
    block_size, num_kv_heads, value_dim = value_cache.shape[1:]
    # The layers of a step differ in what their tensors hold: one of them is checked and planned for all.
    key = (
        "numba", query.shape, query.dtype, query.stride(), key_cache.shape, key_cache.dtype,
        key_cache.stride(), value_dim, value_cache.stride(), block_tables.stride(0), scale, sliding_window,
        softcap, causal, len(seq_lens),
    )  # fmt: skip
    check_plans(plans)
    known = plans.get(key) if plans is not None else None
    if known is not None and in_debug_mode():
        lengths = seq_lens.numpy(), cu_seqlens_q.numpy()
        fresh = plan_units(*lengths, num_heads, num_kv_heads, torch.get_num_threads())
        check_own_plan(np.array_equal(known[0].units, fresh.units))
    if known is None:
        options = AttentionOptions(
            scale=scale,
            max_seqlen_q=max_seqlen_q,
            sliding_window=sliding_window,
            softcap=softcap,
            causal=causal,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            tree_mask=tree_mask,
            key_scales=key_scales,
            value_scales=value_scales,
            shared_prefix_len=shared_prefix_len,
            max_decode_q=max_decode_q,
            min_seqlen_q=min_seqlen_q,
        )
        check_device("query", query, torch.device("cpu"))
        check_attention(query, key_cache, value_cache, block_tables, seq_lens, cu_seqlens_q, options)
        num_threads = torch.get_num_threads()
        plan = plan_units(seq_lens.numpy(), cu_seqlens_q.numpy(), num_heads, num_kv_heads, num_threads)
        same = (
            *(num_heads, num_kv_heads, head_dim, value_dim, block_size, sliding_window or 0, causal),
            *(KINDS[query.dtype], KINDS[key_cache.dtype], HAS_TILES),
            block_tables.stride(0) * block_tables.itemsize,
            *(stride * query.itemsize for stride in query.stride()[:2]),
            *(stride * key_cache.itemsize for stride in key_cache.stride()[:3]),
            *(stride * value_cache.itemsize for stride in value_cache.stride()[:3]),
            *(scale, softcap or 0.0),
        )
        size = scratch_size(head_dim, value_dim, num_heads, plan.max_rows, num_kv_heads, HAS_TILES)
        known = plan, same, plan.units.ctypes.data, size
        if plans is not None:
            plans[key] = known
    plan, same, units, size = known
    out = query.new_empty(num_tokens, num_heads, value_dim)
    parts = None
    if plan.num_parts:
        parts = query.new_empty(plan.num_parts * (padded.py_func(value_dim) + 2), dtype=torch.float32)
    ATTEND.run(
        len(plan.units),
        units,
        query.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        block_tables.data_ptr(),
        seq_lens.data_ptr(),
        cu_seqlens_q.data_ptr(),
        out.data_ptr(),
        parts.data_ptr() if parts is not None else 0,
        *(
            0 if x is None else x.data_ptr()
            for x in (sinks, alibi_slopes, tree_mask, key_scales, value_scales)
        ),
        *same,
        scratch_size=size,
    )
    if parts is not None:
        MERGE.run(
            len(plan.merges),
            plan.merges.ctypes.data,
            parts.data_ptr(),
            out.data_ptr(),
            num_heads,
            value_dim,
            KINDS[query.dtype],
            0 if sinks is None else sinks.data_ptr(),
        )
    return out


def _tile_of_prompts(
    seq_lens: NDArray[np.int32], query_lens: NDArray[np.int32], group: int, share: int
) -> int:
    """Query tokens of a unit: as many as pay for bringing K and V, and fewer where one is more than a share.

    share: of the work, in keys x query tokens of a KV head.
    """
    prompts, rows = query_lens > MAX_DECODE, MAX_ROWS
    keys, tokens = seq_lens[prompts].astype(np.int64), query_lens[prompts]
    while rows > LEAST_ROWS and (keys * np.minimum(tokens, max(1, rows // group))).max(initial=0) > share:
        rows //= 2
    return max(1, rows // group)


def plan_units(
    seq_lens: NDArray[np.int32],
    cu_seqlens_q: NDArray[np.int32],
    num_heads: int,
    num_kv_heads: int,
    num_threads: int,
) -> Plan:
    """Share a step out in units of like size, the longest first: its bits are the same however that is done.

    A decode is one unit with all its heads, so that memory is read as it lies. Where that would be too much
    of the step for one thread, its KV heads are shared out, and then every SPLIT tokens of each.
    Prompts go by tiles of query tokens, one KV head a unit.
    """
    query_lens = np.diff(cu_seqlens_q)
    work = seq_lens.astype(np.int64) * query_lens
    limit = int(work.sum()) // (UNITS_PER_THREAD * num_threads)
    if len(work) and work.max() <= limit and query_lens.min() == query_lens.max() == 1:
        units = np.zeros((len(seq_lens), 8), np.int64)
        units[:, 0] = np.argsort(-seq_lens)
        units[:, 2], units[:, 4], units[:, 7] = 1, num_kv_heads, -1
        units[:, 6] = -(-seq_lens[units[:, 0]] // SPLIT)
        return Plan(units, np.empty((0, 8), np.int64), 0, num_heads)
    group = num_heads // num_kv_heads
    tile = _tile_of_prompts(seq_lens, query_lens, group, limit * num_kv_heads // 2)
    rows, merges, num_parts = [], [], 0
    max_rows = tile * group if query_lens.max(initial=0) > 1 else 1  # a recorded step fits others
    for seq, (seq_len, query_len) in enumerate(zip(seq_lens.tolist(), query_lens.tolist(), strict=True)):
        num_splits = -(-seq_len // SPLIT)
        cut = num_splits > 1 and query_len <= MAX_DECODE and seq_len * query_len > limit * num_kv_heads
        per_unit = 1
        if query_len <= MAX_DECODE:  # as many heads as are no more than a thread's share
            per_unit = max(1, min(num_kv_heads, num_kv_heads * limit // max(1, seq_len * query_len)))
        for first, head in product(range(0, query_len, tile), range(0, num_kv_heads, per_unit)):
            end, end_head = min(first + tile, query_len), min(head + per_unit, num_kv_heads)
            unit_rows = (end - first) * group  # for each KV head
            place, num_rows = (seq, first, end, head, end_head), unit_rows * (end_head - head)
            max_rows = max(max_rows, num_rows)
            if not cut:
                rows.append(((seq_len - query_len + end) * num_rows, *place, 0, num_splits, -1))
                continue
            merges.append(
                (num_parts, num_splits, unit_rows, num_rows, int(cu_seqlens_q[seq]) + first, head, group, 0)
            )
            for split in range(num_splits):
                rows.append((SPLIT * num_rows, *place, split, split + 1, num_parts))
                num_parts += num_rows
    rows.sort(reverse=True)
    table = np.array(rows, np.int64).reshape(-1, 9)[:, 1:]
    return Plan(np.ascontiguousarray(table), np.array(merges, np.int64).reshape(-1, 8), num_parts, max_rows)
