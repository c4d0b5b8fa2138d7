"""Valid calls of every launcher, small and random: what `tests.ops.fuzz` damages."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from paged.kernels import reference
from paged.kernels.attention_options import AttentionOptions
from paged.kernels.backend import BackendName, load_kernels
from paged.kernels.operations import Kernels
from paged.kernels.routing import ExpertRows, RoutingOptions
from tests.support.coded_weights import CODES, random_coded
from tests.support.kernel_cases import last_keys_of, quantized, ragged_case

TENSORS_OF_ATTENTION = (
    "query", "key_cache", "value_cache", "block_tables", "seq_lens", "cu_seqlens_q",
)  # fmt: skip
FILTERS = ("min_p", "top_n_sigma", "typical_p", "top_k", "top_p")
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


@dataclass
class Call:
    """A launcher and its arguments by name, each option and each field of Panels by itself."""

    name: str
    launch: Callable[..., Any]
    arguments: dict[str, Any]
    written: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()  # None is another valid call
    # The values that every entry must stay below, and those of which no two may be equal.
    indices: dict[str, int] = field(default_factory=dict)
    distinct: tuple[str, ...] = ()
    expected: Callable[..., Any] | None = None  # the reference, for calls that are accepted


def valid_call(backend: BackendName, generator: random.Random) -> Call:
    """Make a random valid call of one of a backend's launchers."""
    torch.manual_seed(generator.getrandbits(32))
    kernels = load_kernels(backend)
    makers = [*_MAKERS, _attention, _attention]
    if backend == "numba":
        makers += [_linear, _grouped_panels, _pack, _pack_codes, _pad, _panel_rows, _widen_rows]
    return generator.choice(makers)(kernels, generator)


def _dtype(generator: random.Random) -> torch.dtype:
    return generator.choice([torch.float32, torch.float16, torch.bfloat16])


def _take_rows(kernels: Kernels, generator: random.Random) -> Call:
    table = torch.randn(9, generator.choice([1, 16, 37])).to(_dtype(generator))
    arguments = {"table": table, "indices": torch.randint(9, (generator.randint(1, 5),))}
    if generator.random() < 0.5:
        arguments["out"] = torch.zeros(len(arguments["indices"]), table.shape[1], dtype=table.dtype)
    return Call(
        "take_rows",
        kernels.take_rows,
        arguments,
        ("out",),
        ("out",),
        indices={"indices": 9},
        expected=reference.take_rows,
    )


def _rms_norm(kernels: Kernels, generator: random.Random) -> Call:
    dtype, shape = _dtype(generator), (generator.randint(1, 4), generator.choice([16, 37, 256]))
    arguments: dict[str, Any] = {
        "x": torch.randn(shape).to(dtype),
        "weight": torch.randn(shape[1]).to(dtype),
        "eps": generator.choice([1e-5, 0, 1]),
        "unit_offset": generator.random() < 0.3,
    }
    if generator.random() < 0.5:
        arguments["residual"] = torch.randn(shape).to(dtype)
    written = ("residual",)
    return Call("rms_norm", kernels.rms_norm, arguments, written, written, expected=reference.rms_norm)


def _silu_and_mul(kernels: Kernels, generator: random.Random) -> Call:
    x = torch.randn(generator.randint(1, 4), 2 * generator.choice([1, 16, 37])).to(_dtype(generator))
    return Call("silu_and_mul", kernels.silu_and_mul, {"x": x}, expected=reference.silu_and_mul)


def _gelu_and_mul(kernels: Kernels, generator: random.Random) -> Call:
    x = torch.randn(generator.randint(1, 4), 2 * generator.choice([1, 16, 37])).to(_dtype(generator))
    arguments = {"x": x}
    if generator.random() < 0.5:
        arguments["up"] = torch.randn(x.shape).to(x.dtype)
    return Call("gelu_and_mul", kernels.gelu_and_mul, arguments, expected=reference.gelu_and_mul)


def _layer_norm(kernels: Kernels, generator: random.Random) -> Call:
    dtype, shape = _dtype(generator), (generator.randint(1, 4), generator.choice([16, 37, 256]))
    arguments: dict[str, Any] = {
        "x": torch.randn(shape).to(dtype),
        "weight": torch.randn(shape[1]).to(dtype),
        "bias": torch.randn(shape[1]).to(dtype),
        "eps": generator.choice([1e-5, 1]),
    }
    if generator.random() < 0.5:
        arguments["residual"] = torch.randn(shape).to(dtype)
    written = ("residual",)
    return Call("layer_norm", kernels.layer_norm, arguments, written, written, expected=reference.layer_norm)


def _gelu(kernels: Kernels, generator: random.Random) -> Call:
    x = torch.randn(generator.randint(1, 4), generator.choice([1, 16, 37])).to(_dtype(generator))
    arguments = {"x": x, "tanh": generator.random() < 0.5}
    return Call("gelu", kernels.gelu, arguments, ("x",), expected=reference.gelu)


def _add(kernels: Kernels, generator: random.Random) -> Call:
    dtype, shape = _dtype(generator), (generator.randint(1, 4), generator.choice([1, 16, 37]))
    arguments = {name: torch.randn(shape).to(dtype) for name in ("x", "out")}
    return Call("add", kernels.add, arguments, ("out",), expected=reference.add)


def _clamped_swiglu(kernels: Kernels, generator: random.Random) -> Call:
    x = torch.randn(generator.randint(1, 4), 2 * generator.choice([1, 16, 37])).to(_dtype(generator))
    arguments = {"x": x, "limit": 7.0, "alpha": 1.702}
    return Call("clamped_swiglu", kernels.clamped_swiglu, arguments, expected=reference.clamped_swiglu)


def _route(kernels: Kernels, generator: random.Random) -> Call:
    num_tokens, num_experts = generator.randint(1, 4), generator.choice([4, 8, 36])
    options = RoutingOptions(
        num_chosen=generator.randint(1, 2),
        score=generator.choice(["softmax", "sigmoid", "softmax_of_chosen"]),
        num_groups=generator.choice([1, 2]),
        group_score=generator.choice(["best", "best_two"]),
        renormalise=generator.random() < 0.5,
    )
    arguments: dict[str, Any] = {"logits": torch.randn(num_tokens, num_experts), "options": options}
    optional = "correction_bias", "expert_scales"
    for name in optional:
        if generator.random() < 0.5:
            arguments[name] = torch.rand(num_experts)
    return Call("route", kernels.route, arguments, (), optional, expected=reference.route)


def _expert_rows(generator: random.Random, num_experts: int) -> tuple[Tensor, ExpertRows]:
    chosen = [torch.randperm(num_experts)[:2].sort().values for _ in range(generator.randint(1, 4))]
    experts = torch.stack(chosen).int()
    return experts, reference.sort_by_expert(experts, num_experts)


def _sort_by_expert(kernels: Kernels, generator: random.Random) -> Call:
    experts, _ = _expert_rows(generator, 5)
    arguments = {"experts": experts, "num_experts": 5}
    if generator.random() < 0.5:
        arguments["adapters"] = torch.randint(-1, 3, (len(experts),), dtype=torch.int32)
    expected = reference.sort_by_expert
    return Call(
        "sort_by_expert",
        kernels.sort_by_expert,
        arguments,
        optional=("adapters",),
        indices={"experts": 5},
        expected=expected,
    )


def _grouped_linear(kernels: Kernels, generator: random.Random) -> Call:
    dtype, width = _dtype(generator), generator.choice([2, 16, 37])
    _, rows = _expert_rows(generator, 3)
    x = torch.randn(len(rows.places), width).to(dtype)
    arguments = {"x": x, "weight": torch.randn(3, 5, width).to(dtype), "offsets": rows.offsets}
    arguments["sources"] = rows.sources
    if generator.random() < 0.5:
        arguments["bias"] = torch.randn(3, 5).to(dtype)
    return Call(
        "grouped_linear",
        kernels.grouped_linear,
        arguments,
        optional=("bias",),
        indices={"sources": len(x)},
        expected=reference.grouped_linear,
    )


def _sum_experts(kernels: Kernels, generator: random.Random) -> Call:
    dtype, size = _dtype(generator), generator.choice([1, 16, 37])
    _, rows = _expert_rows(generator, 3)
    arguments = {
        "x": torch.randn(len(rows.sources), size).to(dtype),
        "places": rows.places,
        "weights": torch.rand(rows.places.shape),
    }
    optional: tuple[str, ...] = ()
    if generator.random() < 0.5:
        arguments["shared"] = torch.randn(len(rows.places), size).to(dtype)
        optional = ("shared",)
        if generator.random() < 0.5:
            arguments["shared_gate"] = torch.randn(len(rows.places), 1)
            optional = ("shared_gate",)  # which goes with the other
    return Call(
        "sum_experts",
        kernels.sum_experts,
        arguments,
        optional=optional,
        indices={"places": len(rows.sources)},
        expected=reference.sum_experts,
    )


def _rms_norm_into(kernels: Kernels, generator: random.Random) -> Call:
    heads = generator.choice([(), (1,), (3,)])
    dtype, shape = _dtype(generator), (generator.randint(1, 4), *heads, generator.choice([16, 37, 256]))
    arguments: dict[str, Any] = {
        "x": torch.randn(shape).to(dtype),
        "weight": torch.randn(shape[-1]).to(dtype),
        "eps": generator.choice([1e-5, 0, 1]),
        "out": torch.randn(shape).to(dtype),
        "unit_offset": generator.random() < 0.3,
        "add": generator.random() < 0.5,
    }
    written = ("out",)
    return Call("rms_norm_into", kernels.rms_norm_into, arguments, written, expected=reference.rms_norm_into)


def _scale_and_cap(kernels: Kernels, generator: random.Random) -> Call:
    x = torch.randn(generator.randint(1, 4), generator.choice([1, 16, 37])).to(_dtype(generator))
    arguments = {"x": x, "factor": generator.choice([0.5, 3]), "softcap": 2.0}
    call = kernels.scale_and_cap
    return Call("scale_and_cap", call, arguments, ("x",), ("softcap",), expected=reference.scale_and_cap)


def _scale_rows(kernels: Kernels, generator: random.Random) -> Call:
    x = torch.randn(generator.randint(1, 4), generator.choice([1, 16, 37])).to(_dtype(generator))
    arguments = {"x": x, "factors": torch.randn(len(x))}
    return Call("scale_rows", kernels.scale_rows, arguments, ("x",), expected=reference.scale_rows)


def _scale_by_sigmoid(kernels: Kernels, generator: random.Random) -> Call:
    x = torch.randn(generator.randint(1, 4), generator.choice([1, 16, 37])).to(_dtype(generator))
    arguments = {"x": x, "gate": torch.randn(x.shape).to(x.dtype)}
    call = kernels.scale_by_sigmoid
    return Call("scale_by_sigmoid", call, arguments, ("x",), expected=reference.scale_by_sigmoid)


def _gated_norm(kernels: Kernels, generator: random.Random) -> Call:
    dtype, num_tokens, num_heads = _dtype(generator), generator.randint(1, 4), generator.randint(1, 3)
    size = generator.choice([16, 37])
    arguments = {
        "x": torch.randn(num_tokens, num_heads, size).to(dtype),
        "weight": torch.randn(size).to(dtype),
        "gate": torch.randn(num_tokens, num_heads * size).to(dtype),
        "eps": 1e-5,
        "gate_first": generator.random() < 0.5,
    }
    if generator.random() < 0.5:
        arguments["weight"] = torch.randn(num_heads * size).to(dtype)
    return Call(
        "gated_norm", kernels.gated_norm, arguments, optional=("weight",), expected=reference.gated_norm
    )


def _relu_squared(kernels: Kernels, generator: random.Random) -> Call:
    x = torch.randn(generator.randint(1, 4), generator.choice([1, 16, 37])).to(_dtype(generator))
    return Call("relu_squared", kernels.relu_squared, {"x": x}, ("x",), expected=reference.relu_squared)


def _add_lora(kernels: Kernels, generator: random.Random) -> Call:
    dtype, num_tokens = _dtype(generator), generator.randint(0, 4)
    in_features, size, rank = generator.choice([8, 37]), generator.choice([16, 37]), generator.randint(1, 5)
    arguments = {
        "x": torch.randn(num_tokens, in_features).to(dtype),
        "out": torch.randn(num_tokens, size).to(generator.choice([dtype, torch.float32])),
        "a": torch.randn(2, 2, rank, in_features).to(dtype),
        "b": torch.randn(2, rank, size).to(dtype),
        "ranks": torch.randint(0, rank + 1, (2, 2), dtype=torch.int32),
        "columns": torch.tensor([[0, 9, 1], [9, size, 0]], dtype=torch.int32),
        "slots": torch.randint(-1, 2, (num_tokens,), dtype=torch.int32),
    }
    return Call("add_lora", kernels.add_lora, arguments, ("out",), expected=reference.add_lora)


def _sequences(generator: random.Random) -> tuple[dict[str, Any], int]:
    """Make the slots and lengths of ragged sequences. Return also how many tokens they have."""
    lengths = [generator.randint(0, 3) for _ in range(generator.randint(1, 3))]
    contexts = [generator.choice([0, 4]) for _ in lengths]
    total = sum(lengths)
    slots = torch.randperm(4)[: len(lengths)].int()
    seq_lens = [a + b for a, b in zip(lengths, contexts, strict=True)]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return {"slots": slots, "seq_lens": torch.tensor(seq_lens).int(), "cu_seqlens_q": starts}, total


def _short_conv(kernels: Kernels, generator: random.Random) -> Call:
    dtype, size, width = _dtype(generator), generator.choice([5, 16, 37]), generator.randint(2, 8)
    sequences, num_tokens = _sequences(generator)
    gated = generator.random() < 0.5
    arguments = {
        "x": torch.randn(num_tokens, size * (3 if gated else 1)).to(dtype),
        "weight": torch.randn(width, size),
        "bias": torch.randn(size),
        "states": torch.randn(4, width - 1, size).to(dtype),
        **sequences,
        "gated": gated,
    }
    return Call(
        "short_conv",
        kernels.short_conv,
        arguments,
        ("states",),
        ("bias",),
        indices={"slots": 4},
        distinct=("slots",),
        expected=reference.short_conv,
    )


def _gated_delta(kernels: Kernels, generator: random.Random) -> Call:
    dtype, num_key_heads = _dtype(generator), generator.randint(1, 2)
    num_heads, key_dim, value_dim = num_key_heads * generator.randint(1, 2), 8, generator.choice([5, 16])
    sequences, num_tokens = _sequences(generator)
    columns = 2 * num_key_heads * key_dim + num_heads * value_dim
    arguments = {
        "qkv": torch.randn(num_tokens, columns).to(dtype),
        "gates": torch.randn(num_tokens, 2 * num_heads).to(dtype),
        "rates": -torch.rand(num_heads),
        "time_bias": torch.randn(num_heads),
        "states": torch.randn(4, num_heads, key_dim, value_dim),
        **sequences,
    }
    return Call(
        "gated_delta",
        kernels.gated_delta,
        arguments,
        ("states",),
        indices={"slots": 4},
        distinct=("slots",),
        expected=reference.gated_delta,
    )


def _mamba2_scan(kernels: Kernels, generator: random.Random) -> Call:
    dtype, num_groups = _dtype(generator), generator.randint(1, 2)
    num_heads, state_dim, head_dim = num_groups * generator.randint(1, 2), 8, generator.choice([5, 16])
    sequences, num_tokens = _sequences(generator)
    columns = num_heads * head_dim + 2 * num_groups * state_dim
    arguments = {
        "x": torch.randn(num_tokens, columns).to(dtype),
        "time_steps": torch.randn(num_tokens, num_heads).to(dtype),
        "rates": -torch.rand(num_heads),
        "time_bias": torch.randn(num_heads),
        "skip": torch.randn(num_heads),
        "states": torch.randn(4, num_heads, state_dim, head_dim),
        **sequences,
        "limits": generator.choice([(0.0, float("inf")), (0.5, 1.0)]),
    }
    return Call(
        "mamba2_scan",
        kernels.mamba2_scan,
        arguments,
        ("states",),
        indices={"slots": 4},
        distinct=("slots",),
        expected=reference.mamba2_scan,
    )


def _rotary_store_kv(kernels: Kernels, generator: random.Random) -> Call:
    dtype, num_tokens, num_kv_heads = _dtype(generator), generator.randint(1, 4), generator.randint(1, 2)
    num_heads, dim, size = num_kv_heads * generator.randint(1, 2), generator.choice([16, 32]), 8
    angles = torch.randn(num_tokens, dim // 2)
    caches = torch.zeros(3, size, 2, num_kv_heads, dim)
    arguments: dict[str, Any] = {
        "qkv": torch.randn(num_tokens, num_heads + 2 * num_kv_heads, dim).to(dtype),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "slot_mapping": torch.randperm(3 * size)[:num_tokens],
        "unit_offset": generator.random() < 0.3,
        "eps": 1e-6,
    }
    if generator.random() < 0.5:
        arguments |= {name: torch.randn(dim).to(dtype) for name in ("query_norm_weight", "key_norm_weight")}
    cache_dtype = generator.choice([dtype, dtype, torch.int8, torch.float8_e4m3fn])
    caches = caches.to(cache_dtype)
    arguments |= {"key_cache": caches[:, :, 0], "value_cache": caches[:, :, 1]}
    written: tuple[str, ...] = ("qkv", "key_cache", "value_cache")
    if cache_dtype != dtype:
        arguments |= {name: torch.ones(3, num_kv_heads, size) for name in ("key_scales", "value_scales")}
        written += ("key_scales", "value_scales")
        if generator.random() < 0.3:
            arguments["fixed_key_scales"] = torch.rand(num_kv_heads) + 0.01
    return Call(
        "rotary_store_kv",
        kernels.rotary_store_kv,
        arguments,
        written,
        indices={"slot_mapping": 3 * size},
        distinct=("slot_mapping",),
    )


def _copy_blocks(kernels: Kernels, generator: random.Random) -> Call:
    cache = torch.randn(2, 6, 4, 1, 16).to(_dtype(generator))
    arguments = {"cache": cache, "pairs": torch.randperm(6)[:4].view(2, 2)}
    written = "cache"
    if generator.random() < 0.5:
        written, arguments["target"] = "target", torch.zeros_like(cache)
    return Call(
        "copy_blocks",
        kernels.copy_blocks,
        arguments,
        (written,),
        ("target",),
        indices={"pairs": 6},
        distinct=("pairs",) if written == "cache" else (),  # between two caches a source may be a target
        expected=reference.copy_blocks,
    )


def _attention(kernels: Kernels, generator: random.Random) -> Call:
    seq_lens = [generator.randint(1, 40) for _ in range(generator.randint(1, 3))]
    kind = generator.choice(["plain", "window", "mla", "int8", "fp8", "special", "spans"])
    query_lens = [generator.randint(0, min(n, 5)) for n in seq_lens]
    num_kv_heads = generator.randint(1, 2)
    case = ragged_case(
        seq_lens,
        query_lens,
        num_heads=num_kv_heads * generator.randint(1, 3),
        num_kv_heads=num_kv_heads,
        head_dim=48 if kind == "mla" else 32,
        block_size=8,
        dtype=_dtype(generator),
        value_dim=32,
        value_in_key=kind == "mla",
        sliding_window=generator.randint(1, 20) if kind == "window" else None,
    )
    num_heads = case["query"].shape[1]
    if kind in ("int8", "fp8"):
        case = quantized(case, torch.int8 if kind == "int8" else torch.float8_e4m3fn)
    elif kind == "special":
        case |= {"softcap": 5.0, "sinks": torch.randn(num_heads)}
    elif kind == "spans":
        case["last_keys"] = last_keys_of(seq_lens, query_lens, generator)
    name = generator.choice(["paged_attention", "plan_attention", "planned"])
    launch = {"plan_attention": _plan, "paged_attention": _attend, "planned": _attend_by_plan}[name]
    expected = None if name == "plan_attention" else _expected_attention
    optional = ("sinks", "softcap", "sliding_window", "last_keys")
    call = Call(name, lambda **given: launch(kernels, given), case, optional=optional, expected=expected)
    if name == "planned":
        case["plan"] = _plan(kernels, case)
    return call


def _inputs(given: dict[str, Any]) -> dict[str, Any]:
    """Put the options into one value, unless the call has damaged that as a whole."""
    kept = {name: value for name, value in given.items() if name in (*TENSORS_OF_ATTENTION, "unknown")}
    others = {name: value for name, value in given.items() if name not in (*kept, "plan", "options")}
    return {**kept, "options": given["options"] if "options" in given else AttentionOptions(**others)}


def _attend(kernels: Any, given: dict[str, Any]) -> Tensor:
    return kernels.paged_attention(**_inputs(given))


def _expected_attention(**given: Any) -> Tensor:
    floats = {name: float(given[name]) for name in ("scale", "softcap") if given.get(name) is not None}
    return _attend(reference, {**given, **floats})


def _plan(kernels: Kernels, given: dict[str, Any]) -> Any:
    return kernels.plan_attention(**_inputs(given))


def _attend_by_plan(kernels: Kernels, given: dict[str, Any]) -> Tensor:
    return kernels.paged_attention(**_inputs(given), plan=given["plan"])


def _greedy(kernels: Kernels, generator: random.Random) -> Call:
    logits = torch.randn(generator.randint(1, 4), generator.choice([1, 50, 300]))
    return Call("greedy", kernels.greedy, {"logits": logits}, expected=reference.greedy)


def _mask_logits(kernels: Kernels, generator: random.Random) -> Call:
    n, size = generator.randint(1, 4), generator.choice([1, 50, 300])
    rows = torch.randperm(n)[: generator.randint(1, n)]
    words = -(-size // 32) + generator.randint(0, 1)
    arguments = {
        "logits": torch.randn(n, size),
        "rows": rows,
        "allowed": torch.randint(-(2**31), 2**31, (len(rows), words)).int(),
    }
    return Call(
        "mask_logits",
        kernels.mask_logits,
        arguments,
        ("logits",),
        indices={"rows": n},
        distinct=("rows",),
        expected=reference.mask_logits,
    )


def _token_logprobs(kernels: Kernels, generator: random.Random) -> Call:
    n, size = generator.randint(1, 4), generator.choice([2, 50, 300])
    arguments = {
        "logits": torch.randn(n, size),
        "tokens": torch.randint(size, (n,)),
        "num_top": generator.randint(0, 2),
    }
    return Call(
        "token_logprobs",
        kernels.token_logprobs,
        arguments,
        indices={"tokens": size},
        expected=reference.token_logprobs,
    )


def _apply_penalties(kernels: Kernels, generator: random.Random) -> Call:
    n, size = generator.randint(1, 3), generator.choice([30, 70])
    arguments: dict[str, Any] = {
        "logits": torch.randn(5, size),
        "rows": torch.randperm(5)[:n],
        "slots": torch.randint(4, (n,)),
        "output_counts": torch.randint(3, (4, size), dtype=torch.int32),
        "seen": torch.rand(4, size) < 0.5,
    }
    arguments["seen"] |= arguments["output_counts"] > 0
    arguments |= {name: torch.rand(n) + 0.5 for name in PENALTIES}
    return Call(
        "apply_penalties",
        kernels.apply_penalties,
        arguments,
        ("logits",),
        indices={"rows": 5, "slots": 4},
        distinct=("rows",),
        expected=_penalized,
    )


def _penalized(**given: Any) -> None:
    # The others skip a token that was not seen, whatever its count.
    reference.apply_penalties(**{**given, "output_counts": given["output_counts"] * given["seen"]})


def _sample_tokens(kernels: Kernels, generator: random.Random) -> Call:
    n, size = generator.randint(1, 3), generator.choice([1, 50, 300])
    arguments: dict[str, Any] = {
        "logits": torch.randn(n, size),
        "seeds": torch.randint(2**62, (n,)),
        "positions": torch.randint(1000, (n,)),
        **_filters(n, generator),
    }
    return Call("sample_tokens", kernels.sample_tokens, arguments, ("logits",), FILTERS)


def _filters(n: int, generator: random.Random) -> dict[str, Any]:
    """Make a temperature and some of the filters, None for the others."""
    filters: dict[str, Any] = {name: torch.rand(n) for name in ("temperature", *FILTERS)}
    filters["top_k"] = torch.randint(1, 60, (n,), dtype=torch.int32)
    return {name: None if name in FILTERS and generator.random() < 0.5 else x for name, x in filters.items()}


_MAKERS: list[Callable[[Kernels, random.Random], Call]] = [
    _take_rows, _rms_norm, _rms_norm_into, _layer_norm, _silu_and_mul, _gelu_and_mul, _gelu, _add,
    _scale_and_cap, _scale_rows, _rotary_store_kv, _copy_blocks, _attention, _greedy, _mask_logits,
    _token_logprobs, _apply_penalties, _sample_tokens, _clamped_swiglu, _route, _sort_by_expert,
    _grouped_linear, _sum_experts, _scale_by_sigmoid, _gated_norm, _short_conv, _gated_delta,
    _mamba2_scan, _relu_squared, _add_lora,
]  # fmt: skip


@cache
def _panels(kind: str) -> Any:
    """Pack a weight in one of the formats, of 64 inputs, large enough for bf12."""
    from paged.kernels.cpu.linear.linear import can_pair, pack
    from paged.kernels.cpu.linear.pack_bf12 import pack_bf12
    from paged.kernels.cpu.linear.pack_codes import pack_codes

    gated, pairs = "gated" in kind, "pairs" in kind and can_pair(torch.bfloat16, 64)
    if kind.split()[0] in CODES:
        weight = random_coded(kind.split()[0], "float16", 48, 64, 32)
        return pack_codes(weight.codes, *weight.factors, table=weight.table, pairs=pairs, gated=gated)
    if "one int8" in kind:
        codes = torch.randint(-127, 128, (48, 64), dtype=torch.int8)
        return pack(codes, torch.rand(48), pairs=pairs, gated=gated)
    if "bf12" in kind:
        return pack_bf12(pack((torch.randn(2**13, 64) / 8).bfloat16(), pairs=pairs, gated=gated))
    return pack(torch.randn(48, 64).to(torch.bfloat16 if pairs else torch.float32), pairs=pairs, gated=gated)


def _panel_fields(generator: random.Random, *, lookup: bool = False) -> dict[str, Any]:
    kind = generator.choice(["float", "one int8", "bf12", *CODES]) + generator.choice(["", " pairs"])
    kind += "" if lookup or "bf12" in kind else generator.choice(["", " gated"])
    return {f"panels.{name}": value for name, value in _panels(kind)._asdict().items()}


def _assembled(given: dict[str, Any], name: str) -> dict[str, Any]:
    """Put the fields of Panels together, unless the call has damaged them as a whole."""
    from paged.kernels.cpu.linear.panels import Panels

    fields = {key.removeprefix("panels."): x for key, x in given.items() if key.startswith("panels.")}
    others = {key: x for key, x in given.items() if not key.startswith("panels.")}
    return others if name in others else {**others, name: Panels(**fields)}


def _linear(_: Kernels, generator: random.Random) -> Call:
    from paged.kernels.cpu.linear.linear import linear, pad

    fields = _panel_fields(generator)
    dtype = torch.bfloat16 if fields["panels.weight"].dim() == 4 else _dtype(generator)
    arguments = {
        **fields,
        "x": torch.randn(generator.randint(1, 3), 64).to(dtype),
        "bias": pad(torch.randn(fields["panels.out_features"]), gated=fields["panels.gated"]),
        "dtype": generator.choice([None, torch.float32]),
    }
    return Call(
        "linear", lambda **given: linear(**_assembled(given, "weight")), arguments, optional=("bias", "dtype")
    )


def _grouped_panels(_: Kernels, generator: random.Random) -> Call:
    from paged.kernels.expert_panels import ExpertPanels, grouped_panel_linear
    from paged.kernels.panels import Panels, pad

    fields = _panel_fields(generator)  # of the first expert
    others = [Panels(**{key.removeprefix("panels."): x for key, x in fields.items()})] * 2
    dtype = torch.bfloat16 if fields["panels.weight"].dim() == 4 else _dtype(generator)
    _, rows = _expert_rows(generator, 3)
    bias = pad(torch.randn(fields["panels.out_features"]), gated=fields["panels.gated"])
    arguments = {
        **fields,
        "x": torch.randn(len(rows.places), 64).to(dtype),
        "bias": bias,
        "offsets": rows.offsets,
        "sources": rows.sources,
        "dtype": generator.choice([None, torch.float32]),
    }

    def launch(**given: Any) -> Tensor:
        given = _assembled(given, "weight")
        own_bias = given.pop("bias")
        biases = None if own_bias is None else [own_bias, bias, bias]
        return grouped_panel_linear(weight=ExpertPanels([given.pop("weight"), *others], biases), **given)

    indices = {"sources": len(rows.places)}
    return Call("grouped_panel_linear", launch, arguments, optional=("bias", "dtype"), indices=indices)


def _panel_rows(_: Kernels, generator: random.Random) -> Call:
    from paged.kernels.cpu.rows.take_rows import take_panel_rows

    fields = _panel_fields(generator, lookup=True)
    num_rows = fields["panels.out_features"]
    arguments = {**fields, "indices": torch.randint(num_rows, (3,)), "dtype": torch.float32}
    return Call(
        "take_panel_rows",
        lambda **given: take_panel_rows(**_assembled(given, "panels")),
        arguments,
        indices={"indices": num_rows},
    )


def _widen_rows(_: Kernels, generator: random.Random) -> Call:
    from paged.kernels.cpu.rows.take_rows import widen_rows

    table = torch.randn(9, 37).to(generator.choice([torch.float16, torch.bfloat16]))
    arguments = {"table": table, "indices": torch.randint(9, (3,))}
    return Call("widen_rows", widen_rows, arguments, indices={"indices": 9})


def _pack(_: Kernels, generator: random.Random) -> Call:
    from paged.kernels.cpu.linear.linear import pack

    dtype = generator.choice([torch.float32, torch.float16, torch.bfloat16, torch.int8])
    weight = torch.randint(-9, 9, (40, 32)).to(dtype)
    scales = torch.rand(40) if dtype == torch.int8 else None
    return Call("pack", pack, {"weight": weight, "scales": scales, "pairs": False, "gated": False})


def _coded(generator: random.Random) -> dict[str, Any]:
    """Make codes of 4 bits for 64 inputs, and what goes with them."""
    factors = generator.choice(["bfloat16 and zero", "two levels and offset"])
    weight = random_coded("integers", factors, 48, 64, 32)
    return {"codes": weight.codes, **weight.factors._asdict(), "table": weight.table}


def _pack_codes(_: Kernels, generator: random.Random) -> Call:
    from paged.kernels.cpu.linear.pack_codes import pack_codes

    arguments = {**_coded(generator), "gated": generator.random() < 0.5, "pairs": False}
    return Call("pack_codes", pack_codes, arguments, optional=("zero", "offset", "scale_unit", "offset_unit"))


def _pad(_: Kernels, generator: random.Random) -> Call:
    from paged.kernels.cpu.linear.linear import pad
    from paged.kernels.cpu.linear.pack_bf12 import pack_bf12

    if generator.random() < 0.5:
        fields = _panel_fields(generator)
        return Call("pack_bf12", lambda **given: pack_bf12(**_assembled(given, "panels")), fields)
    return Call("pad", pad, {"numbers": torch.randn(generator.randint(1, 80)), "gated": False})
