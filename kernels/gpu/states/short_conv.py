"""Convolutions along time, each of a few tokens, over ragged sequences whose last inputs are kept."""

import triton
import triton.language as tl
from torch import Tensor

from ...checked import checked_as
from ...checks import check_contiguous, check_last_dim_contiguous
from ..launch import BoundLaunch, Launches, combination
from ..rows.scale_by_sigmoid import sigmoid
from ..target import check_launchable

_BLOCK = 256


@triton.jit
def _input(
    x_ptr,
    state_ptr,
    run_ptr,  # or None
    place,
    back: tl.constexpr,
    position,
    num_unapplied,
    mask_kept,
    mask,
    stride_x,
    NUM_PLACES: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
):
    """Return the input of the token `back` before one, in float32.

    One before the step is in the state, or among the inputs of the last run.

    x_ptr: that of the token. place: its number in the step. position: that of the step's first token.
    """
    if place >= back:
        x_ptr -= back * stride_x
        number = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            other = tl.load(x_ptr + 2 * SIZE, mask=mask, other=0.0).to(tl.float32)
            number = (number * other).to(x_ptr.dtype.element_ty).to(tl.float32)
    else:
        row = place - back + (WIDTH - 1) + num_unapplied
        source = state_ptr + row * SIZE
        own_mask = mask_kept
        if run_ptr is not None:  # noqa: SIM102 (known when the kernel is compiled)
            if place + num_unapplied >= back:
                source = run_ptr + (position + place - back) % NUM_PLACES * SIZE
                own_mask = mask
        number = tl.load(source, mask=own_mask, other=0.0).to(tl.float32)
    return number


@triton.jit
def _short_conv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,  # or None
    states_ptr,
    slots_ptr,
    seq_lens_ptr,
    cu_seqlens_q_ptr,
    run_inputs_ptr,  # or None
    runs_ptr,
    out_ptr,
    stride_x: tl.constexpr,
    stride_state,
    stride_run,
    NUM_PLACES: tl.constexpr,
    GATED: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0)
    start = tl.load(cu_seqlens_q_ptr + sequence)
    end = tl.load(cu_seqlens_q_ptr + sequence + 1)
    position = tl.load(seq_lens_ptr + sequence) - (end - start)
    # A new sequence reads no column of what its slot holds.
    num_kept = tl.where(position > 0, SIZE, 0)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < SIZE
    mask_kept = offs < num_kept
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    state_ptr = states_ptr + slot * stride_state + offs
    run_ptr = run_inputs_ptr
    num_unapplied = 0
    num_seen = end - start  # by the state, which sees none of a run
    if run_inputs_ptr is not None:
        run_ptr += slot * stride_run + offs
        num_unapplied = tl.load(runs_ptr + 2 * sequence)
        num_seen = tl.where(tl.load(runs_ptr + 2 * sequence + 1) != 0, 0, num_seen)
    first = start.to(tl.int64)
    x_ptr += first * stride_x + offs
    out_ptr += first * SIZE + offs
    dtype = out_ptr.dtype.element_ty
    for place in range(end - start):
        total = tl.zeros([BLOCK], dtype=tl.float32)
        if bias_ptr is not None:
            total = tl.load(bias_ptr + offs, mask=mask, other=0.0)
        for j in tl.static_range(WIDTH):
            number = _input(
                x_ptr,
                state_ptr,
                run_ptr,
                place,
                WIDTH - 1 - j,
                position,
                num_unapplied,
                mask_kept,
                mask,
                stride_x,
                NUM_PLACES,
                SIZE,
                WIDTH,
                GATED,
            )
            total += number * tl.load(weight_ptr + j * SIZE + offs, mask=mask, other=0.0)
        if GATED:
            gate = tl.load(x_ptr + SIZE, mask=mask, other=0.0)
            total = total * gate.to(tl.float32)
        else:
            total = total * sigmoid(total)
        tl.store(out_ptr, total.to(dtype), mask=mask)
        x_ptr += stride_x
        out_ptr += SIZE
    if end > start:
        x_ptr -= (end - start - num_seen) * stride_x
        for j in tl.static_range(WIDTH - 1):  # row j may come of a later row, which is written behind it
            number = _input(
                x_ptr,
                state_ptr,
                run_ptr,
                num_seen,
                WIDTH - 1 - j,
                position,
                num_unapplied,
                mask_kept,
                mask,
                stride_x,
                NUM_PLACES,
                SIZE,
                WIDTH,
                GATED,
            )
            tl.store(state_ptr + j * SIZE, number.to(dtype), mask=mask)
    if run_inputs_ptr is not None:
        # After the last read of a token that this step applies: both have places of their own.
        for place in range(end - start - num_seen):
            number = tl.load(x_ptr, mask=mask, other=0.0)
            if GATED:
                other = tl.load(x_ptr + 2 * SIZE, mask=mask, other=0.0).to(tl.float32)
                number = (number.to(tl.float32) * other).to(dtype)
            tl.store(run_ptr + (position + place) % NUM_PLACES * SIZE, number, mask=mask)
            x_ptr += stride_x


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
    """Convolve the tokens of each sequence along time, every column by itself; see `reference.short_conv`.

    One program processes the tokens of a sequence in order. Raises ValueError for a shape, dtype, stride or
    value that does not fit.
    """
    tensors = x, weight, bias, states, slots, seq_lens, cu_seqlens_q, run_inputs, runs
    launch, size = _launches.find(combination(tensors, gated), *tensors, gated=gated)
    out = x.new_empty(size)
    launch(*tensors, out)
    return out


@checked_as("short_conv")
def _bind(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,  # noqa: ARG001
    states: Tensor,
    slots: Tensor,
    seq_lens: Tensor,  # noqa: ARG001
    cu_seqlens_q: Tensor,  # noqa: ARG001
    run_inputs: Tensor | None,
    runs: Tensor | None,  # noqa: ARG001
    *,
    gated: bool,
) -> tuple[BoundLaunch, tuple[int, int]]:
    """Check the arguments. Return the launch, and the size of the output."""
    check_last_dim_contiguous("x", x)
    check_contiguous("states of a slot", states[:1])
    if run_inputs is not None:
        check_contiguous("run_inputs of a slot", run_inputs[:1])
    check_contiguous("weight", weight)
    check_launchable("x", x)
    width, size = weight.shape
    launch = BoundLaunch(
        _short_conv_kernel,
        (len(slots), triton.cdiv(size, _BLOCK)),
        stride_x=x.stride(0),
        stride_state=states.stride(0),
        stride_run=0 if run_inputs is None else run_inputs.stride(0),
        NUM_PLACES=1 if run_inputs is None else run_inputs.shape[1],
        GATED=gated,
        SIZE=size,
        WIDTH=width,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return launch, (len(x), size)


_launches = Launches(_bind)
