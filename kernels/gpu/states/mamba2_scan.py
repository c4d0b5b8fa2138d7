"""The state space of Mamba-2 over ragged sequences, one chain over the tokens of each."""

import triton
import triton.language as tl
from torch import Tensor

from ...checked import checked_as
from ...checks import check_contiguous, check_last_dim_contiguous
from ..launch import BoundLaunch, Launches, combination
from ..target import check_launchable
from .gated_delta import keep

_NUMBERS = 4096  # of a state in a program: 32 registers of each thread


@triton.jit
def _softplus(x):
    """Return log(1 + e^x), exact where e^x is small (Kahan's log1p)."""
    decayed = tl.exp(-tl.abs(x))
    above = 1.0 + decayed
    # With above == 1 the quotient would be 0 / 0.
    exact = tl.log(above) * (decayed / tl.where(above == 1.0, 1.0, above - 1.0))
    return tl.maximum(x, 0.0) + tl.where(above == 1.0, decayed, exact)


@triton.jit
def _apply(
    state,
    row_ptr,
    step_ptr,
    rate,
    time_bias,
    skip,
    least,
    most,
    group,
    head,
    offs_state,
    offs_head,
    mask_state,
    mask_head,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    STATE_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Return the state behind one token, and the token's result."""
    x = tl.load(row_ptr + head * HEAD_DIM + offs_head, mask=mask_head, other=0.0).to(tl.float32)
    row_ptr += NUM_HEADS * HEAD_DIM + group * STATE_DIM + offs_state
    key = tl.load(row_ptr, mask=mask_state, other=0.0).to(tl.float32)
    query = tl.load(row_ptr + NUM_GROUPS * STATE_DIM, mask=mask_state, other=0.0).to(tl.float32)
    step = _softplus(tl.load(step_ptr).to(tl.float32) + time_bias)
    # By comparisons, which leave NaN as it is.
    step = tl.where(step < least, least, tl.where(step > most, most, step))
    state = state * tl.exp(rate * step) + key[:, None] * (step * x)[None, :]
    return state, tl.sum(state * query[:, None], axis=0) + skip * x


@triton.jit
def _mamba2_scan_kernel(
    x_ptr,
    time_steps_ptr,
    rates_ptr,
    time_bias_ptr,
    skip_ptr,
    states_ptr,
    slots_ptr,
    seq_lens_ptr,
    cu_seqlens_q_ptr,
    run_inputs_ptr,  # or None
    runs_ptr,
    out_ptr,
    least,
    most,
    stride_x: tl.constexpr,
    stride_steps: tl.constexpr,
    stride_state,
    stride_run,
    NUM_PLACES: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    STATE_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_STATE: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
):
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(cu_seqlens_q_ptr + sequence)
    end = tl.load(cu_seqlens_q_ptr + sequence + 1)
    if start == end:
        return
    position = tl.load(seq_lens_ptr + sequence) - (end - start)
    # A new sequence reads no row of what its slot holds.
    num_kept = tl.where(position > 0, STATE_DIM, 0)
    offs_state = tl.arange(0, BLOCK_STATE)
    offs_head = tl.program_id(2) * BLOCK_HEAD + tl.arange(0, BLOCK_HEAD)
    mask_state = offs_state < STATE_DIM
    mask_head = offs_head < HEAD_DIM
    mask = mask_state[:, None] & mask_head[None, :]
    mask_kept = (offs_state < num_kept)[:, None] & mask_head[None, :]
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    states_ptr += slot * stride_state + head * (STATE_DIM * HEAD_DIM)
    states_ptr += offs_state[:, None] * HEAD_DIM + offs_head[None, :]
    state = tl.load(states_ptr, mask=mask_kept, other=0.0)  # [BLOCK_STATE, BLOCK_HEAD]
    rate = tl.load(rates_ptr + head)
    time_bias = tl.load(time_bias_ptr + head)
    skip = tl.load(skip_ptr + head)
    group = head // (NUM_HEADS // NUM_GROUPS)
    first = start.to(tl.int64)
    x_ptr += first * stride_x
    time_steps_ptr += first * stride_steps + head
    out_ptr += (first * NUM_HEADS + head) * HEAD_DIM + offs_head
    VALUES: tl.constexpr = NUM_HEADS * HEAD_DIM
    COLUMNS: tl.constexpr = VALUES + 2 * NUM_GROUPS * STATE_DIM
    PLACE: tl.constexpr = COLUMNS + NUM_HEADS
    num_stored = STATE_DIM  # rows of the state: none behind a run
    if run_inputs_ptr is not None:
        run_inputs_ptr += slot * stride_run
        is_run = tl.load(runs_ptr + 2 * sequence + 1)
        # First the tokens of the last run that were right.
        for at in range(position - tl.load(runs_ptr + 2 * sequence), position):
            row = run_inputs_ptr + at % NUM_PLACES * PLACE
            state, _ = _apply(
                state,
                row,
                row + COLUMNS + head,
                rate,
                time_bias,
                skip,
                least,
                most,
                group,
                head,
                offs_state,
                offs_head,
                mask_state,
                mask_head,
                NUM_HEADS,
                NUM_GROUPS,
                STATE_DIM,
                HEAD_DIM,
            )
        if is_run != 0:
            tl.store(states_ptr, state, mask=mask)
            num_stored = 0
            # A head's x is this program's alone; what several read, the first of them keeps.
            is_first = tl.program_id(2) == 0
            for i in range(end - start):
                row = x_ptr + i * stride_x
                place = run_inputs_ptr + (position + i) % NUM_PLACES * PLACE
                keep(row, place, head * HEAD_DIM + offs_head, mask_head)
                if is_first:
                    tl.store(place + COLUMNS + head, tl.load(time_steps_ptr + i * stride_steps))
                    if head % (NUM_HEADS // NUM_GROUPS) == 0:
                        offs_group = VALUES + group * STATE_DIM + offs_state
                        keep(row, place, offs_group, mask_state)
                        keep(row, place, NUM_GROUPS * STATE_DIM + offs_group, mask_state)
    for _ in range(start, end):
        state, out = _apply(
            state,
            x_ptr,
            time_steps_ptr,
            rate,
            time_bias,
            skip,
            least,
            most,
            group,
            head,
            offs_state,
            offs_head,
            mask_state,
            mask_head,
            NUM_HEADS,
            NUM_GROUPS,
            STATE_DIM,
            HEAD_DIM,
        )
        tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), mask=mask_head)
        x_ptr += stride_x
        time_steps_ptr += stride_steps
        out_ptr += NUM_HEADS * HEAD_DIM
    tl.store(states_ptr, state, mask=(offs_state < num_stored)[:, None] & mask_head[None, :])


def mamba2_scan(
    x: Tensor,  # [num_tokens, num_heads * head_dim + 2 * num_groups * state_dim]: x, B and C
    time_steps: Tensor,  # [num_tokens, num_heads]
    rates: Tensor,  # f32[num_heads], below 0
    time_bias: Tensor,  # f32[num_heads]
    skip: Tensor,  # f32[num_heads]
    states: Tensor,  # f32[num_slots, num_heads, state_dim, head_dim], written in place
    slots: Tensor,  # i32[num_seqs], each another
    seq_lens: Tensor,  # i32[num_seqs], computed and new tokens
    cu_seqlens_q: Tensor,  # i32[num_seqs + 1], exclusive prefix sum of the new tokens
    run_inputs: Tensor | None = None,  # like x and time_steps side by side: [num_slots, num_places, columns]
    runs: Tensor | None = None,  # i32[num_seqs, 2]: see `reference.short_conv`
    *,
    limits: tuple[float, float],
) -> Tensor:  # [num_tokens, num_heads, head_dim]
    """Apply the state space of Mamba-2 to the tokens of each sequence; see `reference.mamba2_scan`.

    A program holds some columns of a head's state in registers and loops over the tokens of a sequence.
    Raises ValueError for a shape, dtype, stride or value that does not fit.
    """
    given = x, time_steps, rates, time_bias, skip, states, slots, seq_lens, cu_seqlens_q
    tensors = *given, run_inputs, runs
    launch, size = _launches.find(combination(tensors, limits), *tensors, limits)
    out = x.new_empty(size)
    launch(*tensors, out)
    return out


@checked_as("mamba2_scan")
def _bind(
    x: Tensor,
    time_steps: Tensor,
    rates: Tensor,  # noqa: ARG001
    time_bias: Tensor,  # noqa: ARG001
    skip: Tensor,  # noqa: ARG001
    states: Tensor,
    slots: Tensor,
    seq_lens: Tensor,  # noqa: ARG001
    cu_seqlens_q: Tensor,  # noqa: ARG001
    run_inputs: Tensor | None,
    runs: Tensor | None,  # noqa: ARG001
    limits: tuple[float, float],
) -> tuple[BoundLaunch, tuple[int, int, int]]:
    """Check the arguments. Return the launch, and the size of the output."""
    check_last_dim_contiguous("x", x)
    check_last_dim_contiguous("time_steps", time_steps)
    check_contiguous("states of a slot", states[:1])
    if run_inputs is not None:
        check_contiguous("run_inputs of a slot", run_inputs[:1])
    check_launchable("x", x)
    num_heads, state_dim, head_dim = states.shape[1:]
    block_state = triton.next_power_of_2(state_dim)
    block_head = min(triton.next_power_of_2(head_dim), max(1, _NUMBERS // block_state))
    least, most = limits
    launch = BoundLaunch(
        _mamba2_scan_kernel,
        (len(slots), num_heads, triton.cdiv(head_dim, block_head)),
        least=float(least),
        most=float(most),
        stride_x=x.stride(0),
        stride_steps=time_steps.stride(0),
        stride_state=states.stride(0),
        stride_run=0 if run_inputs is None else run_inputs.stride(0),
        NUM_PLACES=1 if run_inputs is None else run_inputs.shape[1],
        NUM_HEADS=num_heads,
        NUM_GROUPS=(x.shape[1] - num_heads * head_dim) // (2 * state_dim),
        STATE_DIM=state_dim,
        HEAD_DIM=head_dim,
        BLOCK_STATE=block_state,
        BLOCK_HEAD=block_head,
        num_warps=4,
    )
    return launch, (len(x), num_heads, head_dim)


_launches = Launches(_bind)
