"""Damages to the arguments of a valid call, and memory that shows what a call has written."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paged.kernels.routing import RoutingOptions
from tests.support.valid_calls import FILTERS, Call

GUARD = 512  # bytes on either side of an argument's memory
# Arguments whose dtype is not the only one, so that another may be valid; others have one.
SEVERAL_DTYPES = {
    "x", "weight", "residual", "qkv", "query", "key_cache", "value_cache", "cache", "table", "numbers",
    "query_norm_weight", "key_norm_weight", "panels.weight", "scale", "scales", "zero", "offset",
    "scale_unit", "offset_unit",
}  # fmt: skip
DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.bool,
)  # fmt: skip
NEVER = (torch.float64, torch.complex64, torch.bool)  # the only dtype of `seen` is bool
HUGE = 10**400
NO_GRAD = "requires a gradient, in no_grad"
SCALARS: list[Any] = [
    None, "x", b"x", [1], {}, math.nan, math.inf, -1, -1.0, 0, 2, 0.5, 2**31, 2**62, 2**63, 2**64, HUGE,
    -HUGE, 2.0**99, 1e300, 2.0**-125, 5e-324, 1j, True, False, np.float64(0.5), np.float32(0.5), np.int64(1),
    np.ones(2), np.bool_(True), object, torch.float64,
]  # fmt: skip
FLAGS = ("unit_offset", "add", "tanh", "pairs", "gated", "panels.gated", "gate_first")
INTS = (
    "max_seqlen_q", "min_seqlen_q", "max_decode_q", "sliding_window", "num_top", "panels.out_features",
)  # fmt: skip


class Damage:
    """One change of a call's arguments."""

    def __init__(self, name: str, what: str, value: Any, *, is_wrong: bool) -> None:
        self.name, self.what, self.value, self.is_wrong = name, what, value, is_wrong

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


def damaged(call: Call, generator: random.Random) -> tuple[dict[str, Any], list[Damage]]:
    """Return the arguments with one or two damages, each of another argument, and the damages."""
    arguments, damages = dict(call.arguments), []
    for _ in range(generator.choice([1, 1, 2])):
        left = [name for name in call.arguments if name not in {damage.name for damage in damages}]
        if not left:
            break
        if generator.random() < 0.06:
            damages.append(_of_whole_call(call, arguments, generator))
            break
        name = generator.choice(left)
        found = list(_damages(call, name, generator))
        if not found:
            continue
        damage = generator.choice(found)
        if damages and _may_cancel(damages[0], damage):
            continue
        damages.append(damage)
        arguments[name] = damage.value
        if damage.what.startswith("shares"):
            break
    return arguments, damages


def _may_cancel(damage: Damage, other: Damage) -> bool:
    """Return whether one may mend the other: by a larger table, no_grad, memory of its own, or its dtype."""
    words = damage.what + other.what
    if " becomes " in damage.what and damage.what.split()[-1] == other.what.split()[-1]:
        return True
    return "shares" in words or NO_GRAD in words or ("of dimension" in words and " at " in words)


def _of_whole_call(call: Call, arguments: dict[str, Any], generator: random.Random) -> Damage:
    kind = generator.choice(["missing", "unknown", "options"])
    if kind == "options" and "max_seqlen_q" in arguments:
        value = generator.choice([None, {}, (), 1, "options", (1.0, 1)])
        arguments["options"] = value
        return Damage("options", repr(value), value, is_wrong=True)
    required = [name for name in _required(call) if name in arguments]
    if kind == "missing" and required:
        name = generator.choice(required)
        del arguments[name]
        return Damage(name, "missing", None, is_wrong=True)
    arguments["unknown"] = 1
    return Damage("unknown", "a keyword", 1, is_wrong=True)


def _required(call: Call) -> tuple[str, ...]:
    """Return arguments without a default: the tensors of each, and the first options."""
    return {
        "take_rows": ("table", "indices"),
        "rms_norm": ("x", "weight", "eps"),
        "rms_norm_into": ("x", "weight", "eps", "out"),
        "layer_norm": ("x", "weight", "bias", "eps"),
        "gelu": ("x", "tanh"),
        "add": ("x", "out"),
        "scale_and_cap": ("x", "factor"),
        "scale_rows": ("x", "factors"),
        "rotary_store_kv": ("qkv", "cos", "sin", "key_cache", "value_cache", "slot_mapping"),
        "sample_tokens": ("logits", "seeds", "positions", "temperature", *FILTERS),
        "apply_penalties": tuple(call.arguments),
        "clamped_swiglu": ("x", "limit", "alpha"),
        "route": ("logits", "options"),
        "sort_by_expert": ("experts", "num_experts"),
        "grouped_linear": ("x", "weight", "offsets"),
        "sum_experts": ("x", "places", "weights"),
        "linear": ("x", "bias"),
        "grouped_panel_linear": ("x", "offsets"),
        "pack": ("weight",),
        "pack_codes": ("codes", "scale"),
    }.get(call.name, ("x", "query", "seq_lens", "scale", "logits", "weight", "cache", "pairs", "indices"))


def _damages(call: Call, name: str, generator: random.Random) -> Iterator[Damage]:
    value = call.arguments[name]
    if name == "plan":
        for other in (object(), "plan", 1, (), torch.ones(1)):
            yield Damage(name, type(other).__name__, other, is_wrong=True)
    elif isinstance(value, Tensor):
        # One way, then one of its damages: each way is as likely, however many damages it has.
        make = generator.choice([_wrong_kinds, _of_dtype, _of_shape, _of_memory, _of_contents, _shared])
        with contextlib.suppress(NotImplementedError):  # torch lacks some operations for fp8
            yield from make(call, name, value, generator)
    elif isinstance(value, RoutingOptions):
        for field, other in itertools.product(("epsilon", "scale"), SCALARS):
            may_be = _may_be("eps" if field == "epsilon" else field, other)
            options = replace(value, **{field: other})
            yield Damage(name, f"{field} {_shown(other)}", options, is_wrong=not may_be)
    elif value is not None:
        if name == "limits":
            for pair in ((0, HUGE), (0.0, 2**63), (2**63, math.inf), (0.0, True), (math.nan, 1.0)):
                yield Damage(name, _shown(pair), pair, is_wrong=True)
        for other in SCALARS:
            if other is not None or name not in call.optional:
                yield Damage(name, _shown(other), other, is_wrong=not _may_be(name, other))
    elif name in call.optional:
        yield Damage(name, "a number", 3.5, is_wrong=True)
        yield Damage(name, "a list", [1.0], is_wrong=True)


def _shown(value: Any) -> str:
    return "10**400" if value is HUGE else repr(value)[:60]


def _may_be(name: str, value: Any) -> bool:
    """Return whether a scalar may be this value in some call."""
    if name in FLAGS:
        return type(value) is bool
    if name in INTS:
        return type(value) is int and 0 <= value <= 2**31
    if name == "dtype":
        return value is None
    if name == "limits":
        return False
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and (0 <= value <= 1 if name == "eps" else 0 < value < 2**100)


def _wrong_kinds(call: Call, name: str, *_: object) -> Iterator[Damage]:
    for value in (None, [1, 2], (0.5,), "x", 3, 2.5, True, math.nan, HUGE, -1, object(), {}, np.ones(3)):
        if value is not None or name not in call.optional:
            yield Damage(name, f"of type {type(value).__name__}", value, is_wrong=True)


def _of_dtype(_: Call, name: str, x: Tensor, generator: random.Random) -> Iterator[Damage]:
    dtype = generator.choice([dtype for dtype in DTYPES if dtype != x.dtype])
    yield Damage(
        name,
        f"{x.dtype} becomes {dtype}",
        x.float().nan_to_num().to(dtype),
        is_wrong=name not in SEVERAL_DTYPES or dtype in NEVER,
    )


def _of_shape(call: Call, name: str, x: Tensor, generator: random.Random) -> Iterator[Damage]:
    any_rank = name in ("x", "residual") and call.name == "rms_norm"
    if x.numel() and not name.startswith("panels."):
        others = [x[None], x[..., None], x.flatten()[0], x.flatten(), x[0]]
        for other in others:
            if other.dim() != x.dim() and not (name == "numbers" and other.dim()):
                yield Damage(name, f"shape {list(other.shape)}", other, is_wrong=not any_rank)
    dim = generator.randrange(x.dim())
    for size in {0, 1, x.shape[dim] - 1}:
        if 0 <= size < x.shape[dim]:
            yield Damage(name, f"{size} of dimension {dim}", x.narrow(dim, 0, size), is_wrong=False)
    longer = torch.cat([x, x.narrow(dim, 0, 1)], dim) if x.shape[dim] else x
    yield Damage(name, f"one more of dimension {dim}", longer, is_wrong=False)


def _of_memory(call: Call, name: str, x: Tensor, generator: random.Random) -> Iterator[Damage]:
    is_written = name in call.written and x.numel() > 1
    yield Damage(name, "on meta", x.to("meta"), is_wrong=True)
    freed = x.clone()
    freed.untyped_storage().resize_(0)
    yield Damage(name, "without its memory", freed, is_wrong=x.numel() > 0)
    if x.is_floating_point() and x.itemsize > 1:
        leaf = x.detach().clone().requires_grad_()
        yield Damage(name, "requires a gradient", leaf, is_wrong=True)
        yield Damage(name, NO_GRAD, leaf, is_wrong=False)
    with torch.inference_mode():
        yield Damage(name, "made in inference_mode", x.clone(), is_wrong=name in call.written)
    if x.dtype in (torch.float32, torch.int64, torch.int32):
        yield Damage(name, "sparse", x.to_sparse(), is_wrong=True)
    if x.dtype == torch.float32 and x.dim() == 2:
        yield Damage(name, "nested", torch.nested.nested_tensor(list(x)), is_wrong=True)
    apart = torch.stack([x, torch.zeros_like(x)], dim=-1)[..., 0]
    yield Damage(name, "not contiguous", apart, is_wrong=False)
    if x.dim() > 1:
        swapped = x.transpose(0, -1).contiguous().transpose(0, -1)
        yield Damage(name, "transposed in memory", swapped, is_wrong=False)
    dim = generator.randrange(x.dim())
    if x.shape[dim] > 1:
        expanded = x.narrow(dim, 0, 1).expand_as(x)
        yield Damage(name, f"expanded along {dim}", expanded, is_wrong=is_written)
    # Its rows overlap.
    if x.dim() > 1 and x.shape[0] > 1 and x.shape[1] > 1 and x.is_contiguous():
        windows = x.as_strided(x.shape, (1, *x.stride()[1:]))
        yield Damage(name, "overlapping rows", windows, is_wrong=is_written)


def _of_contents(call: Call, name: str, x: Tensor, generator: random.Random) -> Iterator[Damage]:
    if not x.numel():
        return
    place = generator.randrange(x.numel())
    if name in call.indices:
        limits = torch.iinfo(x.dtype)
        for value in (-1, call.indices[name], limits.max // 2, limits.min):
            yield Damage(name, f"{value} at {place}", _with(x, place, value), is_wrong=True)
    elif x.dtype in (torch.int32, torch.int64) and name in (
        "block_tables",
        "seq_lens",
        "cu_seqlens_q",
        "offsets",
    ):
        limits = torch.iinfo(x.dtype)
        for value in (-1, limits.min, limits.max, 0, 1000):
            yield Damage(name, f"{value} at {place}", _with(x, place, value), is_wrong=False)
        if len(x) > 1:
            yield Damage(name, "reversed", x.flip(0), is_wrong=False)
    if name in call.distinct and x.numel() > 1:
        other = (place + 1) % x.numel()  # in pairs a source and a target, or two targets after a source
        twice = _with(x, place, int(x.flatten()[other]))
        yield Damage(name, f"entry {place} equals {other}", twice, is_wrong=True)
    if name in (*FILTERS, "temperature"):
        for value in (0, -1) if name == "top_k" else (math.nan, -1.0, math.inf, -math.inf):
            yield Damage(name, f"{value} at {place}", _with(x, place, value), is_wrong=True)


def _with(x: Tensor, place: int, value: float) -> Tensor:
    changed = x.clone(memory_format=torch.contiguous_format)
    changed.view(-1)[place] = value
    return changed


def _shared(call: Call, name: str, x: Tensor, _: random.Random) -> Iterator[Damage]:
    """Give an argument the memory of one that is written."""
    for other_name in call.written:
        other = call.arguments.get(other_name)
        is_alike = isinstance(other, Tensor) and (other.dtype, other.shape) == (x.dtype, x.shape)
        if other_name != name and is_alike and x.numel():
            in_place = call.name == "rms_norm_into" and name == "x"  # which may be its own output
            yield Damage(name, f"shares the memory of {other_name}", other, is_wrong=not in_place)


class Memory:
    """The memory of all plain tensors of a call, with bands around each that nothing may write to."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[Tensor, Tensor, list[str]]] = {}

    def enclose(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Copy the arguments, those that share memory into shared memory."""
        return {name: self._copy(name, x) if _is_plain(x) else x for name, x in arguments.items()}

    def _copy(self, name: str, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in self._places:
            old = torch.empty(0, dtype=torch.uint8).set_(storage)
            band = torch.full((GUARD,), 0xA5, dtype=torch.uint8)
            new = torch.cat([band, old, band])
            self._places[storage.data_ptr()] = new, new.clone(), []
        new, _, names = self._places[storage.data_ptr()]
        names.append(name)
        with torch.inference_mode() if x.is_inference() else torch.no_grad():
            offset = GUARD // x.itemsize + x.storage_offset()
            copy = torch.empty(0, dtype=x.dtype).set_(new.untyped_storage(), offset, x.shape, x.stride())
        return copy if x.is_inference() else copy.requires_grad_(x.requires_grad)

    def changed(self, may_be_written: tuple[str, ...]) -> list[str]:
        """Return the names of memories that were changed, though none of these arguments is in them."""
        found = []
        for new, before, names in self._places.values():
            is_written = any(name in may_be_written for name in names)
            bands = new[:GUARD], new[-GUARD:], before[:GUARD], before[-GUARD:]
            whole = torch.equal(new, before)
            in_bands = torch.equal(bands[0], bands[2]) and torch.equal(bands[1], bands[3])
            if not (in_bands if is_written else whole):
                found.append(" and ".join(names) + ("" if in_bands else ", beyond its ends"))
        return found


def _is_plain(x: Any) -> bool:
    if not isinstance(x, Tensor) or x.is_nested or x.layout is not torch.strided or x.is_meta:
        return False
    return x.untyped_storage().nbytes() > 0
