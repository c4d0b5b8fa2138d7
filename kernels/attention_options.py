"""The options, plans and checks of `paged_attention`, shared by its implementations."""

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from .checks import (
    check_between,
    check_device,
    check_dtype,
    check_last_dim_contiguous,
    check_multiple,
    check_positive,
    check_scales,
    check_shape,
    check_span,
    must_read_contents,
)

MAX_GROUP = 128
MIN_HEAD_DIM = 16
MAX_HEAD_DIM = 576
SOFTCAP_EXPONENT = 13  # results are off by a few roundings of a softcap
_MAX_INT32 = 2**31 - 1


class AttentionOptions(NamedTuple):
    """The options of `paged_attention`. `gpu.attention.paged_attention` explains each option."""

    scale: float
    max_seqlen_q: int
    min_seqlen_q: int = 0
    max_decode_q: int = 1
    sliding_window: int | None = None
    softcap: float | None = None
    max_seq_len: int | None = None
    # Tensors come last, from FIRST_TENSOR on: each layer has its own, see `layout_of`.
    sinks: Tensor | None = None  # f32[num_heads]
    key_scales: Tensor | None = None  # f32[num_blocks, num_kv_heads, block_size], of an fp8 or int8 cache
    value_scales: Tensor | None = None  # like key_scales
    last_keys: Tensor | None = None  # i32[num_tokens], the last position that each token sees


FIRST_TENSOR: Final = 7  # among the fields of AttentionOptions


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What attention derives from the lengths of a batch, computed once for all layers with the same
    `layout`.

    Each backend adds the fields that its kernels read.
    """

    layout: tuple[object, ...]


def layout_of(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    options: AttentionOptions,
) -> tuple[object, ...]:
    """Return what layers that share a plan must have in common: shapes, dtypes, strides and plain options."""
    return (
        query.shape, query.dtype, query.stride(), key_cache.shape, key_cache.dtype, key_cache.stride(),
        value_cache.shape, value_cache.stride(), block_tables.shape, block_tables.stride(), seq_lens.shape,
        options[:FIRST_TENSOR], options.last_keys is None,
    )  # fmt: skip


def check_plan(plan: AttentionPlan | None, kind: type[AttentionPlan]) -> None:
    """Raise ValueError unless `plan` is None or a plan of this backend."""
    if plan is not None and type(plan) is not kind:
        raise ValueError(f"plan must be from plan_attention of this backend, got {type(plan).__name__}")


def check_layout(plan: AttentionPlan, layout: tuple[object, ...]) -> None:
    """Raise ValueError if the plan was made for another layout."""
    if plan.layout != layout:
        raise ValueError("this plan was made for tensors of another layout, or for other options")


def check_lengths(are_same: bool) -> None:
    """Raise ValueError if the plan was made for other lengths. Called in debug mode only."""
    if not are_same:
        raise ValueError("this plan was made for the lengths of another batch")


def check_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    options: AttentionOptions,
    *,
    any_layout: bool = False,
) -> None:
    """Raise ValueError unless the inputs fit together. For the tensors' contents, see `must_read_contents`.

    any_layout: whether all strides and head dimensions are accepted, as in plain torch.
    """
    if not isinstance(options, AttentionOptions):
        raise ValueError(f"options must be AttentionOptions, got {type(options).__name__}")
    check_shape("query", query, (None, None, None))
    check_dtype("query", query)
    num_tokens, num_heads, head_dim = query.shape
    check_shape("key_cache", key_cache, (None, None, None, head_dim))
    num_blocks, block_size, num_kv_heads, _ = key_cache.shape
    check_shape("value_cache", value_cache, (num_blocks, block_size, num_kv_heads, None), key_cache.dtype)
    check_multiple("num_heads", num_heads, "num_kv_heads", num_kv_heads)
    check_positive("the GQA group", num_heads // num_kv_heads)
    for name, dim in {"head_dim": head_dim, "value_dim": value_cache.shape[3]}.items():
        check_positive(name, dim)
        if not any_layout:
            check_between(name, dim, MIN_HEAD_DIM, MAX_HEAD_DIM)
            check_between("the GQA group", num_heads // num_kv_heads, 1, MAX_GROUP)
    check_scales(key_cache, options.key_scales, options.value_scales, query.dtype)
    check_positive("block_size", block_size)
    check_shape("seq_lens", seq_lens, (None,), torch.int32)
    num_seqs = seq_lens.shape[0]
    check_shape("cu_seqlens_q", cu_seqlens_q, (num_seqs + 1,), torch.int32)
    check_shape("block_tables", block_tables, (num_seqs, None), torch.int32)
    if num_tokens and num_seqs:  # kernels read the first entry, whatever the lengths
        check_positive("block_tables.shape[1]", block_tables.shape[1])
    if options.sinks is not None:
        check_shape("sinks", options.sinks, (num_heads,), torch.float32)
    if options.last_keys is not None:
        check_shape("last_keys", options.last_keys, (num_tokens,), torch.int32)
    large = {"query": query, "key_cache": key_cache, "value_cache": value_cache}
    tensors = {
        **large,
        "block_tables": block_tables,
        "seq_lens": seq_lens,
        "cu_seqlens_q": cu_seqlens_q,
        "sinks": options.sinks,
        "last_keys": options.last_keys,
    }
    for name, tensor in tensors.items():
        if tensor is not None:
            check_device(name, tensor, query.device)
            if not any_layout:
                check_last_dim_contiguous(name, tensor)
    if not any_layout:
        for name, tensor in large.items():
            check_span(name, tensor)
    _check_options(options)
    if must_read_contents(query.device):
        from .content_checks import check_contents

        check_contents(key_cache, block_tables, seq_lens, cu_seqlens_q, num_tokens, options)


def _check_options(options: AttentionOptions) -> None:
    check_positive("scale", options.scale)
    check_between("max_seqlen_q", options.max_seqlen_q, 1, _MAX_INT32)
    check_between("min_seqlen_q", options.min_seqlen_q, 0, options.max_seqlen_q)
    check_between("max_decode_q", options.max_decode_q, 1, _MAX_INT32)
    if options.sliding_window is not None:
        check_between("sliding_window", options.sliding_window, 1, _MAX_INT32)
    if options.softcap is not None:
        check_positive("softcap", options.softcap, SOFTCAP_EXPONENT)
    if options.max_seq_len is not None:
        check_between("max_seq_len", options.max_seq_len, 1, _MAX_INT32)
