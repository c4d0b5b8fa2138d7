"""The launches of `paged_attention` for one combination of shapes, strides, dtypes and options."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel

from ...attention_options import AttentionOptions
from ..launch import BoundLaunch, programs_per_sm
from ..target import in_interpreter, num_sms
from .config import AttentionConfig, Use, choose_config, split_size
from .descriptors import describe, loads_by_descriptors, register_limit
from .kernel import decode_kernel, prefill_kernel
from .split_kv import MAX_SPLITS, DecodePlan, Splits, merge_launch
from .tiles import Layer

_TL_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, slots=True)
class Configs:
    """The properties of model and target that determine tile shapes."""

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
class DecodeLaunches:
    """The launches for a batch's decodes.

    A split writes partial results, unless it is the only one of its sequence. Then it writes the output
    directly, in every batch.
    """

    splits: Splits
    decode: BoundLaunch
    box: tuple[int, ...] | None  # of the caches' descriptors; None: they are loaded by pointers
    merge: BoundLaunch | None
    places: tuple[int, int, int]  # of partial results: items, query tokens and heads


def bind_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    options: AttentionOptions,
    configs: Configs,
) -> BoundLaunch:
    """Bind the launch for all sequences that are not decodes."""
    config = configs.choose("prefill")
    num_seqs = len(block_tables)
    layer = _layer(query, key_cache, value_cache, options)
    # sum_i ceil(query_len_i / BLOCK_Q) is at most this, whatever the lengths: no need to know them here.
    num_q_blocks = query.shape[0] // config.BLOCK_Q + num_seqs
    grid = (num_q_blocks, _num_head_blocks(layer, config))
    numbers = _numbers(block_tables, options)
    return BoundLaunch(
        prefill_kernel, grid, **numbers, DECODE_Q=configs.max_decode_q, layer=layer, **_tiles(config)
    )


def bind_decodes(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    options: AttentionOptions,
    configs: Configs,
    splits: Splits,
) -> DecodeLaunches:
    """Bind the launches for all decodes, given the list of their splits."""
    layer = _layer(query, key_cache, value_cache, options)
    config = configs.choose("decode")
    num_seqs = len(block_tables)
    partial_q = configs.max_decode_q
    most_programs = num_seqs * splits.most_splits * _num_head_blocks(layer, config)
    fitting = num_sms(query.device)

    def grid(compiled: CompiledKernel | None) -> tuple[int, ...]:
        return (min(most_programs, fitting * programs_per_sm(compiled, configs.target)),)

    by_descriptors = loads_by_descriptors(key_cache, value_cache, config, configs.dtype, configs.target)
    decode = BoundLaunch(
        decode_kernel,
        grid,
        **_numbers(block_tables, options),
        partial_q=partial_q,
        min_split=split_size(configs.target),
        SPLIT=split_size(configs.target),
        MAX_SPLITS=MAX_SPLITS,
        layer=layer,
        **_tiles(config),
        **({"maxnreg": register_limit(key_cache.dtype)} if by_descriptors else {}),
    )
    box = (1, config.TILE, 1, key_cache.shape[3]) if by_descriptors else None
    merge = None
    num_items = 0
    if splits.most_splits > 1:
        num_items = num_seqs * splits.most_splits
        merge = merge_launch(num_seqs, partial_q, layer.NUM_HEADS, layer.VALUE_DIM)
    return DecodeLaunches(splits, decode, box, merge, (num_items, partial_q, layer.NUM_HEADS))


def launch_decodes(
    bound: DecodeLaunches,
    plan: DecodePlan,
    query: Tensor,
    tensors: tuple[Tensor | None, ...],  # of the layer: caches, scales, output, sinks and last keys
    lengths: tuple[Tensor, Tensor, Tensor],  # block_tables, seq_lens and cu_seqlens_q
) -> None:
    """Attend to all splits, and merge the splits of each sequence."""
    key_cache, value_cache, _, _, out = tensors[:5]
    assert key_cache is not None, "`paged_attention` gives them"
    assert value_cache is not None
    assert out is not None
    partial = torch.empty(*bound.places, out.shape[2], dtype=torch.float32, device=out.device)
    partial_max = torch.empty(bound.places, dtype=torch.float32, device=out.device)
    partial_sum = torch.empty(bound.places, dtype=torch.float32, device=out.device)
    described = (
        (describe(key_cache, bound.box), describe(value_cache, bound.box)) if bound.box else (None, None)
    )
    partials = partial, partial_max, partial_sum, plan.work, plan.first_item
    bound.decode(query, *described, *tensors, *partials, *lengths)
    if bound.merge is not None:
        bound.merge(partial, partial_max, partial_sum, out, plan.first_item, lengths[2])


def _numbers(block_tables: Tensor, options: AttentionOptions) -> dict[str, Any]:
    """Return the arguments of all launches that are numbers."""
    return {
        "num_seqs": block_tables.shape[0],
        "stride_table": block_tables.stride(0),
        "score_scale": float(options.scale),  # an int would be compiled for
        # From scores to powers of two, in one multiplication where no softcap comes between.
        "exp_scale": math.log2(math.e) * (options.scale if options.softcap is None else 1.0),
        "softcap": float(options.softcap or 0.0),
    }


def _layer(query: Tensor, key_cache: Tensor, value_cache: Tensor, options: AttentionOptions) -> Layer:
    """Return what is compiled for."""
    _, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, value_dim = value_cache.shape
    # The largest power of two, and what is left over: 80 = 64 + 16, 576 = 512 + 64.
    block_d = 1 << (head_dim.bit_length() - 1)
    rest = head_dim - block_d
    quantized = options.key_scales is not None
    return Layer(
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
        SOFTCAP=options.softcap is not None,
        SINKS=options.sinks is not None,
        LAST_KEYS=options.last_keys is not None,
        QUANTIZED=quantized,
        VALUE_IN_KEY=value_dim == block_d and _is_view_of(value_cache, key_cache),
        **_dot_dtypes(query.dtype, quantized=quantized),
    )


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


def _tiles(config: AttentionConfig) -> dict[str, Any]:
    return {"tiles": config, "num_warps": config.num_warps, "num_stages": config.num_stages}


def _num_head_blocks(layer: Layer, config: AttentionConfig) -> int:
    return layer.NUM_HEADS // layer.GROUP * -(-layer.GROUP // config.BLOCK_G)
