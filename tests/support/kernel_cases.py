"""Inputs for the kernel tests, made to expose errors: NaN in slots that no token owns, shuffled blocks."""

import random
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from paged.kernels.attention_options import AttentionOptions, AttentionPlan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="numba kernels are for a CPU, tensors here are on a GPU")
# Every implementation in every dtype that is sound there: the interpreter truncates to bfloat16.
IMPLEMENTATIONS = [
    pytest.param("numba", torch.float32, id="numba-float32", marks=on_cpu),
    pytest.param("numba", torch.bfloat16, id="numba-bfloat16", marks=on_cpu),
    pytest.param("numba", torch.float16, id="numba-float16", marks=on_cpu),
    pytest.param("torch", torch.float32, id="torch-float32"),
    pytest.param("torch", torch.bfloat16, id="torch-bfloat16"),
    pytest.param("triton", torch.float32, id="triton-float32"),
    pytest.param("triton", torch.float16, id="triton-float16"),
    pytest.param("triton", torch.bfloat16, id="triton-bfloat16", marks=pytest.mark.gpu),
]


def ragged_case(
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    value_dim: int | None = None,
    value_in_key: bool = False,
    sliding_window: int | None = None,
    extra_blocks: int = 3,
) -> dict[str, Any]:
    """Make arguments of paged_attention: query is a view into a wider qkv, slots not to be read are NaN.

    Heads lie before slots in the key cache and behind them in the value cache: strides are a launcher's own.
    With a window these are also the slots before every query's window, as if their blocks had been freed.
    value_in_key: values are the first value_dim numbers of the keys, as in MLA, not a cache of their own.
    """
    qkv_shape = sum(query_lens), num_heads + 2 * num_kv_heads, head_dim + 8
    qkv = torch.randn(qkv_shape, dtype=dtype, device=DEVICE)
    needed = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = sum(needed) + extra_blocks
    value_dim = head_dim if value_dim is None else value_dim
    nan = torch.full([], float("nan"), dtype=dtype, device=DEVICE)
    key_cache = nan.repeat(num_blocks, num_kv_heads, block_size, head_dim).transpose(1, 2)
    value_cache = nan.repeat(num_blocks, block_size, num_kv_heads, value_dim)
    blocks = torch.randperm(num_blocks)
    block_tables = torch.zeros(len(seq_lens), max(needed, default=0) + 1, dtype=torch.int32)
    first = 0
    for i, seq_len in enumerate(seq_lens):
        block_tables[i, : needed[i]] = blocks[first : first + needed[i]].int()
        first += needed[i]
        low = 0 if sliding_window is None else max(0, seq_len - query_lens[i] - sliding_window + 1)
        pos = torch.arange(low, seq_len)
        place = block_tables[i, pos // block_size].long(), pos % block_size
        for cache in (key_cache, value_cache):
            cache[place] = torch.randn(len(pos), *cache.shape[2:], dtype=dtype, device=DEVICE)
    return {
        "query": qkv[:, :num_heads, :head_dim],
        "key_cache": key_cache,
        "value_cache": key_cache[..., :value_dim] if value_in_key else value_cache,
        "block_tables": block_tables.to(DEVICE),
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        "cu_seqlens_q": cu_seqlens(query_lens),
        "scale": 1.3 * head_dim**-0.5,  # a model may have its own
        "max_seqlen_q": max([1, *query_lens]),
        "sliding_window": sliding_window,
    }


def last_keys_of(seq_lens: Sequence[int], query_lens: Sequence[int], generator: random.Random) -> Tensor:
    """Divide each sequence's new tokens into texts, and spans whose tokens see each other."""
    last_keys = list[int]()
    for seq_len, query_len in zip(seq_lens, query_lens, strict=True):
        first = seq_len - query_len
        while first < seq_len:
            end = min(seq_len, first + generator.choice([1, 2, 5, 9, 17, 40]))
            is_span = generator.random() < 0.6
            last_keys += [end - 1] * (end - first) if is_span else range(first, end)
            first = end
    return torch.tensor(last_keys, dtype=torch.int32, device=DEVICE)


def attend(paged_attention: Callable[..., Tensor], plan: AttentionPlan | None = None, **case: Any) -> Tensor:
    """Call a backend's paged_attention on a case, whose options become one value."""
    return paged_attention(*inputs_of(case), plan)


def inputs_of(case: dict[str, Any]) -> tuple[Any, ...]:
    """Return the tensors of a case and its AttentionOptions, as plan_attention takes them."""
    names = ("query", "key_cache", "value_cache", "block_tables", "seq_lens", "cu_seqlens_q")
    options = {name: value for name, value in case.items() if name not in names}
    return *(case[name] for name in names), AttentionOptions(**options)


def quantized(case: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Quantise the cache of a case; slots not to be read stay NaN, by their scales."""
    changed = {}
    is_view = case["key_cache"].data_ptr() == case["value_cache"].data_ptr()
    for name in ("key", "value"):
        cache = case[f"{name}_cache"].float()
        largest = 127.0 if dtype == torch.int8 else 448.0
        scales = cache.abs().amax(-1) / largest  # [num_blocks, block_size, num_kv_heads]
        values = (cache / scales[..., None]).nan_to_num()
        changed[f"{name}_cache"] = (values.round() if dtype == torch.int8 else values).to(dtype)
        changed[f"{name}_scales"] = scales.transpose(1, 2).contiguous()
    if is_view:
        value_dim = case["value_cache"].shape[3]
        changed |= {
            "value_cache": changed["key_cache"][..., :value_dim],
            "value_scales": changed["key_scales"],
        }
    return {**case, **changed}


def cu_seqlens(query_lens: Sequence[int]) -> Tensor:
    """Exclusive prefix sum of the new tokens: i32[len(query_lens) + 1]."""
    return torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=DEVICE)


def take_sequences(case: dict[str, Any], chosen: Sequence[int]) -> dict[str, Any]:
    """Return the case with the sequences `chosen` only, in that order."""
    bounds = case["cu_seqlens_q"].tolist()
    last_keys = case.get("last_keys")
    if last_keys is not None:
        last_keys = torch.cat([last_keys[bounds[i] : bounds[i + 1]] for i in chosen])
    return {
        **case,
        "query": torch.cat([case["query"][bounds[i] : bounds[i + 1]] for i in chosen]),
        "last_keys": last_keys,
        "block_tables": case["block_tables"][list(chosen)],
        "seq_lens": case["seq_lens"][list(chosen)],
        "cu_seqlens_q": cu_seqlens([bounds[i + 1] - bounds[i] for i in chosen]),
        "max_seqlen_q": max(1, *(bounds[i + 1] - bounds[i] for i in chosen)),
    }
