"""Convolutions along time. A unit is some columns of all sequences.

The last inputs of a sequence are in a ring of rows of float32: where input t lies does not depend on how the
tokens are divided among steps.

The inputs of a run of drafts are kept, and the state stays as it was before the run. The tokens of a run that
turned out right are among the inputs before the next step's.
"""

from typing import Any

import numpy as np

from ...formats import ITEM_SIZES
from ...states.short_conv import COLUMNS, RING, SHORT_CONV
from ...target import LANES
from ..kernels import each_unit
from ..rows.row_kernel import by_kind_with
from ..simd.memory import get_int, load, load_up_to, some_of, store
from ..simd.vectors import fma, function, multiply, silu, splat

_ROW_BYTES = 4 * COLUMNS


@by_kind_with
def _convolve(kind: int) -> Any:
    size_of = ITEM_SIZES[kind]
    (load_some, store_some) = some_of(kind)

    @function
    def read_inputs(ring, row, numbers, count):
        """Put one token's inputs into a row of the ring."""
        to = ring + (row & (RING - 1)) * _ROW_BYTES
        for c in range(0, count, LANES):
            store(to + 4 * c, load_some(numbers + c * size_of, count - c))

    @function
    def write_inputs(ring, row, numbers, count):
        """Write a row of the ring to memory."""
        source = ring + (row & (RING - 1)) * _ROW_BYTES
        for c in range(0, count, LANES):
            store_some(numbers + c * size_of, load(source + 4 * c), count - c)

    @function
    def read_state(args, ring, state, first, count, is_new):
        """Put the inputs before token 0 of this step into the ring; row 1 has the first of them."""
        for j in range(args.width - 1):
            if is_new:
                row = ring + ((j + 1) & (RING - 1)) * _ROW_BYTES
                for c in range(0, count, LANES):
                    store(row + 4 * c, splat(np.float32(0.0)))
            else:
                read_inputs(ring, j + 1, state + (j * args.size + first) * size_of, count)

    @function
    def write_state(args, ring, state, first, count, newest):
        """Keep the last inputs. newest: the row of the ring with the last one."""
        for j in range(args.width - 1):
            at = state + (j * args.size + first) * size_of
            write_inputs(ring, newest - (args.width - 2) + j, at, count)

    @function
    def convolve_token(args, ring, token, place, first, count):
        """Compute the output of a token, whose input belongs into row `place` of the ring."""
        x = args.x + token * args.x_stride + first * size_of
        part = args.size * size_of
        out = args.out + (token * args.size + first) * size_of
        newest = ring + (place & (RING - 1)) * _ROW_BYTES
        for c in range(0, count, LANES):
            at = c * size_of
            left = count - c
            number = load_some(x + at, left)
            if args.gated:
                # Rounded as the state is, which may hold it: through the output's place.
                store_some(out + at, multiply(number, load_some(x + 2 * part + at, left)), left)
                number = load_some(out + at, left)
            store(newest + 4 * c, number)
            total = splat(np.float32(0.0))
            if args.bias:
                total = load_up_to(args.bias + 4 * (first + c), left, np.float32(0.0))
            for j in range(args.width):
                row = ring + ((place - (args.width - 1) + j) & (RING - 1)) * _ROW_BYTES
                own = load_up_to(args.weight + 4 * (j * args.size + first + c), left, np.float32(0.0))
                total = fma(load(row + 4 * c), own, total)
            total = multiply(total, load_some(x + part + at, left)) if args.gated else silu(total)
            store_some(out + at, total, left)

    @function
    def convolve(args, unit, ring):
        first = unit * COLUMNS
        count = min(COLUMNS, args.size - first)
        sequence = 0
        start = np.int64(0)
        while start < args.num_tokens:
            end = np.int64(get_int(args.cu_seqlens_q + 4 * (sequence + 1)))
            if end > start:
                slot = np.int64(get_int(args.slots + 4 * sequence))
                state = args.states + slot * args.state_stride
                position = np.int64(get_int(args.seq_lens + 4 * sequence)) - (end - start)
                read_state(args, ring, state, first, count, position == 0)
                # The inputs before are in rows 1 to width - 1.
                newest = np.int64(args.width - 1)
                is_run = False
                places = args.run_inputs + slot * args.run_stride + first * size_of
                place_bytes = args.size * size_of
                if args.runs != 0:
                    unapplied = np.int64(get_int(args.runs + 8 * sequence))
                    is_run = get_int(args.runs + 8 * sequence + 4) != 0
                    for at in range(position - unapplied, position):
                        newest += 1
                        read_inputs(ring, newest, places + at % args.num_places * place_bytes, count)
                    if is_run:
                        write_state(args, ring, state, first, count, newest)
                for token in range(start, end):
                    newest += 1
                    convolve_token(args, ring, token, newest, first, count)
                    if is_run:
                        own = position + token - start
                        write_inputs(ring, newest, places + own % args.num_places * place_bytes, count)
                if not is_run:
                    write_state(args, ring, state, first, count, newest)
            start = end
            sequence += 1

    return convolve


@each_unit(SHORT_CONV)
def _short_conv_unit(args, unit, scratch):
    _convolve(args, unit, scratch)
