"""What comes before and after a draw on a CPU: penalties off the logits, log-probabilities of tokens."""

import math

import numpy as np
import torch
from torch import Tensor

from ...plain import logprobs as torch_logprobs
from ...plain import sampling as torch_sampling
from ...plain import selection as torch_selection
from ..launch.tasks import Task, is_plain
from ..simd.memory import (
    any_set,
    get_byte,
    get_float,
    get_int,
    get_long,
    load,
    load_up_to,
    set_float,
    set_long,
)
from ..simd.vectors import (
    LANES,
    VECTOR_BYTES,
    add,
    exp2_of_negative,
    function,
    greater,
    multiply,
    splat,
    subtract,
    total,
    where_nan,
)
from .selection import (
    DEAD,
    MINUS_INFINITY,
    NAN,
    collect,
    column_maxima,
    count_above,
    place_of,
    reached_by,
    sort,
)

PENALTIES = Task(
    ("logits", "rows", "slots", "counts", "seen", "repetition", "frequency", "presence"),
    ("num_rows", "size", "stride"),
)  # fmt: skip
LOGPROBS = Task(
    ("logits", "tokens", "values", "ids", "ranks"), ("num_rows", "size", "stride", "width", "num_top")
)
_LOG2E = np.float32(1.4426950408889634)


@function
def _penalise(args, i, at, count):
    """Repetition first: positive logits are divided, others multiplied (Keskar et al., 2019)."""
    logit, repetition = get_float(at), get_float(args.repetition + 4 * i)
    logit = logit / repetition if logit > np.float32(0.0) else logit * repetition
    if count > 0:
        logit -= get_float(args.frequency + 4 * i) * np.float32(count)
        logit -= get_float(args.presence + 4 * i)
    set_float(at, logit)


@PENALTIES.each_unit
def _apply_penalties(args, i):
    """Those of the i-th history, of which most is blank: only where it is not are counts read."""
    size, slot = args.size, get_long(args.slots + 8 * i)
    x = args.logits + get_long(args.rows + 8 * i) * args.stride
    counts, seen = args.counts + slot * 4 * size, args.seen + slot * size
    whole = size // VECTOR_BYTES * VECTOR_BYTES
    for start in range(0, whole, VECTOR_BYTES):
        if any_set(seen + start):
            for token in range(start, start + VECTOR_BYTES):
                if get_byte(seen + token):
                    _penalise(args, i, x + 4 * token, get_int(counts + 4 * token))
    for token in range(whole, size):
        if get_byte(seen + token):
            _penalise(args, i, x + 4 * token, get_int(counts + 4 * token))


@function
def _mass(x, size, top):
    """What tokens weigh together, the likeliest 1."""
    mass, zero, dead, tops, log2e = 0.0, splat(np.float32(0.0)), splat(DEAD), splat(top), splat(_LOG2E)
    spoilt, whole = zero, size // (2 * LANES) * (2 * LANES)
    for start in range(0, whole, 64 * LANES):
        some, others = zero, zero
        for i in range(start, min(start + 64 * LANES, whole), 2 * LANES):  # two chains at a time
            log = multiply(subtract(load(x + 4 * i), tops), log2e)
            other = multiply(subtract(load(x + 4 * i + VECTOR_BYTES), tops), log2e)
            some = add(some, exp2_of_negative(greater(log, dead)))
            others = add(others, exp2_of_negative(greater(other, dead)))
            spoilt = where_nan(add(log, other), spoilt)
        mass += np.float64(total(add(some, others)))
    for i in range(whole, size, LANES):
        log = multiply(subtract(load_up_to(x + 4 * i, size - i, MINUS_INFINITY), tops), log2e)
        mass += np.float64(total(exp2_of_negative(greater(log, dead))))
        spoilt = where_nan(log, spoilt)
    return mass + np.float64(total(spoilt))


@LOGPROBS.each_unit
def _token_logprobs(args, row, scratch):
    x, size, width, num_top = args.logits + row * args.stride, args.size, args.width, args.num_top
    values, ids = args.values + 4 * row * (1 + num_top), args.ids + 8 * row * (1 + num_top)
    top, columns = column_maxima(x, size, width, scratch)
    log_mass = math.log(_mass(x, size, top))  # NaN where a number is, or none is finite
    token = get_long(args.tokens + 8 * row)
    own = get_float(x + 4 * token)
    set_long(ids, token)
    set_float(values, np.float32(np.float64(own - top) - log_mass))
    if num_top == 0:
        set_long(args.ranks + 8 * row, 1 + count_above(x, size, own, False))
        return
    bound = reached_by(columns, width, num_top) if num_top <= width else MINUS_INFINITY
    keys = scratch + 8 * -(-width // LANES) * LANES
    count, rank = collect(x, size, bound, keys), 1
    sort(keys, count)
    for i in range(max(count, num_top)):
        # NaN is not among the candidates.
        token = place_of(get_long(keys + 8 * i)) if i < count else 0
        logit = get_float(x + 4 * token) if i < count else NAN
        rank += logit > own
        if i < num_top:
            set_long(ids + 8 + 8 * i, token)
            set_float(values + 4 + 4 * i, np.float32(np.float64(logit - top) - log_mass))
    set_long(args.ranks + 8 * row, rank if own >= bound else 1 + count_above(x, size, own, False))


def apply_penalties(
    logits: Tensor,  # f32[num_rows, vocab_size], changed in place
    rows: Tensor,  # i64[n], which rows of it
    slots: Tensor,  # i64[n], where the history of each is
    output_counts: Tensor,  # i32[num_slots, vocab_size], how often each token was generated
    seen: Tensor,  # bool[num_slots, vocab_size], the tokens of prompt and output
    repetition_penalty: Tensor,  # f32[n]
    frequency_penalty: Tensor,  # f32[n]
    presence_penalty: Tensor,  # f32[n]
) -> None:
    """Take the penalties off the logits of tokens seen; see `reference.apply_penalties`."""
    num, size = rows.shape[0], logits.shape[1]
    columns = (repetition_penalty, frequency_penalty, presence_penalty)
    regular = (
        logits.dtype == torch.float32
        and logits.stride(1) == 1
        and all(is_plain(x, torch.int64, num) for x in (rows, slots))
        and is_plain(output_counts, torch.int32, output_counts.shape[0] * size)
        and is_plain(seen, torch.bool, seen.shape[0] * size)
        and all(is_plain(x, torch.float32, num) for x in columns)
    )
    if not regular:
        torch_sampling.apply_penalties(logits, rows, slots, output_counts, seen, *columns)
        return
    histories = (logits, rows, slots, output_counts, seen, *columns)
    PENALTIES.run(num, *(x.data_ptr() for x in histories), num, size, logits.stride(0) * 4)


def token_logprobs(
    logits: Tensor,  # f32[n, vocab_size]
    tokens: Tensor,  # i64[n]
    num_top: int,  # 0 to vocab_size
) -> tuple[Tensor, Tensor, Tensor]:  # f32 and i64 [n, 1 + num_top], i64[n]
    """log_softmax of tokens and of the likeliest; see `reference.token_logprobs`."""
    num_rows, size = logits.shape
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or not is_plain(tokens, torch.int64, num_rows):
        return torch_logprobs.token_logprobs(logits, tokens, num_top)
    values = logits.new_empty(num_rows, 1 + num_top)
    ids, ranks = tokens.new_empty(num_rows, 1 + num_top), torch.empty_like(tokens)
    width = -(-size // torch_selection.HEIGHT)
    LOGPROBS.run(
        num_rows,
        *(x.data_ptr() for x in (logits, tokens, values, ids, ranks)),
        num_rows,
        size,
        logits.stride(0) * 4,
        width,
        num_top,
        # Columns, and keys.
        scratch_size=8 * -(-width // LANES) * LANES + 8 * size,
    )
    return values, ids, ranks
