"""Convolutions along time, each of a few tokens, over ragged sequences whose last inputs are kept."""

from torch import Tensor

from ...checked import checked
from ..formats import KINDS
from ..launch.tasks import Task, are_contiguous
from ..rows.row_kernels import has_regular_rows, in_torch
from ..target import LANES

COLUMNS = 16 * LANES  # of a unit
RING = 8  # rows of the scratch memory: a power of two, at least the widest convolution

SHORT_CONV = Task(
    "states.short_conv.short_conv",
    ("x", "weight", "bias", "states", "slots", "seq_lens", "cu_seqlens_q", "out"),
    ("kind", "gated", "num_tokens", "size", "width", "x_stride", "state_stride"),
)


by_torch = in_torch("short_conv")


@checked
def short_conv(
    x: Tensor,  # [num_tokens, size]; gated: [num_tokens, 3 * size], B, C and x side by side
    weight: Tensor,  # f32[width, size]: the last row multiplies the newest input
    bias: Tensor | None,  # f32[size]
    states: Tensor,  # [num_slots, width - 1, size], like x: the last inputs of sequences, written in place
    slots: Tensor,  # i32[num_seqs], each another
    seq_lens: Tensor,  # i32[num_seqs], computed and new tokens
    cu_seqlens_q: Tensor,  # i32[num_seqs + 1], exclusive prefix sum of the new tokens
    *,
    gated: bool,
) -> Tensor:  # [num_tokens, size]
    """Convolve the tokens of each sequence along time; see `reference.short_conv`."""
    width, size = weight.shape
    if not (has_regular_rows(x) and are_contiguous(states[:1])):
        return by_torch(x, weight, bias, states, slots, seq_lens, cu_seqlens_q, gated=gated)
    out = x.new_empty(len(x), size)
    SHORT_CONV.run(
        -(-size // COLUMNS),
        scratch_size=4 * RING * COLUMNS,
        x=x,
        weight=weight,
        bias=bias,
        states=states,
        slots=slots,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        out=out,
        kind=KINDS[x.dtype],
        gated=gated,
        num_tokens=len(x),
        size=size,
        width=width,
        x_stride=x.stride(0) * x.itemsize,
        state_stride=states.stride(0) * states.itemsize,
    )
    return out
