"""Pack quantised weights, codes and factors as files have them, into panels: see `products.factors`."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...checks import check_device, check_dtype, check_flag, check_multiple, check_positive, check_shape
from ..launch.huge_pages import in_huge_pages
from ..launch.tasks import Task
from ..products.codes import E4M3_UNIT, TABLE_SIZE
from ..products.factors import FACTORS_AT, LEAST_GROUP, NONE, TABLE_AT, group_of, head_of
from ..products.kinds import CODES4, CODES4_PAIRS, CODES8_PAIRS, E4M3_PAIRS
from ..products.reader import PANEL
from ..simd.memory import get_byte, get_int, set_byte, set_int
from ..simd.numbers import KINDS
from ..simd.vectors import LANES, function
from .panels import CODE_KINDS, CODE_PAIR_KINDS, Panels, check_outputs, check_pairs, num_panels_of

_CPU = torch.device("cpu")
_INPUTS_AT_A_TIME = 256  # of all rows of a panel: they stay in the L1 cache
_NUMBERS_AT_A_TIME = 2**22  # of a search, to limit its memory
_NAMES = "scale", "zero", "offset", "scale_unit", "offset_unit", "low_unit"
_INTEGERS = torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64
_FLOATS = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
# What holds all integers up to a limit, the narrowest first.
_LIMITS = {torch.int8: 127, torch.float16: 2**11, torch.float32: 2**24}
PACK_CODES = Task(("codes", "panels"), ("num_rows", "num_inputs", "panel_bytes", "kind", "gated"))


def pack_codes(
    codes: Tensor,
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
    """Pack a weight of number * scale + offset, or number * scale - zero * scale; see `linear.pack`.

    In float32 the product with the number and the sum are rounded together, once; scales and offsets that
    have a unit are multiplied by it first, and scales that have a divisor are divided by it.

    codes: u8[out_features, in_features], places in a table of 16 numbers; or i8 or float8_e4m3fn, which are
        the numbers.
    scale, zero, offset: [out_features, num_groups], each for the same number of inputs, a multiple of 16.
    scale_unit, offset_unit, scale_divisor: [out_features, num_units], each for the same number of groups.
    """
    low_unit = None
    if scale_divisor is not None:
        scale, scale_unit, low_unit = _as_product(scale, scale_unit, scale_divisor)
    factors = dict(zip(_NAMES, (scale, zero, offset, scale_unit, offset_unit, low_unit), strict=True))
    given = {name: x for name, x in factors.items() if x is not None}
    _check_codes(codes, table, pairs=pairs, gated=gated)
    _check_factors(codes, given)
    out_features, in_features = codes.shape
    num_panels = num_panels_of(out_features, gated)
    kind = (CODE_PAIR_KINDS if pairs else CODE_KINDS)[codes.dtype]
    width = LANES if kind in (CODES4, CODES4_PAIRS) else PANEL
    shape = num_panels, in_features // (1 + pairs), width, *((2,) if pairs else ())
    memory = in_huge_pages(torch.empty(shape, dtype=torch.uint8, device=_CPU))
    codes = codes.contiguous()
    sizes = out_features, in_features, in_features * width
    PACK_CODES.run(num_panels, codes.data_ptr(), memory.data_ptr(), *sizes, kind, int(gated))
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
    panels = [_by_panel([x for name, x in factors.items() if not name.endswith("unit")], gated=gated)]
    units = [x for name, x in factors.items() if name.endswith("unit")]
    if units:
        panels.append(_by_panel(units, gated=gated))
    num_panels = len(panels[0])
    memory = torch.zeros(FACTORS_AT + num_panels * head.panel_bytes, dtype=torch.uint8, device=_CPU)
    memory[:TABLE_AT] = torch.tensor(head, dtype=torch.int64, device=_CPU).view(torch.uint8)
    numbers = torch.tensor(table or [0.0] * TABLE_SIZE, dtype=torch.float32, device=_CPU)
    memory[TABLE_AT : TABLE_AT + numbers.nbytes] = numbers.view(torch.uint8)
    torch.cat(panels, dim=1, out=memory[FACTORS_AT:].view(num_panels, head.panel_bytes))
    return memory


def _by_panel(factors: list[Tensor], *, gated: bool) -> Tensor:
    """Order factors [out_features, n] by panel, entry, factor and output: u8[num_panels, bytes]."""
    ordered = [_in_panels(x, gated).transpose(1, 2).contiguous().view(torch.uint8) for x in factors]
    return torch.cat(ordered, dim=2).flatten(1)


def _in_panels(x: Tensor, gated: bool) -> Tensor:
    """Divide rows [out_features, n] among panels, padded: [num_panels, PANEL, n]."""
    x = x.view(torch.int8) if x.dtype == torch.float8_e4m3fn else x
    halves = x.chunk(2) if gated else [x]
    num_panels = num_panels_of(len(x), gated)
    padded = x.new_zeros(len(halves), num_panels * PANEL // len(halves), x.shape[1])
    for part, half in zip(padded, halves, strict=True):
        part[: len(half)] = half
    return padded.view(len(halves), num_panels, -1, x.shape[1]).transpose(0, 1).flatten(1, 2)


def narrowest(x: Tensor) -> Tensor:
    """Convert factors to the narrowest dtype that holds them exactly and that readers know."""
    if x.dtype in _INTEGERS:
        low, high = x.aminmax()
        most = max(-int(low), int(high))
        return x.to(next(dtype for dtype, limit in _LIMITS.items() if most <= limit))
    if x.dtype not in _FLOATS:
        x = x.float()
    if x.dtype == torch.float32:
        for dtype in (torch.bfloat16, torch.float16):
            narrow = x.to(dtype)
            if torch.equal(narrow.float().view(torch.int32), x.view(torch.int32)):
                return narrow
    return x


def is_exact(
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    offset: Tensor | None = None,
    scale_unit: Tensor | None = None,
    offset_unit: Tensor | None = None,  # noqa: ARG001
    scale_divisor: Tensor | None = None,
    *,
    table: Sequence[float] | None = None,
) -> bool:
    """Return whether a packed weight is (number - zero) * scale + offset with each operation rounded.

    Not if products that are rounded once differ from those rounded twice, or if -zero * scale is no float32.
    """
    scales = scale.float()
    if scale_unit is not None:
        scales = scales * scale_unit.float().repeat_interleave(scales.shape[1] // scale_unit.shape[1], 1)
    if scale_divisor is not None:
        scales = scales / scale_divisor.repeat_interleave(scales.shape[1] // scale_divisor.shape[1], 1)
    if codes.dtype == torch.float8_e4m3fn and not (scales.abs() / E4M3_UNIT).isfinite().all():
        return False
    if zero is not None and offset is not None:
        return False
    if zero is not None:
        # With a negative scale number - zero = 0 gives -0.0, and the sum of two products 0.0.
        summand = scales * zero
        is_same = torch.equal(summand.double(), scales.double() * zero)
        return is_same and bool(summand.isfinite().all()) and not bool(scales.signbit().any())
    if offset is None:
        return True
    numbers = table if table is not None else [127.0]
    is_integer = codes.dtype != torch.float8_e4m3fn and all(n == int(n) for n in numbers)
    most = max(abs(n) for n in numbers) if is_integer else 0
    # Products have as many bits as both factors together.
    spare = (1 << int(most).bit_length()) - 1
    is_short = not bool((scales.contiguous().view(torch.int32) & spare).any())
    return is_integer and is_short and bool((scales * (most + 1)).isfinite().all())


def _check_codes(codes: Tensor, table: Sequence[float] | None, *, pairs: bool, gated: bool) -> None:
    check_pairs(pairs)
    check_flag("gated", gated)
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
    for part in _parts(codes):
        if table is not None and int(part.max()) >= TABLE_SIZE:
            raise ValueError(f"codes must be 0 to {TABLE_SIZE - 1}, got {int(part.max())}")
        if codes.dtype == torch.float8_e4m3fn and bool(((part.view(torch.uint8) & 127) == 127).any()):
            raise ValueError("codes must be numbers, got NaN")


def _is_table(table: object) -> bool:
    is_long = isinstance(table, list | tuple) and len(table) == TABLE_SIZE
    return is_long and all(isinstance(number, float | int) for number in table)  # type: ignore[attr-defined]


def _check_factors(codes: Tensor, factors: dict[str, Tensor]) -> None:
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


def _parts(codes: Tensor) -> Iterator[Tensor]:
    return iter(torch.split(codes, max(1, _NUMBERS_AT_A_TIME // codes.shape[1])))


@function
def _row_of(args, panel, place):
    """Return the row at a place of a panel; -1 if it is padding."""
    if not args.gated:
        row = panel * PANEL + place
        return row if row < args.num_rows else -1
    half = args.num_rows // 2
    row = panel * LANES + place % LANES
    return -1 if row >= half else row if place < LANES else half + row


@function
def _pack_sixteen(source, to):
    """Pack 16 codes of an output for Codes4Pairs: those of the even inputs, then the others."""
    even = 0
    odd = 0
    for i in range(4):
        four = get_int(source + 4 * i)
        even |= (four & 0x000F000F) << 4 * i
        odd |= (four >> 8 & 0x000F000F) << 4 * i
    set_int(to, even)
    set_int(to + 4, odd)


@function
def _pack_bytes(args, panel, start, end):
    """Pack codes of whole bytes, of two inputs in pairs."""
    per_step = 2 if args.kind in (CODES8_PAIRS, E4M3_PAIRS) else 1
    to = args.panels + panel * args.panel_bytes
    for place in range(PANEL):
        row = _row_of(args, panel, place)
        for k in range(start, end, per_step):
            at = to + k * PANEL + per_step * place
            for i in range(per_step):
                set_byte(at + i, get_byte(args.codes + row * args.num_inputs + k + i) if row >= 0 else 0)


@function
def _pack_halves(args, panel, start, end):
    """Pack codes of 4 bits, two outputs to a byte."""
    to = args.panels + panel * args.panel_bytes
    for lane in range(LANES):
        low_row = _row_of(args, panel, lane)
        high_row = _row_of(args, panel, lane + LANES)
        for k in range(start, end):
            low = get_byte(args.codes + low_row * args.num_inputs + k) if low_row >= 0 else 0
            high = get_byte(args.codes + high_row * args.num_inputs + k) if high_row >= 0 else 0
            set_byte(to + k * LANES + lane, low | high << 4)


@function
def _pack_pairs(args, panel, start, end):
    """Pack codes of 4 bits in the order of Codes4Pairs."""
    to = args.panels + panel * args.panel_bytes
    for place in range(PANEL):
        row = _row_of(args, panel, place)
        for k in range(start, end, 16):
            at = to + k * LANES + 8 * place
            if row >= 0:
                _pack_sixteen(args.codes + row * args.num_inputs + k, at)
            else:
                set_int(at, 0)
                set_int(at + 4, 0)


@PACK_CODES.each_unit
def _pack_panel(args, panel):
    for start in range(0, args.num_inputs, _INPUTS_AT_A_TIME):
        end = min(start + _INPUTS_AT_A_TIME, args.num_inputs)
        if args.kind == CODES4:
            _pack_halves(args, panel, start, end)
        elif args.kind == CODES4_PAIRS:
            _pack_pairs(args, panel, start, end)
        else:
            _pack_bytes(args, panel, start, end)
