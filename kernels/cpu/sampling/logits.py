"""Logits before and after a draw: masks, penalties and log-probabilities."""

import torch
from torch import Tensor

from ...checked import checked
from ...plain.sampling import selection as torch_selection
from ..launch.tasks import Task, are_contiguous
from ..rows.row_kernels import has_regular_rows, in_torch
from ..target import VECTOR_BYTES, padded

MASK = Task("sampling.masks.mask", ("logits", "rows", "allowed"), ("size", "stride", "num_words"))
CHOOSE = Task(
    "sampling.masks.choose",
    ("logits", "rows", "allowed", "tokens", "highest"),
    ("size", "stride", "num_words"),
)


mask_by_torch = in_torch("mask_logits")
choose_by_reference = in_torch("greedy_of_allowed", "reference")


@checked
def mask_logits(
    logits: Tensor,  # f32[n, vocab_size], written in place
    rows: Tensor,  # i64[m]
    allowed: Tensor,  # i32[m, num_words]
) -> None:
    """Set the logits of tokens that are not allowed to -inf; see `reference.mask_logits`."""
    if not (has_regular_rows(logits) and are_contiguous(rows, allowed)):
        mask_by_torch(logits, rows, allowed)
        return
    MASK.run(
        len(rows),
        logits=logits,
        rows=rows,
        allowed=allowed,
        size=logits.shape[1],
        stride=logits.stride(0) * 4,
        num_words=allowed.shape[1],
    )


@checked
def greedy_of_allowed(
    logits: Tensor,  # f32[n, vocab_size]
    rows: Tensor,  # i64[m]
    allowed: Tensor,  # i32[m, num_words]
    tokens: Tensor,  # i64[n], of `greedy`; those of `rows` are written
    highest: Tensor,  # f32[n], of `greedy`; those of `rows` are written
) -> None:
    """Replace greedy tokens by the most likely allowed ones; see `reference.greedy_of_allowed`."""
    if not (has_regular_rows(logits) and are_contiguous(rows, allowed, tokens, highest)):
        choose_by_reference(logits, rows, allowed, tokens, highest)
        return
    CHOOSE.run(
        len(rows),
        logits=logits,
        rows=rows,
        allowed=allowed,
        tokens=tokens,
        highest=highest,
        size=logits.shape[1],
        stride=logits.stride(0) * 4,
        num_words=allowed.shape[1],
        scratch_size=2 * VECTOR_BYTES,
    )


PENALTIES = Task(
    "sampling.penalties.penalties",
    ("logits", "rows", "slots", "counts", "seen", "repetition", "frequency", "presence"),
    ("size", "stride"),
)


penalties_by_torch = in_torch("apply_penalties")


@checked
def apply_penalties(
    logits: Tensor,  # f32[num_rows, vocab_size], changed in place
    rows: Tensor,  # i64[n], rows of logits
    slots: Tensor,  # i64[n], where the history of each is
    output_counts: Tensor,  # i32[num_slots, vocab_size], how often each token was generated
    seen: Tensor,  # bool[num_slots, vocab_size], the tokens of prompt and output
    repetition_penalty: Tensor,  # f32[n]
    frequency_penalty: Tensor,  # f32[n]
    presence_penalty: Tensor,  # f32[n]
) -> None:
    """Subtract penalties from the logits of tokens seen; see `reference.apply_penalties`."""
    histories = rows, slots, output_counts, seen, repetition_penalty, frequency_penalty, presence_penalty
    if not (has_regular_rows(logits) and are_contiguous(*histories)):
        penalties_by_torch(logits, *histories)
        return
    PENALTIES.run(
        len(rows),
        logits=logits,
        rows=rows,
        slots=slots,
        counts=output_counts,
        seen=seen,
        repetition=repetition_penalty,
        frequency=frequency_penalty,
        presence=presence_penalty,
        size=logits.shape[1],
        stride=logits.stride(0) * 4,
    )


LOGPROBS = Task(
    "sampling.token_logprobs.logprobs",
    ("logits", "tokens", "values", "ids", "ranks"),
    ("size", "stride", "width", "num_top"),
)


logprobs_by_torch = in_torch("token_logprobs")


@checked
def token_logprobs(
    logits: Tensor,  # f32[n, vocab_size]
    tokens: Tensor,  # i64[n]
    num_top: int,  # 0 to vocab_size
) -> tuple[Tensor, Tensor, Tensor]:  # f32 and i64 [n, 1 + num_top], i64[n]
    """Return log-probabilities of given and most likely tokens; see `reference.token_logprobs`."""
    if not (has_regular_rows(logits) and tokens.is_contiguous()):
        return logprobs_by_torch(logits, tokens, num_top)
    num_rows, size = logits.shape
    values = logits.new_empty(num_rows, 1 + num_top)
    ids = tokens.new_empty(num_rows, 1 + num_top)
    ranks = torch.empty_like(tokens)
    width = -(-size // torch_selection.HEIGHT)
    LOGPROBS.run(
        num_rows,
        logits=logits,
        tokens=tokens,
        values=values,
        ids=ids,
        ranks=ranks,
        size=size,
        stride=logits.stride(0) * 4,
        width=width,
        num_top=num_top,
        # Column maxima, and a key of each logit.
        scratch_size=8 * padded(width) + 8 * size,
    )
    return values, ids, ranks
