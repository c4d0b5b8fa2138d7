"""Pack quantised weights, codes and factors as files have them, into panels: see `products.factors`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...checks import (
    check_device,
    check_dtype,
    check_flag,
    check_multiple,
    check_positive,
    check_shape,
    check_tensor,
    is_trusted,
)
from ...half_bytes import HalfBytes
from ..factor_heads import FACTORS_AT, TABLE_AT, group_of, head_of
from ..formats import (
    CODES4,
    CODES4_PAIRS,
    E4M3_UNIT,
    KINDS,
    LEAST_GROUP,
    NONE,
    PANEL,
    TABLE_SIZE,
)
from ..launch.huge_pages import in_huge_pages
from ..launch.tasks import Task
from ..target import LANES
from .panels import CODE_KINDS, CODE_PAIR_KINDS, Panels, check_outputs, check_pairs, num_panels_of

_CPU = torch.device("cpu")

_NUMBERS_AT_A_TIME = 2**20  # of a search, so that they stay in a cache
_ROWS_AT_A_TIME = 256  # of a comparison, which ends early for most factors that differ
_NAMES = "scale", "zero", "offset", "scale_unit", "offset_unit", "low_unit"
_INTEGERS = torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64
_FLOATS = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
# What holds all integers up to a limit, the narrowest first.
_LIMITS = {torch.int8: 127, torch.float16: 2**11, torch.float32: 2**24}
WHOLE_BYTES = -1  # in place of the runs of HalfBytes
PACK_CODES = Task(
    "linear.pack_codes.pack_codes",
    ("codes", "panels"),
    (
        "num_rows", "num_inputs", "panel_bytes", "kind", "gated",
        # bytes of a row and of a block, whose first codes are `start` bytes further; binary logarithms of the
        # inputs of a block and of the bytes of a run
        "row_bytes", "block_bytes", "start", "block_shift", "run_shift",
    ),
)  # fmt: skip


def pack_codes(
    codes: Tensor | HalfBytes,
    scale: Tensor,
    zero: Tensor | None = None,
    offset: Tensor | None = None,
    scale_unit: Tensor | None = None,
    offset_unit: Tensor | None = None,
    scale_divisor: Tensor | None = None,
    *,
    table: Sequence[float] | None = None,
    pairs: bool = False,
    gated: bool = False,
) -> Panels:
    """Pack a quantised weight: number * scale + offset, or number * scale - zero * scale; see `linear.pack`.

    Product and sum are computed in float32 and rounded once. Before, scales and offsets with a unit are
    multiplied by the unit, and scales with a divisor are divided by the divisor.

    codes: u8[out_features, in_features], or HalfBytes: indices into a table of 16 numbers; or i8 or
        float8_e4m3fn, which are the numbers themselves. scale, zero, offset: [out_features, num_groups].
        Groups have equally many inputs, a multiple of 16. scale_unit, offset_unit, scale_divisor:
        [out_features, num_units], each for equally many groups.
    """
    low_unit = None
    if scale_divisor is not None:
        scale, scale_unit, low_unit = _as_product(scale, scale_unit, scale_divisor)
    factors = dict(zip(_NAMES, (scale, zero, offset, scale_unit, offset_unit, low_unit), strict=True))
    given = {name: x for name, x in factors.items() if x is not None}
    _check_codes(codes, table, pairs=pairs, gated=gated)
    check_tensor("scale", scale)
    _check_factors(codes, given)
    out_features, in_features = codes.shape
    num_panels = num_panels_of(out_features, gated)
    kind = (CODE_PAIR_KINDS if pairs else CODE_KINDS)[codes.dtype]
    width = LANES if kind in (CODES4, CODES4_PAIRS) else PANEL
    shape = num_panels, in_features // (1 + pairs), width, *((2,) if pairs else ())
    memory = in_huge_pages(torch.empty(shape, dtype=torch.uint8, device=_CPU))
    block_bytes = 0
    start = 0
    block_shift = 0
    run_shift = WHOLE_BYTES
    if isinstance(codes, HalfBytes):
        stored = codes.rows
        block_bytes = codes.block_bytes
        start = codes.start
        block_shift = max(0, codes.block_inputs.bit_length() - 1)
        run_shift = codes.run.bit_length() - 1
    else:
        stored = codes.contiguous()
    PACK_CODES.run(
        num_panels,
        codes=stored,
        panels=memory,
        num_rows=out_features,
        num_inputs=in_features,
        panel_bytes=in_features * width,
        kind=kind,
        gated=gated,
        row_bytes=stored.shape[1],
        block_bytes=block_bytes,
        start=start,
        block_shift=block_shift,
        run_shift=run_shift,
    )
    kept = {name: narrowest(x) for name, x in given.items()}
    return Panels(
        memory.view(codes.dtype), _lay_out(kept, table, in_features, gated=gated), out_features, gated
    )


def _as_product(
    scale: Tensor, scale_unit: Tensor | None, divisor: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return scales, and their units in two parts, whose products have the bits of quotients.

    Where there are no such units for all numbers of e4m3, which is rare, the scales are the quotients.
    """
    check_dtype("scale", scale, (torch.float8_e4m3fn,))
    check_shape("scale_divisor", divisor, (len(scale), None), torch.float32)
    check_multiple("num_groups", scale.shape[1], "num_divisors", divisor.shape[1])
    if scale_unit is not None:
        raise ValueError("scales have a unit or a divisor, got both")
    exact = 1 / divisor.double()
    # The high part is rounded towards 0, so that both have the sign of a scale of 0.
    high = exact.float()
    high = torch.where(high.double().abs() > exact.abs(), high.nextafter(torch.zeros_like(high)), high)
    low = (exact - high.double()).float().copysign(high)
    if _are_quotients(divisor.unique()):
        return scale, high, low
    return scale.float() / divisor.repeat_interleave(scale.shape[1] // divisor.shape[1], 1), None, None


def _are_quotients(divisor: Tensor) -> bool:  # [n]
    """Return whether numbers of e4m3 times a unit in two parts round to their quotients.

    The sum of both products differs from a quotient by less than 2^-46 of it before it is rounded. It must
    be so far from the next number halfway between two of float32.
    """
    if not bool(((divisor.abs() > 2.0**-60) & (divisor.abs() < 2.0**60)).all()):
        return False  # a low part that is subnormal may count as 0
    numbers = torch.arange(1, 127, dtype=torch.uint8, device=_CPU).view(torch.float8_e4m3fn).float()
    divisor = divisor.abs()[:, None]
    quotient = numbers / divisor
    exact = numbers.double() / divisor.double()
    above = (quotient.nextafter(torch.full_like(quotient, torch.inf)).double() + quotient.double()) / 2
    below = (quotient.nextafter(torch.zeros_like(quotient)).double() + quotient.double()) / 2
    spare = exact * 2.0**-46
    return bool(((exact + spare < above) & (exact - spare > below)).all())


def _lay_out(
    factors: dict[str, Tensor], table: Sequence[float] | None, in_features: int, *, gated: bool
) -> Tensor:
    """Put factors into memory as `products.factors` describes."""
    num_groups = factors["scale"].shape[1]
    num_units = max([x.shape[1] for name, x in factors.items() if name.endswith("unit")], default=1)
    kinds = (KINDS[factors[name].dtype] if name in factors else NONE for name in _NAMES)
    head = head_of(in_features, in_features // num_groups, num_groups // num_units, *kinds)
    num_panels = num_panels_of(len(factors["scale"]), gated)
    memory = torch.zeros(FACTORS_AT + num_panels * head.panel_bytes, dtype=torch.uint8, device=_CPU)
    memory[:TABLE_AT] = torch.tensor(head, dtype=torch.int64, device=_CPU).view(torch.uint8)
    numbers = torch.tensor(table or [0.0] * TABLE_SIZE, dtype=torch.float32, device=_CPU)
    memory[TABLE_AT : TABLE_AT + numbers.nbytes] = numbers.view(torch.uint8)
    panels = memory[FACTORS_AT:].view(num_panels, head.panel_bytes)
    for own, part in (
        ([x for name, x in factors.items() if not name.endswith("unit")], panels[:, : head.units_at]),
        ([x for name, x in factors.items() if name.endswith("unit")], panels[:, head.units_at :]),
    ):
        _place(own, part, gated=gated)
    return memory


def _place(factors: list[Tensor], panels: Tensor, *, gated: bool) -> None:
    """Put factors [out_features, n] into u8[num_panels, bytes] by panel, entry, factor and output."""
    start = 0
    for x in factors:
        size = PANEL * x.itemsize
        entries = panels.view(len(panels), x.shape[1], -1)[..., start : start + size]
        places = entries.view(torch.int8 if x.dtype == torch.float8_e4m3fn else x.dtype)
        halves = x.view(places.dtype).chunk(2) if gated else [x.view(places.dtype)]
        for own, half in zip(places.chunk(len(halves), dim=2), halves, strict=True):
            width = own.shape[2]
            full = len(half) // width
            own[:full] = half[: full * width].view(full, width, x.shape[1]).transpose(1, 2)
            if len(half) % width:
                own[full, :, : len(half) % width] = half[full * width :].T
        start += size


def narrowest(x: Tensor) -> Tensor:
    """Convert factors to the narrowest dtype that holds them exactly and that readers support."""
    if x.dtype in _INTEGERS:
        low, high = x.aminmax()
        most = max(-int(low), int(high))
        return x.to(next(dtype for dtype, limit in _LIMITS.items() if most <= limit))
    if x.dtype not in _FLOATS:
        x = x.float()
    if x.dtype == torch.float32:
        for dtype in (torch.bfloat16, torch.float16):
            if all(_are_equal(rows, rows.to(dtype)) for rows in torch.split(x, _ROWS_AT_A_TIME)):
                return x.to(dtype)
    return x


def _are_equal(wide: Tensor, narrow: Tensor) -> bool:
    return torch.equal(wide.view(torch.int32), narrow.float().view(torch.int32))


def is_exact(
    codes: Tensor | HalfBytes,
    scale: Tensor,
    zero: Tensor | None = None,
    offset: Tensor | None = None,
    scale_unit: Tensor | None = None,
    offset_unit: Tensor | None = None,  # noqa: ARG001
    scale_divisor: Tensor | None = None,
    *,
    table: Sequence[float] | None = None,
) -> bool:
    """Return whether a packed weight equals (number - zero) * scale + offset with each operation rounded.

    It does not if rounding once and rounding twice give different results, or if -zero * scale is not exact
    in float32.
    """
    is_float8 = codes.dtype == torch.float8_e4m3fn
    if zero is None and offset is None and not is_float8:
        return True
    if zero is not None and offset is not None:
        return False
    numbers = table if table is not None else [127.0]
    if offset is not None and (is_float8 or not all(n == int(n) for n in numbers)):
        return False
    most = int(max(abs(n) for n in numbers))
    step = max(1, _NUMBERS_AT_A_TIME // scale.shape[1])
    for start in range(0, len(scale), step):
        rows = slice(start, start + step)
        scales = scale[rows].float()
        if scale_unit is not None:
            unit = scale_unit[rows].float()
            scales = scales * unit.repeat_interleave(scales.shape[1] // unit.shape[1], 1)
        if scale_divisor is not None:
            divisor = scale_divisor[rows]
            scales = scales / divisor.repeat_interleave(scales.shape[1] // divisor.shape[1], 1)
        if is_float8 and not _are_finite(scales / E4M3_UNIT):
            return False
        if zero is not None and not _are_exact_with_zeros(scales, zero[rows]):
            return False
        if offset is not None and not _are_short(scales, most):
            return False
    return True


def _are_exact_with_zeros(scales: Tensor, zero: Tensor) -> bool:
    # With a negative scale number - zero = 0 gives -0.0, and the sum of two products 0.0.
    summand = scales * zero
    is_same = torch.equal(summand.double(), scales.double() * zero)
    return is_same and _are_finite(summand) and not bool(scales.signbit().any())


def _are_short(scales: Tensor, most: int) -> bool:
    """Return whether products with integers up to `most` are exact: they have the bits of both together."""
    spare = (1 << most.bit_length()) - 1
    return not bool((scales.contiguous().view(torch.int32) & spare).any()) and _are_finite(
        scales * (most + 1)
    )


def _are_finite(x: Tensor) -> bool:
    """Return whether all numbers are finite. The extremes of some with NaN are NaN."""
    low, high = x.aminmax()
    return bool(low.isfinite() and high.isfinite())


def _check_codes(
    codes: Tensor | HalfBytes, table: Sequence[float] | None, *, pairs: bool, gated: bool
) -> None:
    check_pairs(pairs)
    check_flag("gated", gated)
    if isinstance(codes, HalfBytes):
        codes.check()
        check_outputs("codes", codes.rows, gated=gated)
    else:
        check_shape("codes", codes, (None, None))
        check_dtype("codes", codes, tuple(CODE_KINDS))
        check_outputs("codes", codes, gated=gated)
    check_positive("in_features", codes.shape[1])
    if (table is not None) != (codes.dtype == torch.uint8):
        given = "none" if table is None else "one"
        raise ValueError(
            f"a table goes with codes of uint8 and with no others, got {given} with {codes.dtype}"
        )
    if table is not None and not _is_table(table):
        raise ValueError(f"table must be a tuple of {TABLE_SIZE} floats, got {table!r}")
    if table is not None and any(n != float(torch.tensor(n, dtype=torch.bfloat16)) for n in table):
        raise ValueError(f"table must hold numbers that bfloat16 has, got {table!r}")
    if isinstance(codes, HalfBytes) or is_trusted():
        return
    for part in torch.split(codes, max(1, _NUMBERS_AT_A_TIME // codes.shape[1])):
        if table is not None and int(part.max()) >= TABLE_SIZE:
            raise ValueError(f"codes must be 0 to {TABLE_SIZE - 1}, got {int(part.max())}")
        if codes.dtype == torch.float8_e4m3fn and bool(((part.view(torch.uint8) & 127) == 127).any()):
            raise ValueError("codes must be numbers, got NaN")


def _is_table(table: object) -> bool:
    is_long = isinstance(table, list | tuple) and len(table) == TABLE_SIZE
    return is_long and all(isinstance(number, float | int) for number in table)  # type: ignore[attr-defined]


def _check_factors(codes: Tensor | HalfBytes, factors: dict[str, Tensor]) -> None:
    out_features, in_features = codes.shape
    check_shape("scale", factors["scale"], (out_features, None))
    num_groups = factors["scale"].shape[1]
    check_positive("num_groups", num_groups)
    check_multiple("in_features", in_features, "num_groups", num_groups)
    group = in_features // num_groups
    if group_of(group) < LEAST_GROUP:
        raise ValueError(f"groups must have a multiple of {LEAST_GROUP} inputs, got {group}")
    if "zero" in factors and "offset" in factors:
        raise ValueError("a weight has zeros or offsets, got both")
    if "offset_unit" in factors and "offset" not in factors:
        raise ValueError("offset_unit must be left out without offset")
    num_units = None
    for name, x in factors.items():
        if name.endswith("unit"):
            check_shape(name, x, (out_features, num_units))
            num_units = x.shape[1]
            check_positive("num_units", num_units)
            check_multiple("num_groups", num_groups, "num_units", num_units)
        else:
            check_shape(name, x, (out_features, num_groups))
        check_device(name, x, _CPU)
        check_dtype(name, x, _INTEGERS if name == "zero" else (*_INTEGERS, *_FLOATS, torch.float8_e8m0fnu))
        if x.dtype in _INTEGERS:
            low, high = (int(limit) for limit in x.aminmax())
            most = _LIMITS[torch.float32]
            if low < -most or high > most:
                raise ValueError(f"integers in {name} must be from {-most} to {most}, got {low} to {high}")
