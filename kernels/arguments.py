"""What the arguments of each operation must be, on every backend; attention's are in attention_options.py.

A check raises ValueError, before anything is written. It reads what tensors hold where `must_read_contents`
says so. A backend whose kernels need more of a layout, as Triton's do, checks the rest itself.
"""

import torch
from torch import Tensor

from .checks import (
    KERNEL_DTYPES,
    QUANTIZED_DTYPES,
    check_alone,
    check_apart,
    check_between,
    check_contiguous,
    check_device,
    check_dtype,
    check_eps,
    check_flag,
    check_indices,
    check_multiple,
    check_once,
    check_positive,
    check_range,
    check_scales,
    check_shape,
    check_tensor,
    must_read_contents,
)

_LARGEST = torch.finfo(torch.float32).max


def check_take_rows(table: Tensor, indices: Tensor, out: Tensor | None = None) -> None:
    """Raise ValueError unless these are a table [n, size], i64[m] below n, and out like [m, size] of it."""
    check_shape("table", table, (None, None))
    check_dtype("table", table)
    check_shape("indices", indices, (None,), torch.int64)
    check_device("indices", indices, table.device)
    if must_read_contents(table.device):
        check_indices("indices", indices, "the table's rows", len(table))
    if out is not None:
        check_shape("out", out, (len(indices), table.shape[1]), table.dtype)
        check_device("out", out, table.device)
        check_contiguous("out", out)
        check_apart("out", out)
        if must_read_contents(table.device):
            check_alone({"out": out}, {"table": table, "indices": indices})


def check_rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, *, unit_offset: bool
) -> None:
    """Raise ValueError unless x is [..., size], weight [size] and residual like x, all of one dtype."""
    check_tensor("x", x)
    check_dtype("x", x)
    if x.dim() == 0:
        raise ValueError("x must have shape [..., size], got []")
    check_positive("x.shape[-1]", x.shape[-1])
    check_shape("weight", weight, (x.shape[-1],), x.dtype)
    check_device("weight", weight, x.device)
    check_eps(eps)
    check_flag("unit_offset", unit_offset)
    if residual is not None:
        check_shape("residual", residual, x.shape, x.dtype)
        check_device("residual", residual, x.device)
        check_apart("residual", residual)
        if must_read_contents(x.device):
            check_alone({"residual": residual}, {"x": x, "weight": weight})


def check_rms_norm_into(
    x: Tensor, weight: Tensor, eps: float, out: Tensor, *, unit_offset: bool, add: bool
) -> None:
    """Raise ValueError unless x is [num_tokens, size] or [num_tokens, num_heads, size], weight [size], and
    `out` like x, or x itself.
    """
    check_tensor("x", x)
    check_shape("x", x, (None,) * (3 if x.dim() == 3 else 2))
    check_rms_norm(x, weight, eps, None, unit_offset=unit_offset)
    check_flag("add", add)
    check_shape("out", out, x.shape, x.dtype)
    check_device("out", out, x.device)
    check_apart("out", out)
    if must_read_contents(x.device):
        same = x.data_ptr() == out.data_ptr() and x.stride() == out.stride()
        check_alone({"out": out}, {"weight": weight} if same else {"x": x, "weight": weight})


def check_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None) -> None:
    """Raise ValueError unless x is [num_rows, size], weight and bias [size] and residual like x."""
    check_shape("x", x, (None, None))
    check_rms_norm(x, weight, eps, residual, unit_offset=False)
    check_shape("bias", bias, weight.shape, x.dtype)
    check_device("bias", bias, x.device)
    if residual is not None and must_read_contents(x.device):
        check_alone({"residual": residual}, {"bias": bias})


def check_silu_and_mul(x: Tensor) -> None:
    """Raise ValueError unless x is [num_tokens, 2 * size]."""
    check_shape("x", x, (None, None))
    check_dtype("x", x)
    check_multiple("x.shape[1]", x.shape[1], "the two halves", 2)


def check_gelu_and_mul(x: Tensor, up: Tensor | None) -> None:
    """Raise ValueError unless x is [num_tokens, 2 * size], or [num_tokens, size] as is `up`."""
    if up is None:
        check_silu_and_mul(x)
        return
    check_shape("x", x, (None, None))
    check_dtype("x", x)
    check_shape("up", up, x.shape, x.dtype)
    check_device("up", up, x.device)


def check_gelu(x: Tensor, *, tanh: bool) -> None:
    """Raise ValueError unless x is [num_rows, size]."""
    check_shape("x", x, (None, None))
    check_dtype("x", x)
    check_apart("x", x)
    check_flag("tanh", tanh)


def check_add(x: Tensor, out: Tensor) -> None:
    """Raise ValueError unless x is [num_rows, size], and `out` like x."""
    check_shape("x", x, (None, None))
    check_dtype("x", x)
    check_shape("out", out, x.shape, x.dtype)
    check_device("out", out, x.device)
    check_apart("out", out)
    if must_read_contents(x.device):
        check_alone({"out": out}, {"x": x})


def check_scale_and_cap(x: Tensor, factor: float, softcap: float | None) -> None:
    """Raise ValueError unless x is [num_rows, size], and the numbers are positive."""
    check_shape("x", x, (None, None))
    check_dtype("x", x)
    check_apart("x", x)
    check_positive("factor", factor)
    if softcap is not None:
        check_positive("softcap", softcap)


def check_scale_rows(x: Tensor, factors: Tensor) -> None:
    """Raise ValueError unless x is [num_rows, size], and factors f32[num_rows]."""
    check_shape("x", x, (None, None))
    check_dtype("x", x)
    check_apart("x", x)
    check_shape("factors", factors, (len(x),), torch.float32)
    check_device("factors", factors, x.device)
    if must_read_contents(x.device):
        check_alone({"x": x}, {"factors": factors})


def check_rotary_store_kv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor | None,
    value_cache: Tensor | None,
    slot_mapping: Tensor | None,
    query_norm_weight: Tensor | None,
    key_norm_weight: Tensor | None,
    eps: float,
    unit_offset: bool,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> None:
    """Raise ValueError unless the tensors have the shapes that `reference.rotary_store_kv` gives."""
    check_shape("qkv", qkv, (None, None, None))
    check_dtype("qkv", qkv)
    num_tokens, num_all_heads, head_dim = qkv.shape
    check_positive("head_dim", head_dim)
    check_multiple("head_dim", head_dim, "the two halves", 2)
    check_eps(eps)
    check_flag("unit_offset", unit_offset)
    for name, angles in {"cos": cos, "sin": sin}.items():
        check_shape(name, angles, (num_tokens, head_dim // 2), torch.float32)
    of_keys = value_cache, slot_mapping, key_norm_weight, key_scales, value_scales
    if key_cache is None and any(tensor is not None for tensor in of_keys):
        raise ValueError("without key_cache there must be no other tensor of keys or values")
    read: dict[str, Tensor | None] = {"cos": cos, "sin": sin, "slot_mapping": slot_mapping}
    if key_cache is not None:
        if value_cache is None or slot_mapping is None:
            raise ValueError("with key_cache there must be value_cache and slot_mapping")
        check_shape("key_cache", key_cache, (None, None, None, head_dim))
        check_scales(key_cache, key_scales, value_scales, qkv.dtype)
        _, block_size, num_kv_heads, _ = key_cache.shape
        check_positive("block_size", block_size)
        if num_kv_heads < 1 or num_all_heads <= 2 * num_kv_heads:
            raise ValueError(
                f"qkv must have more than twice key_cache's heads, got {num_all_heads} and {num_kv_heads}"
            )
        check_shape("value_cache", value_cache, key_cache.shape, key_cache.dtype)
        check_shape("slot_mapping", slot_mapping, (num_tokens,), torch.int64)
        if (query_norm_weight is None) != (key_norm_weight is None):
            raise ValueError("query_norm_weight and key_norm_weight must both be given or both be None")
    for name, weight in {"query_norm_weight": query_norm_weight, "key_norm_weight": key_norm_weight}.items():
        if weight is not None:
            check_shape(name, weight, (head_dim,), qkv.dtype)
            read[name] = weight
    written: dict[str, Tensor | None] = {"qkv": qkv, "key_cache": key_cache, "value_cache": value_cache}
    for name, tensor in (*read.items(), *written.items()):
        if tensor is not None:
            check_device(name, tensor, qkv.device)
    scales = {"key_scales": key_scales, "value_scales": value_scales}
    for name, tensor in (*written.items(), *scales.items()):
        if tensor is not None:
            check_apart(name, tensor)
    if must_read_contents(qkv.device):
        if key_cache is not None and slot_mapping is not None:
            check_indices("slot_mapping", slot_mapping, "the cache's slots", len(key_cache) * block_size)
            check_once("slot_mapping", slot_mapping)
        check_alone({**written, **scales}, read)


def check_copy_blocks(cache: Tensor, pairs: Tensor, target: Tensor | None = None) -> None:
    """Raise ValueError unless pairs are i64[n, 2], no block both a source and a target, or a target twice.

    target: has planes and blocks like the cache's, and may be on another device.
    """
    check_shape("cache", cache, (None, None, None, None, None))
    check_dtype("cache", cache, (*KERNEL_DTYPES, *QUANTIZED_DTYPES))
    check_shape("pairs", pairs, (None, 2), torch.int64)
    if target is not None:
        check_shape("target", target, (len(cache), None, *cache.shape[2:]), cache.dtype)
        check_apart("target", target)
        check_device("pairs", pairs, target.device if cache.device.type == "cpu" else cache.device)
        if must_read_contents(pairs.device):
            check_indices("the sources of pairs", pairs[:, 0], "the cache's blocks", cache.shape[1])
            check_indices("the targets of pairs", pairs[:, 1], "the target's blocks", target.shape[1])
            check_once("the targets of pairs", pairs[:, 1])
            check_alone({"target": target}, {"cache": cache, "pairs": pairs})
        return
    check_apart("cache", cache)
    check_device("pairs", pairs, cache.device)
    if must_read_contents(cache.device):
        check_indices("pairs", pairs, "the cache's blocks", cache.shape[1])
        check_once("the targets of pairs", pairs[:, 1])
        both = sorted(set(pairs[:, 0].tolist()) & set(pairs[:, 1].tolist()))
        if both:
            raise ValueError(f"pairs must not have a block as source and as target, got {both}")
        check_alone({"cache": cache}, {"pairs": pairs})


def check_logits(logits: Tensor) -> None:
    """Raise ValueError unless logits are f32[n, vocab_size] with at least one token."""
    check_shape("logits", logits, (None, None), torch.float32)
    check_positive("the vocabulary", logits.shape[1])


def check_token_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> None:
    """Raise ValueError unless tokens are i64[n] of the vocabulary, and num_top is 0 to its size."""
    check_logits(logits)
    check_shape("tokens", tokens, (len(logits),), torch.int64)
    check_device("tokens", tokens, logits.device)
    check_between("num_top", num_top, 0, logits.shape[1])
    if must_read_contents(logits.device):
        check_indices("tokens", tokens, "the vocabulary", logits.shape[1])


def check_penalties(
    logits: Tensor,
    rows: Tensor,
    slots: Tensor,
    output_counts: Tensor,
    seen: Tensor,
    repetition_penalty: Tensor,
    frequency_penalty: Tensor,
    presence_penalty: Tensor,
) -> None:
    """Raise ValueError unless there is a slot and a number of each penalty for each of the rows."""
    penalties = {
        "repetition_penalty": repetition_penalty,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
    }
    check_logits(logits)
    check_apart("logits", logits)
    check_shape("rows", rows, (None,), torch.int64)
    check_shape("slots", slots, (len(rows),), torch.int64)
    check_shape("output_counts", output_counts, (None, logits.shape[1]), torch.int32)
    check_shape("seen", seen, output_counts.shape, torch.bool)
    for name, penalty in penalties.items():
        check_shape(name, penalty, (len(rows),), torch.float32)
    read = {"rows": rows, "slots": slots, "output_counts": output_counts, "seen": seen, **penalties}
    for name, tensor in read.items():
        check_device(name, tensor, logits.device)
    if must_read_contents(logits.device):
        check_indices("rows", rows, "those of logits", len(logits))
        check_once("rows", rows)
        check_indices("slots", slots, "those of output_counts", len(output_counts))
        check_alone({"logits": logits}, read)


def check_filters(
    logits: Tensor,
    temperature: Tensor,
    min_p: Tensor | None,
    top_n_sigma: Tensor | None,
    typical_p: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
) -> None:
    """Raise ValueError unless there is a temperature, and a number of each filter in use, for each row."""
    check_logits(logits)
    filters = {"min_p": min_p, "top_n_sigma": top_n_sigma, "typical_p": typical_p}
    filters |= {"top_k": top_k, "top_p": top_p}
    limits = {"temperature": (0, _LARGEST), "top_n_sigma": (0, _LARGEST), "top_k": (1, 2**31 - 1)}
    read = {"temperature": temperature, **{name: x for name, x in filters.items() if x is not None}}
    for name, column in read.items():
        check_shape(name, column, (len(logits),), torch.int32 if name == "top_k" else torch.float32)
        check_device(name, column, logits.device)
    if must_read_contents(logits.device):
        for name, column in read.items():
            check_range(name, column, *limits.get(name, (0, 1)))
        check_alone({"logits": logits}, read)


def check_sample_tokens(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    *filters: Tensor | None,
    highest: Tensor | None = None,
) -> None:
    """Raise ValueError unless each row of logits has a seed, a position, and what `check_filters` asks.

    filters: as `check_filters` takes them.
    highest: written.
    """
    check_filters(logits, temperature, *filters)
    check_apart("logits", logits)
    for name, tensor in {"seeds": seeds, "positions": positions}.items():
        check_shape(name, tensor, (len(logits),), torch.int64)
        check_device(name, tensor, logits.device)
    if highest is not None:
        check_shape("highest", highest, (len(logits),), torch.float32)
        check_device("highest", highest, logits.device)
        check_contiguous("highest", highest)
    if must_read_contents(logits.device):
        read = {"seeds": seeds, "positions": positions, "temperature": temperature}
        check_alone({"logits": logits, "highest": highest}, read)
