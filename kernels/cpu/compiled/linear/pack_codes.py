"""Pack quantised weights, codes and factors as files have them, into panels: see `products.factors`."""

from ...formats import CODES4, CODES4_PAIRS, CODES8_PAIRS, E4M3_PAIRS, PANEL
from ...linear.pack_codes import PACK_CODES, WHOLE_BYTES
from ...target import LANES
from ..kernels import each_unit
from ..simd.memory import get_eight, get_four, set_byte, set_long, set_short
from ..simd.vectors import function

_INPUTS_AT_A_TIME = 256  # of all rows of a panel: they stay in the L1 cache


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
def _eight(args, row, k):
    """Return 8 codes of a row from input k on, in the bytes of an int64, the first one lowest."""
    if row < 0:
        return 0
    at = args.codes + row * args.row_bytes
    if args.run_shift == WHOLE_BYTES:
        return get_eight(at + k)
    if args.run_shift == 0:
        codes = get_four(at + k // 2)
        codes = (codes | codes << 16) & 0x0000FFFF0000FFFF
        codes = (codes | codes << 8) & 0x00FF00FF00FF00FF
        return (codes | codes << 4) & 0x0F0F0F0F0F0F0F0F
    at += (k >> args.block_shift) * args.block_bytes + args.start
    place = k & ((1 << args.block_shift) - 1)
    run = place >> args.run_shift
    at += (run >> 1 << args.run_shift) + (place & ((1 << args.run_shift) - 1))
    return get_eight(at) >> 4 * (run & 1) & 0x0F0F0F0F0F0F0F0F


@function
def _pack_bytes(args, panel, start, end):
    """Pack codes of whole bytes, of two inputs in pairs."""
    in_pairs = args.kind in (CODES8_PAIRS, E4M3_PAIRS)
    to = args.panels + panel * args.panel_bytes
    for place in range(PANEL):
        row = _row_of(args, panel, place)
        for k in range(start, end, 8):
            codes = _eight(args, row, k)
            if in_pairs:
                for i in range(0, 8, 2):
                    set_short(to + (k + i) * PANEL + 2 * place, codes >> 8 * i)
            else:
                for i in range(8):
                    set_byte(to + (k + i) * PANEL + place, codes >> 8 * i)


@function
def _pack_halves(args, panel, start, end):
    """Pack codes of 4 bits, two outputs to a byte."""
    to = args.panels + panel * args.panel_bytes
    for lane in range(LANES):
        low_row = _row_of(args, panel, lane)
        high_row = _row_of(args, panel, lane + LANES)
        for k in range(start, end, 8):
            both = _eight(args, low_row, k) | _eight(args, high_row, k) << 4
            for i in range(8):
                set_byte(to + (k + i) * LANES + lane, both >> 8 * i)


@function
def _pack_pairs(args, panel, start, end):
    """Pack codes of 4 bits in the order of Codes4Pairs: of 16 codes the even inputs, then the odd ones.

    Of each 8 codes, 0, 4, 2 and 6 come to lie in this order; the second 8 lie next to the first.
    """
    to = args.panels + panel * args.panel_bytes
    for place in range(PANEL):
        row = _row_of(args, panel, place)
        for k in range(start, end, 16):
            first = _eight(args, row, k)
            second = _eight(args, row, k + 8)
            even = first & 0x000F000F000F000F | (second & 0x000F000F000F000F) << 8
            odd = first >> 8 & 0x000F000F000F000F | (second >> 8 & 0x000F000F000F000F) << 8
            even = (even | even >> 28) & 0xFFFFFFFF
            odd = (odd | odd >> 28) & 0xFFFFFFFF
            set_long(to + k * LANES + 8 * place, even | odd << 32)


@each_unit(PACK_CODES)
def _pack_panel(args, panel):
    for start in range(0, args.num_inputs, _INPUTS_AT_A_TIME):
        end = min(start + _INPUTS_AT_A_TIME, args.num_inputs)
        if args.kind == CODES4:
            _pack_halves(args, panel, start, end)
        elif args.kind == CODES4_PAIRS:
            _pack_pairs(args, panel, start, end)
        else:
            _pack_bytes(args, panel, start, end)
