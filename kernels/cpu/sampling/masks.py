"""Masks of allowed tokens, a bit each: words of zeros are skipped 32 tokens at a time."""

from torch import Tensor

from ...checked import checked
from ..launch.tasks import Task, are_contiguous
from ..rows.row_kernel import has_regular_rows, in_torch
from ..target import VECTOR_BYTES

MASK = Task("sampling.masks.mask", ("logits", "rows", "allowed"), ("size", "stride", "num_words"))
CHOOSE = Task(
    "sampling.masks.choose",
    ("logits", "rows", "allowed", "tokens", "highest"),
    ("size", "stride", "num_words"),
)


by_torch = in_torch("mask_logits")
by_reference = in_torch("greedy_of_allowed", "reference")


@checked
def mask_logits(
    logits: Tensor,  # f32[n, vocab_size], written in place
    rows: Tensor,  # i64[m]
    allowed: Tensor,  # i32[m, num_words]
) -> None:
    """Set the logits of tokens that are not allowed to -inf; see `reference.mask_logits`."""
    if not (has_regular_rows(logits) and are_contiguous(rows, allowed)):
        by_torch(logits, rows, allowed)
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
    """Write the likeliest allowed tokens of some rows; see `reference.greedy_of_allowed`."""
    if not (has_regular_rows(logits) and are_contiguous(rows, allowed, tokens, highest)):
        by_reference(logits, rows, allowed, tokens, highest)
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
