"""Attention of a ragged batch over paged K and V: prefill chunks and decodes in one call.

A sequence with one new token, or up to max_decode_q, is a decode: `decode_kernel` runs on splits of its
context, which split_kv.py lists and merges. For any other, `prefill_kernel` runs on blocks of query tokens.
The kernel, the length of a split and the order of the merge depend on the sequence alone: the result is
batch-invariant.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
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
from ...checks import check_between, in_debug_mode
from ..target import check_launchable, check_target, current_target, in_interpreter, num_sms
from .config import AttentionConfig, Use, choose_config, split_size
from .descriptors import describe_caches
from .kernel import decode_kernel, prefill_kernel
from .split_kv import MAX_SPLITS, DecodePlan, merge_splits, plan_decodes
from .tiles import Layer

_TL_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
# Decode programs for each SM. Where fewer fit at once (COMPILED.md), the others run as these end.
_PROGRAMS_PER_SM = 4


@dataclass(frozen=True, slots=True)
class _Configs:
    """The model and target that determine tile shapes."""

    head_dim: int
    value_dim: int
    group: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    target: str
    max_decode_q: int

    def choose(self, use: Use) -> AttentionConfig:
        model = self.head_dim, self.group, self.dtype
        queries = self.max_decode_q if use == "decode" else 1
        return choose_config(*model, use, self.target, self.value_dim, self.cache_dtype, queries)


@dataclass(frozen=True, slots=True)
class _LayerPlan(AttentionPlan):
    """What the launches of a batch have in common."""

    configs: _Configs
    decodes: DecodePlan | None  # None: no sequence can be a decode


def plan_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    options: AttentionOptions,
) -> _LayerPlan:
    """Check the inputs and list the splits of all decodes for `paged_attention`, which has these parameters.

    Raises ValueError for a shape, dtype, stride, device, value or combination that does not fit; what the
    int32 tensors hold is checked only in debug mode, see `checks`.
    """
    check_attention(query, key_cache, value_cache, block_tables, seq_lens, cu_seqlens_q, options)
    check_launchable("query", query)
    num_heads, head_dim = query.shape[1:]
    block_size, num_kv_heads, value_dim = value_cache.shape[1:]
    configs = _Configs(
        head_dim=head_dim,
        value_dim=value_dim,
        group=num_heads // num_kv_heads,
        dtype=query.dtype,
        cache_dtype=key_cache.dtype,
        target=current_target(),
        max_decode_q=options.max_decode_q,
    )
    check_target(key_cache.dtype, configs.target)
    decodes = None
    if query.shape[0] and len(seq_lens):
        config = configs.choose("decode")
        check_between("max_decode_q", options.max_decode_q, 1, config.BLOCK_Q)
        if options.min_seqlen_q <= options.max_decode_q:
            decodes = plan_decodes(
                seq_lens,
                cu_seqlens_q,
                max_keys=block_tables.shape[1] * block_size,
                decode_q=options.max_decode_q,
                window=options.sliding_window or 0,
                tile=config.TILE,
                split=split_size(configs.target),
                shared_prefix_len=options.shared_prefix_len,
            )
    layout = layout_of(query, key_cache, value_cache, block_tables, seq_lens, options)
    return _LayerPlan(layout, configs, decodes)


def paged_attention(
    query: Tensor,  # [num_tokens, num_heads, head_dim], ragged: all sequences one after another
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, value_dim]
    block_tables: Tensor,  # i32[num_seqs, max_blocks_per_seq]
    seq_lens: Tensor,  # i32[num_seqs], computed and new tokens
    cu_seqlens_q: Tensor,  # i32[num_seqs + 1], exclusive prefix sum of the new tokens
    options: AttentionOptions,
    plan: AttentionPlan | None = None,
) -> Tensor:  # [num_tokens, num_heads, value_dim], contiguous
    """Return softmax(scale q kᵀ + causal mask) v for every sequence's new tokens over its paged K and V.

    New token j of a sequence stands at position seq_len - query_len + j and sees the positions up to its own:
    all positions if not `causal`, only the last `sliding_window` of them where one is given (itself included,
    as in HF). A sequence may have no new token. Slots past seq_len, or before the window, may hold anything;
    block table entries past the last block are never read. Rows of query past cu_seqlens_q[-1] give undefined
    rows.

    plan: from `plan_attention` with the inputs of one layer, for all layers of the same layout in this step.
        These are compared with its layout only, not checked again. It must not outlive the batch.

    Options, beside `scale`:
    softcap: scores become softcap tanh(score / softcap), as in Gemma 2.
    sinks: one more logit of each head in the softmax, without a value, as in gpt-oss.
    alibi_slopes: slope (key position - query position) is added to a score (Press et al. 2022).
    tree_mask: the new tokens of a sequence, at most 64, are nodes of a tree of candidates: bit i of token j
        says that it sees new token i, its own bit included; it sees all positions before the new tokens.
    key_scales, value_scales: a quantised cache holds key / key_scales for each token and head. A plain one
        has query's dtype, or float16 or bfloat16 where that is float32.
    max_seqlen_q, min_seqlen_q: no sequence has more new tokens, and none that has any has fewer. If none can
        be a decode, no decodes are planned.
    max_decode_q: sequences of up to so many new tokens are decodes, whose context is split. More than 1 is
        for speculative decoding: without a window, and up to MAX_SPLITS splits, a token's bits are those it
        has alone. Memory for partial results grows with it. At most 16 rows in float32, of tokens times heads
        of a group, else 64 up to a head_dim of 128, and often fewer beyond; the error names the limit.
    shared_prefix_len: all sequences, of one new token each, begin with the same blocks for so many tokens;
        these are read once for many sequences (cascade), in whole splits: of 512 tokens, longer where the
        tables hold more than 64 of them. Unlike every other option it may change the last bits.

    A value cache that is a view of the first value_dim of key_cache (MLA) is not read a second time. Online
    softmax over tiles and split decodes after FlashAttention-2 and flash decoding (Dao 2023), over blocks
    after PagedAttention (Kwon et al. 2023). Raises ValueError where the inputs, or the plan, do not fit.
    """
    if plan is None:
        plan = plan_attention(query, key_cache, value_cache, block_tables, seq_lens, cu_seqlens_q, options)
    elif in_debug_mode():
        check_plan(plan, _LayerPlan)
        fresh = plan_attention(query, key_cache, value_cache, block_tables, seq_lens, cu_seqlens_q, options)
        check_layout(plan, fresh.layout)
        check_lengths(isinstance(plan, _LayerPlan) and _same_work(plan.decodes, fresh.decodes))
    else:
        check_plan(plan, _LayerPlan)
        check_launchable("query", query)
        check_layout(plan, layout_of(query, key_cache, value_cache, block_tables, seq_lens, options))
    assert isinstance(plan, _LayerPlan), "check_plan compares the types"
    num_tokens, num_heads, _ = query.shape
    out = torch.empty(num_tokens, num_heads, value_cache.shape[3], dtype=query.dtype, device=query.device)
    if num_tokens == 0 or len(seq_lens) == 0:
        return out
    arguments = _arguments(query, key_cache, value_cache, out, block_tables, seq_lens, cu_seqlens_q, options)
    # Which of the two serves a sequence is decided on the device, by its own query_len.
    if options.max_seqlen_q > options.max_decode_q:
        _launch_prefill(arguments, plan.configs)
    if plan.decodes is not None:
        _launch_decode(arguments, plan.configs, plan.decodes)
    return out


def _same_work(a: DecodePlan | None, b: DecodePlan | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a.first_item, b.first_item))


def _arguments(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    out: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    options: AttentionOptions,
) -> dict[str, Any]:
    """Return the arguments that all launches have in common."""
    head_dim, value_dim = query.shape[2], out.shape[2]
    num_heads, (_, block_size, num_kv_heads, _) = query.shape[1], key_cache.shape
    # The largest power of two, and what is left over: 80 = 64 + 16, 576 = 512 + 64.
    block_d = 1 << (head_dim.bit_length() - 1)
    rest = head_dim - block_d
    biased = options.softcap is not None or options.alibi_slopes is not None
    quantized = options.key_scales is not None
    layer = Layer(
        stride_query_token=query.stride(0),
        stride_query_head=query.stride(1),
        stride_key_block=key_cache.stride(0),
        stride_key_slot=key_cache.stride(1),
        stride_key_head=key_cache.stride(2),
        stride_value_block=value_cache.stride(0),
        stride_value_slot=value_cache.stride(1),
        stride_value_head=value_cache.stride(2),
        stride_scale_block=num_kv_heads * block_size,
        NUM_HEADS=num_heads,
        GROUP=num_heads // num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_D=block_d,
        BLOCK_R=max(16, triton.next_power_of_2(rest)) if rest else 0,
        BLOCK_V=triton.next_power_of_2(value_dim),
        WINDOW=options.sliding_window or 0,
        CAUSAL=options.causal,
        SOFTCAP=options.softcap is not None,
        ALIBI=options.alibi_slopes is not None,
        SINKS=options.sinks is not None,
        TREE=options.tree_mask is not None,
        QUANTIZED=quantized,
        VALUE_IN_KEY=value_dim == block_d and _is_view_of(value_cache, key_cache),
        **_dot_dtypes(query.dtype, quantized=quantized),
    )
    return {
        "query_ptr": query,
        "key_cache_ptr": key_cache,
        "value_cache_ptr": value_cache,
        "key_scale_ptr": options.key_scales,
        "value_scale_ptr": options.value_scales,
        "out_ptr": out,
        "sinks_ptr": options.sinks,
        "alibi_ptr": options.alibi_slopes,
        "tree_ptr": options.tree_mask,
        "block_tables_ptr": block_tables,
        "seq_lens_ptr": seq_lens,
        "cu_seqlens_q_ptr": cu_seqlens_q,
        "num_seqs": seq_lens.shape[0],
        "stride_table": block_tables.stride(0),
        "score_scale": float(options.scale),  # an int would be compiled for
        # From scores to powers of two, in one multiplication where neither softcap nor bias comes between.
        "exp_scale": math.log2(math.e) * (1.0 if biased else options.scale),
        "softcap": float(options.softcap or 0.0),
        "layer": layer,
    }


def _dot_dtypes(dtype: torch.dtype, *, quantized: bool) -> dict[str, tl.dtype]:
    """Return the dtypes in which queries and keys, and weights and values, are multiplied."""
    if in_interpreter():
        return {"DOT_DTYPE": tl.float32, "WEIGHT_DTYPE": tl.float32}
    own = _TL_DTYPES[dtype]
    # A weight times a scale may underflow in float16. Values of 8 bits are exact in bfloat16 too.
    weights = tl.bfloat16 if quantized and dtype == torch.float16 else own
    return {"DOT_DTYPE": own, "WEIGHT_DTYPE": weights}


def _is_view_of(value_cache: Tensor, key_cache: Tensor) -> bool:
    same_strides = value_cache.stride()[:3] == key_cache.stride()[:3]
    return same_strides and value_cache.data_ptr() == key_cache.data_ptr() and key_cache.numel() > 0


def _launch_prefill(arguments: dict[str, Any], configs: _Configs) -> None:
    config = configs.choose("prefill")
    # sum_i ceil(query_len_i / BLOCK_Q) is at most this, whatever the lengths: no need to know them here.
    num_q_blocks = arguments["query_ptr"].shape[0] // config.BLOCK_Q + arguments["num_seqs"]
    grid = (num_q_blocks, _num_head_blocks(arguments, config))
    prefill_kernel[grid](**arguments, DECODE_Q=configs.max_decode_q, **_tiles(config))


def _launch_decode(arguments: dict[str, Any], configs: _Configs, plan: DecodePlan) -> None:
    out = arguments["out_ptr"]
    _, num_heads, value_dim = out.shape
    # A sequence of one split writes its output itself, in every batch.
    partial_q = configs.max_decode_q
    places = (arguments["num_seqs"] * plan.most_splits if plan.most_splits > 1 else 0, partial_q, num_heads)
    partial = torch.empty(*places, value_dim, dtype=torch.float32, device=out.device)
    partial_max = torch.empty(places, dtype=torch.float32, device=out.device)
    partial_sum = torch.empty(places, dtype=torch.float32, device=out.device)

    def launch(config: AttentionConfig, most_work: int, *, shared: bool) -> None:
        num_programs = min(
            most_work * _num_head_blocks(arguments, config), _PROGRAMS_PER_SM * num_sms(out.device)
        )
        caches = arguments["key_cache_ptr"], arguments["value_cache_ptr"]
        decode_kernel[(num_programs,)](
            **arguments,
            **describe_caches(*caches, config, configs.dtype, configs.target),
            partial_ptr=partial,
            partial_max_ptr=partial_max,
            partial_sum_ptr=partial_sum,
            work_ptr=plan.work,
            first_item_ptr=plan.first_item,
            partial_q=partial_q,
            min_split=plan.min_split,
            shared_splits=plan.shared_splits,
            SPLIT=split_size(configs.target),
            MAX_SPLITS=MAX_SPLITS,
            SHARED=shared,
            **_tiles(config),
        )

    if plan.shared_splits:
        shared = configs.choose("shared")
        num_blocks = triton.cdiv(arguments["num_seqs"], shared.BLOCK_Q)
        launch(shared, num_blocks * plan.shared_splits, shared=True)
    launch(configs.choose("decode"), plan.work.shape[0], shared=False)
    if plan.most_splits > 1:
        merge_splits(out, partial, partial_max, partial_sum, arguments["cu_seqlens_q_ptr"], plan)


def _tiles(config: AttentionConfig) -> dict[str, Any]:
    return {"tiles": config, "num_warps": config.num_warps, "num_stages": config.num_stages}


def _num_head_blocks(arguments: dict[str, Any], config: AttentionConfig) -> int:
    layer: Layer = arguments["layer"]
    return layer.NUM_HEADS // layer.GROUP * -(-layer.GROUP // config.BLOCK_G)
