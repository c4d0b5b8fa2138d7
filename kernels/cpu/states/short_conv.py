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
    ("x", "weight", "bias", "states", "slots", "seq_lens", "cu_seqlens_q", "run_inputs", "runs", "out"),
    ("kind", "gated", "num_tokens", "size", "width", "num_places", "x_stride", "state_stride", "run_stride"),
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
    run_inputs: Tensor | None = None,  # [num_slots, num_places, size], like x, written in place
    runs: Tensor | None = None,  # i32[num_seqs, 2]: see `reference.short_conv`
    *,
    gated: bool,
) -> Tensor:  # [num_tokens, size]
    """Convolve the tokens of each sequence along time; see `reference.short_conv`."""
    width, size = weight.shape
    sequences = slots, seq_lens, cu_seqlens_q, run_inputs, runs
    if not (has_regular_rows(x) and are_contiguous(states[:1]) and has_regular_places(run_inputs)):
        return by_torch(x, weight, bias, states, *sequences, gated=gated)
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
        run_inputs=run_inputs,
        runs=runs,
        out=out,
        kind=KINDS[x.dtype],
        gated=gated,
        num_tokens=len(x),
        size=size,
        width=width,
        num_places=1 if run_inputs is None else run_inputs.shape[1],
        x_stride=x.stride(0) * x.itemsize,
        state_stride=states.stride(0) * states.itemsize,
        run_stride=0 if run_inputs is None else run_inputs.stride(0) * run_inputs.itemsize,
    )
    return out


def has_regular_places(run_inputs: Tensor | None) -> bool:
    """Return whether the kernels can read the inputs of runs, if there are any."""
    return run_inputs is None or are_contiguous(run_inputs[:1])
