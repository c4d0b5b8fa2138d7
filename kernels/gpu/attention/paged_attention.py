"""Attention of a ragged batch over paged K and V: prefill chunks and decodes in one call.

A sequence with one new token, or up to max_decode_q, is a decode: `decode_kernel` runs on splits of its
context, which split_kv.py lists and merges. For any other, `prefill_kernel` runs on blocks of query tokens.
The kernel, the length of a split and the order of the merge depend on the sequence alone: the result is
batch-invariant.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...attention_options import (
    FIRST_TENSOR,
    AttentionOptions,
    AttentionPlan,
    check_attention,
    check_layout,
    check_lengths,
    check_plan,
    layout_of,
)
from ...checks import check_between, in_debug_mode
from ..launch import BoundLaunch, Launches, combination
from ..target import check_launchable, check_target, current_target
from .config import split_size
from .launches import Configs, DecodeLaunches, bind_decodes, bind_prefill, launch_decodes
from .split_kv import DecodePlan, Splits, plan_decodes

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # those of `paged_attention`


@dataclass(frozen=True, slots=True)
class _Bound:
    """The launches of a combination of arguments, which have been checked."""

    prefill: BoundLaunch | None
    decodes: DecodeLaunches | None  # None: no sequence can be a decode
    shape: tuple[int, int, int]  # of the output


@dataclass(frozen=True, slots=True)
class _LayerPlan(AttentionPlan):
    """What the launches of a batch have in common."""

    combination: tuple[object, ...] | None  # of the layer that the plan was made for
    bound: _Bound
    decodes: DecodePlan | None


def plan_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    options: AttentionOptions,
) -> _LayerPlan:
    """Check the inputs and list the splits of all decodes. `paged_attention` has the same parameters.

    Raises ValueError for a shape, dtype, stride, device, value or combination that does not fit. The contents
    of the int32 tensors are checked only in debug mode, see `checks`.
    """
    inputs = query, key_cache, value_cache, block_tables, seq_lens, cu_seqlens_q
    key = _combination(inputs, options)
    bound = _launches.find(key, inputs, options)
    layout = layout_of(query, key_cache, value_cache, block_tables, seq_lens, options)
    decodes = None if bound.decodes is None else plan_decodes(seq_lens, cu_seqlens_q, bound.decodes.splits)
    return _LayerPlan(layout, key, bound, decodes)


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

    New token j of a sequence has position seq_len - query_len + j. It sees the positions up to its own; with
    a `sliding_window`, only the last `sliding_window` of these, its own included (as in HF). A sequence may
    have no new token. Slots past seq_len, or before the window, may hold anything; block table entries past
    the last block are never read. Rows of query past cu_seqlens_q[-1] give undefined rows.

    plan: the plan from `plan_attention` for the inputs of one layer. It serves all layers with the same
        layout in this step; their inputs are only compared with the layout, not checked again. A plan must
        not outlive its batch.

    Options besides `scale`:
    softcap: turns scores into softcap tanh(score / softcap), as in Gemma 2.
    sinks: an additional logit per head in the softmax, without a value, as in gpt-oss.
    last_keys: i32[num_tokens], the last position that each token sees instead of its own, from its own to the
        last of the sequence: tokens of an image, say, see each other. Windows end at a token's own position.
    key_scales, value_scales: a quantised cache holds key / key_scales for each token and head. A plain cache
        has query's dtype, or float16 or bfloat16 if query is float32.
    max_seqlen_q, min_seqlen_q: bounds of the number of new tokens of any sequence that has new tokens. If no
        sequence can be a decode by these bounds, no decodes are planned.
    max_seq_len: maximum number of tokens of a sequence with new tokens; None for as many as the block tables
        hold. It determines launches and the memory for partial results, but no bit of the result.
    max_decode_q: maximum number of new tokens of a decode, whose context is split. More than 1 is for
        speculative decoding: without a window, and with at most MAX_SPLITS splits, a token's bits are the
        same as when it is computed alone. Memory for partial results grows with max_decode_q. Tokens times
        heads of a group may be at most 16 in float32, otherwise 64 up to a head_dim of 128 and often fewer
        beyond; the error names the limit.

    A value cache that is a view of the first value_dim of key_cache (MLA) is not read a second time. Tiles
    with an online softmax follow FlashAttention-2, split decodes flash decoding (Dao 2023), and blocks
    PagedAttention (Kwon et al. 2023). Raises ValueError if the inputs or the plan do not fit.
    """
    inputs = query, key_cache, value_cache, block_tables, seq_lens, cu_seqlens_q
    if plan is None:
        plan = plan_attention(*inputs, options)
        bound = plan.bound
    elif type(plan) is _LayerPlan and plan.combination == _combination(inputs, options) is not None:
        bound = plan.bound
    else:
        bound = _bound_for(plan, inputs, options)
    assert isinstance(plan, _LayerPlan), "check_plan compares the types"
    out = query.new_empty(bound.shape)
    scales = options.key_scales, options.value_scales
    tensors = key_cache, value_cache, *scales, out, options.sinks, options.last_keys
    lengths = block_tables, seq_lens, cu_seqlens_q
    # Which of the two serves a sequence is decided on the device, by its own query_len.
    if bound.prefill is not None:
        bound.prefill(query, *tensors, *lengths)
    if bound.decodes is not None:
        assert plan.decodes is not None, "the plan's layout is this one"
        launch_decodes(bound.decodes, plan.decodes, query, tensors, lengths)
    return out


def _bound_for(plan: AttentionPlan, inputs: Inputs, options: AttentionOptions) -> _Bound:
    """Return the launches for a layer that differs from the plan's, as far as one of the same layout may."""
    query, key_cache, value_cache, block_tables, seq_lens, _ = inputs
    check_plan(plan, _LayerPlan)
    if in_debug_mode():
        fresh = plan_attention(*inputs, options)
        check_layout(plan, fresh.layout)
        check_lengths(isinstance(plan, _LayerPlan) and _same_work(plan.decodes, fresh.decodes))
        return fresh.bound
    check_launchable("query", query)
    check_layout(plan, layout_of(query, key_cache, value_cache, block_tables, seq_lens, options))
    key = _combination(inputs, options)
    return _bind_checked(inputs, options) if key is None else _launches.find(key, inputs, options)


def _same_work(a: DecodePlan | None, b: DecodePlan | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a.first_item, b.first_item))


def _combination(inputs: Inputs, options: AttentionOptions) -> tuple[object, ...] | None:
    """Return what checks and launches follow from, see `combination`."""
    if type(options) is not AttentionOptions:
        return None
    return combination((*inputs, *options[FIRST_TENSOR:]), *options[:FIRST_TENSOR], pair=inputs[1:3])


def _bind(inputs: Inputs, options: AttentionOptions) -> _Bound:
    """Check the arguments. Return their launches."""
    check_attention(*inputs, options)
    check_launchable("query", inputs[0])
    check_target(inputs[1].dtype, current_target())
    return _bind_checked(inputs, options)


def _bind_checked(inputs: Inputs, options: AttentionOptions) -> _Bound:
    query, key_cache, value_cache, block_tables, seq_lens, _ = inputs
    num_tokens, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, value_dim = value_cache.shape
    configs = Configs(
        head_dim=head_dim,
        value_dim=value_dim,
        group=num_heads // num_kv_heads,
        dtype=query.dtype,
        cache_dtype=key_cache.dtype,
        target=current_target(),
        max_decode_q=options.max_decode_q,
    )
    prefill = decodes = None
    if num_tokens and len(seq_lens):
        config = configs.choose("decode")
        check_between("max_decode_q", options.max_decode_q, 1, config.BLOCK_Q)
        layers = query, key_cache, value_cache, block_tables
        if options.max_seqlen_q > options.max_decode_q:
            prefill = bind_prefill(*layers, options, configs)
        if options.min_seqlen_q <= options.max_decode_q:
            max_keys = block_tables.shape[1] * block_size
            splits = Splits(
                len(seq_lens),
                max_keys=max_keys if options.max_seq_len is None else min(max_keys, options.max_seq_len),
                decode_q=options.max_decode_q,
                window=options.sliding_window or 0,
                tile=config.TILE,
                split=split_size(configs.target),
            )
            decodes = bind_decodes(*layers, options, configs, splits)
    return _Bound(prefill, decodes, (num_tokens, num_heads, value_dim))


_launches = Launches(_bind)
