"""Paged attention: its units of work, and the launch of them."""

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...attention_options import (
    AttentionOptions,
    AttentionPlan,
    check_attention,
    check_layout,
    check_lengths,
    check_plan,
    layout_of,
)
from ...checks import check_device, check_tensor, is_trusted
from ..formats import KINDS
from ..launch.tasks import Task, VariantTask, cache_strides
from ..target import HAS_TILES, LANES, LINE, TILE_ROWS, padded
from ..variants import attention_kinds

SPLIT_KEYS = 1024  # keys that one softmax goes over; longer contexts are split and merged (split-KV)
MAX_DECODE = 8  # new tokens of a sequence that is computed as a decode: mostly it waits for memory
TILE = 64  # keys
TILE_BYTES = 4 * TILE
WORK_VECTORS = LANES + 2
AMX_BLOCK = 2 * TILE_ROWS  # query rows that AMX multiplies by a key tile at once


_ADDRESSES = (
    "units",  # i64[num_units, 8]: seq; first and end of tokens, KV heads and splits; first row in parts or -1
    "query",
    "key_cache",
    "value_cache",
    "block_tables",
    "seq_lens",
    "cu_seqlens_q",
    "out",
    "parts",  # f32[num_parts, padded value_dim + 2]: a row's maximum, normalizer and output over one split
    "sinks",  # this and the following are 0 where not given
    "key_scales",
    "value_scales",
    "last_keys",
)
_SIZES = ("num_heads", "num_kv_heads", "head_dim", "value_dim", "block_size", "window")
_KINDS = ("query_kind", "cache_kind", "tiles")  # tiles: whether AMX may be used
_STRIDES = (  # bytes
    "table_stride",
    "query_token_stride",
    "query_head_stride",
    "key_block_stride",
    "key_token_stride",
    "key_head_stride",
    "value_block_stride",
    "value_token_stride",
    "value_head_stride",
)
ATTEND = VariantTask(
    "attention.kernel.attend", _ADDRESSES, (*_SIZES, *_KINDS, *_STRIDES), ("scale", "softcap")
)
MERGE = Task(
    "attention.kernel.merge", ("merges", "parts", "out", "sinks"), ("num_heads", "value_dim", "query_kind")
)


def scratch_size(
    head_dim: int, value_dim: int, num_heads: int, max_rows: int, max_heads: int, tiles: bool
) -> int:
    """Return the bytes of scratch memory for any unit of up to max_rows rows and max_heads KV heads.

    tiles: whether AMX may compute the unit.
    """
    width: int = padded(value_dim)
    score_rows = max(AMX_BLOCK, max_rows) + TILE_ROWS
    words = TILE * (max_heads * (head_dim + width + 2) + 2 * 16 + head_dim + score_rows + 4 * 2)
    size: int = 4 * (words + 2 * LANES + WORK_VECTORS * LANES + max_rows * (head_dim + 2 * width + 4))
    return size + (in_place_bytes(min(max_rows, num_heads), head_dim) if tiles else 0)


def in_place_bytes(num_rows: int, head_dim: int) -> int:
    """Return the scratch bytes of an AMX decode of num_rows rows: tile configurations, K Qᵀ and Qᵀ."""
    return 3 * LINE + TILE * LINE + 2 * num_rows * 2 * head_dim


UNITS_PER_THREAD = 2  # at least, so that threads end at about the same time
# of a unit of a prompt, for each KV head
MAX_ROWS = 512
LEAST_ROWS = 64


class Plan(NamedTuple):
    """The division of one step's attention into work units, for every layer with the same shape."""

    units: NDArray[np.int64]  # [num_units, 8], see units.ATTEND
    merges: NDArray[np.int64]  # [num_merges, 8]
    num_parts: int
    max_rows: int  # of any unit, all its heads together


@dataclass(frozen=True, slots=True)
class _LayerPlan(AttentionPlan):
    """A step's work with the arguments of ATTEND that are the same in every layer."""

    work: Plan
    units: int  # the address of work.units
    constants: dict[str, float]
    scratch_size: int
    out_shape: tuple[int, int, int]


def plan_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    options: AttentionOptions,
) -> _LayerPlan:
    """Check the inputs and divide the work. `paged_attention` has the same parameters.

    Raises ValueError if the inputs do not fit together.
    """
    check_tensor("query", query)
    check_device("query", query, torch.device("cpu"))
    check_attention(query, key_cache, value_cache, block_tables, seq_lens, cu_seqlens_q, options)
    num_tokens, num_heads, head_dim = query.shape
    block_size, num_kv_heads, value_dim = value_cache.shape[1:]
    ATTEND.require(*attention_kinds(KINDS[query.dtype], KINDS[key_cache.dtype], [(head_dim, value_dim)]))
    work = plan_units(
        seq_lens.numpy(), cu_seqlens_q.numpy(), num_heads, num_kv_heads, torch.get_num_threads()
    )
    constants = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "value_dim": value_dim,
        "block_size": block_size,
        "window": options.sliding_window or 0,
        "query_kind": KINDS[query.dtype],
        "cache_kind": KINDS[key_cache.dtype],
        "tiles": HAS_TILES,
        "table_stride": block_tables.stride(0) * block_tables.itemsize,
        "query_token_stride": query.stride(0) * query.itemsize,
        "query_head_stride": query.stride(1) * query.itemsize,
        **cache_strides("key", key_cache),
        **cache_strides("value", value_cache),
        "scale": options.scale,
        "softcap": options.softcap or 0.0,
    }
    return _LayerPlan(
        layout_of(query, key_cache, value_cache, block_tables, seq_lens, options),
        work,
        work.units.ctypes.data,
        constants,
        scratch_size(head_dim, value_dim, num_heads, work.max_rows, num_kv_heads, HAS_TILES),
        (num_tokens, num_heads, value_dim),
    )


def paged_attention(
    query: Tensor,  # [num_tokens, num_heads, head_dim]
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, value_dim]
    block_tables: Tensor,  # i32[num_seqs, max_blocks_per_seq]
    seq_lens: Tensor,  # i32[num_seqs], computed and new tokens
    cu_seqlens_q: Tensor,  # i32[num_seqs + 1], exclusive prefix sum of the new tokens
    options: AttentionOptions,
    plan: AttentionPlan | None = None,
) -> Tensor:  # [num_tokens, num_heads, value_dim]
    """Return softmax(scale q kᵀ + causal mask) v over paged K and V; see `gpu.attention.paged_attention`.

    max_decode_q and min_seqlen_q are hints that have no effect here. Inside `TrustedContents` only the
    layout of a layer's tensors is checked: it must be the plan's. Raises ValueError if the tensors or
    the plan do not fit.
    """
    if plan is None:
        plan = plan_attention(query, key_cache, value_cache, block_tables, seq_lens, cu_seqlens_q, options)
    elif is_trusted():
        check_layout(plan, layout_of(query, key_cache, value_cache, block_tables, seq_lens, options))
    else:
        check_plan(plan, _LayerPlan)
        fresh = plan_attention(query, key_cache, value_cache, block_tables, seq_lens, cu_seqlens_q, options)
        check_layout(plan, fresh.layout)
        check_lengths(isinstance(plan, _LayerPlan) and np.array_equal(plan.work.units, fresh.work.units))
    assert isinstance(plan, _LayerPlan), "check_plan compares the types"
    work = plan.work
    out = query.new_empty(plan.out_shape)
    parts = None
    _, num_heads, value_dim = plan.out_shape
    if work.num_parts:
        parts = query.new_empty(work.num_parts * (padded(value_dim) + 2), dtype=torch.float32)
    ATTEND.run(
        len(work.units),
        units=plan.units,
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=block_tables,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        out=out,
        parts=parts,
        sinks=options.sinks,
        key_scales=options.key_scales,
        value_scales=options.value_scales,
        last_keys=options.last_keys,
        **plan.constants,
        scratch_size=plan.scratch_size,
    )
    if parts is not None:
        MERGE.run(
            len(work.merges),
            merges=work.merges.ctypes.data,
            parts=parts,
            out=out,
            sinks=options.sinks,
            num_heads=num_heads,
            value_dim=value_dim,
            query_kind=KINDS[query.dtype],
        )
    return out


def _tile_of_prompts(
    seq_lens: NDArray[np.int32], query_lens: NDArray[np.int32], group: int, share: int
) -> int:
    """Choose the query tokens of a unit: enough to pay for copying K and V, unless that exceeds its share.

    share: of the work, in keys x query tokens of one KV head.
    """
    prompts = query_lens > MAX_DECODE
    rows = MAX_ROWS
    keys = seq_lens[prompts].astype(np.int64)
    tokens = query_lens[prompts]
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
    """Divide a step into work units of similar size, the longest first. The division does not change any bit.

    A decode (at most MAX_DECODE tokens) is one unit with all heads, so that memory is read in order. If that
    is too much work for one thread, the decode is divided by KV head, and then also into splits of SPLIT_KEYS
    keys. A prompt has a unit for each KV head and tile of query tokens.
    """
    query_lens = np.diff(cu_seqlens_q)
    work = seq_lens.astype(np.int64) * query_lens
    limit = int(work.sum()) // (UNITS_PER_THREAD * num_threads)
    if len(work) and work.max() <= limit and query_lens.min() == query_lens.max() == 1:
        units = np.zeros((len(seq_lens), 8), np.int64)
        units[:, 0] = np.argsort(-seq_lens)
        units[:, 2], units[:, 4], units[:, 7] = 1, num_kv_heads, -1
        units[:, 6] = -(-seq_lens[units[:, 0]] // SPLIT_KEYS)
        return Plan(units, np.empty((0, 8), np.int64), 0, num_heads)
    group = num_heads // num_kv_heads
    tile = _tile_of_prompts(seq_lens, query_lens, group, limit * num_kv_heads // 2)
    rows = []
    merges = []
    num_parts = 0
    # The same for all prompts, so that a recorded step fits them.
    max_rows = tile * group if query_lens.max(initial=0) > 1 else 1
    for seq, (seq_len, query_len) in enumerate(zip(seq_lens.tolist(), query_lens.tolist(), strict=True)):
        num_splits = -(-seq_len // SPLIT_KEYS)
        is_split = num_splits > 1 and query_len <= MAX_DECODE and seq_len * query_len > limit * num_kv_heads
        per_unit = 1
        if query_len <= MAX_DECODE:  # as many heads as fit into a thread's share
            per_unit = max(1, min(num_kv_heads, num_kv_heads * limit // max(1, seq_len * query_len)))
        for first, head in product(range(0, query_len, tile), range(0, num_kv_heads, per_unit)):
            end = min(first + tile, query_len)
            end_head = min(head + per_unit, num_kv_heads)
            unit_rows = (end - first) * group  # for each KV head
            place = (seq, first, end, head, end_head)
            num_rows = unit_rows * (end_head - head)
            max_rows = max(max_rows, num_rows)
            if not is_split:
                rows.append(((seq_len - query_len + end) * num_rows, *place, 0, num_splits, -1))
                continue
            merges.append(
                (num_parts, num_splits, unit_rows, num_rows, int(cu_seqlens_q[seq]) + first, head, group, 0)
            )
            for split in range(num_splits):
                rows.append((SPLIT_KEYS * num_rows, *place, split, split + 1, num_parts))
                num_parts += num_rows
    rows.sort(reverse=True)
    table = np.array(rows, np.int64).reshape(-1, 9)[:, 1:]
    return Plan(np.ascontiguousarray(table), np.array(merges, np.int64).reshape(-1, 8), num_parts, max_rows)
