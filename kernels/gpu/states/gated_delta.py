"""The gated delta rule over ragged sequences, one chain over the tokens of each."""

import triton
import triton.language as tl
from torch import Tensor

from ...checked import checked_as
from ...checks import check_contiguous, check_last_dim_contiguous
from ..launch import BoundLaunch, Launches, combination
from ..rows.scale_by_sigmoid import sigmoid
from ..target import check_launchable

_NUMBERS = 4096  # of a state in a program: 32 registers of each thread
_EPS = tl.constexpr(1e-6)


@triton.jit
def _apply(
    state,
    row_ptr,
    gates_ptr,
    rate,
    time_bias,
    scale,
    key_head,
    head,
    offs_key,
    offs_value,
    mask_key,
    mask_value,
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Return the state behind one token, and the token's result."""
    query = tl.load(row_ptr + key_head * KEY_DIM + offs_key, mask=mask_key, other=0.0).to(tl.float32)
    row_ptr += NUM_KEY_HEADS * KEY_DIM
    key = tl.load(row_ptr + key_head * KEY_DIM + offs_key, mask=mask_key, other=0.0).to(tl.float32)
    row_ptr += NUM_KEY_HEADS * KEY_DIM
    value = tl.load(row_ptr + head * VALUE_DIM + offs_value, mask=mask_value, other=0.0).to(tl.float32)
    share = sigmoid(tl.load(gates_ptr).to(tl.float32))
    time = tl.load(gates_ptr + NUM_HEADS).to(tl.float32) + time_bias
    softplus = tl.maximum(time, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(time)))
    decay = tl.exp(rate * softplus)
    query = query * (tl.rsqrt(tl.sum(query * query, axis=0) + _EPS) * scale)
    key = key * tl.rsqrt(tl.sum(key * key, axis=0) + _EPS)
    state = state * decay
    change = (value - tl.sum(state * key[:, None], axis=0)) * share
    state = state + key[:, None] * change[None, :]
    return state, tl.sum(state * query[:, None], axis=0)


@triton.jit
def keep(source_ptr, place_ptr, offs, mask):
    """Copy some inputs of a token to its place among those of the run."""
    tl.store(place_ptr + offs, tl.load(source_ptr + offs, mask=mask), mask=mask)


@triton.jit
def _gated_delta_kernel(
    qkv_ptr,
    gates_ptr,
    rates_ptr,
    time_bias_ptr,
    states_ptr,
    slots_ptr,
    seq_lens_ptr,
    cu_seqlens_q_ptr,
    run_inputs_ptr,  # or None
    runs_ptr,
    out_ptr,
    scale,
    stride_qkv: tl.constexpr,
    stride_gates: tl.constexpr,
    stride_state,
    stride_run,
    NUM_PLACES: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(cu_seqlens_q_ptr + sequence)
    end = tl.load(cu_seqlens_q_ptr + sequence + 1)
    if start == end:
        return
    position = tl.load(seq_lens_ptr + sequence) - (end - start)
    # A new sequence reads no row of what its slot holds.
    num_kept = tl.where(position > 0, KEY_DIM, 0)
    offs_key = tl.arange(0, BLOCK_KEY)
    offs_value = tl.program_id(2) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    mask_key = offs_key < KEY_DIM
    mask_value = offs_value < VALUE_DIM
    mask = mask_key[:, None] & mask_value[None, :]
    mask_kept = (offs_key < num_kept)[:, None] & mask_value[None, :]
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    states_ptr += slot * stride_state + head * (KEY_DIM * VALUE_DIM)
    states_ptr += offs_key[:, None] * VALUE_DIM + offs_value[None, :]
    state = tl.load(states_ptr, mask=mask_kept, other=0.0)  # [BLOCK_KEY, BLOCK_VALUE]
    rate = tl.load(rates_ptr + head)
    time_bias = tl.load(time_bias_ptr + head)
    key_head = head // (NUM_HEADS // NUM_KEY_HEADS)
    first = start.to(tl.int64)
    qkv_ptr += first * stride_qkv
    gates_ptr += first * stride_gates + head
    out_ptr += (first * NUM_HEADS + head) * VALUE_DIM + offs_value
    QUERIES: tl.constexpr = NUM_KEY_HEADS * KEY_DIM
    COLUMNS: tl.constexpr = 2 * QUERIES + NUM_HEADS * VALUE_DIM
    PLACE: tl.constexpr = COLUMNS + 2 * NUM_HEADS
    num_stored = KEY_DIM  # rows of the state: none behind a run
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
                scale,
                key_head,
                head,
                offs_key,
                offs_value,
                mask_key,
                mask_value,
                NUM_HEADS,
                NUM_KEY_HEADS,
                KEY_DIM,
                VALUE_DIM,
            )
        if is_run != 0:
            tl.store(states_ptr, state, mask=mask)
            num_stored = 0
            # A head's values are this program's alone; what several read, the first of them keeps.
            is_first = tl.program_id(2) == 0
            for i in range(end - start):
                row = qkv_ptr + i * stride_qkv
                place = run_inputs_ptr + (position + i) % NUM_PLACES * PLACE
                keep(row, place, 2 * QUERIES + head * VALUE_DIM + offs_value, mask_value)
                if is_first:
                    gates = gates_ptr + i * stride_gates
                    place += COLUMNS + head
                    tl.store(place, tl.load(gates))
                    tl.store(place + NUM_HEADS, tl.load(gates + NUM_HEADS))
                    if head % (NUM_HEADS // NUM_KEY_HEADS) == 0:
                        place -= COLUMNS + head
                        keep(row, place, key_head * KEY_DIM + offs_key, mask_key)
                        keep(row, place, QUERIES + key_head * KEY_DIM + offs_key, mask_key)
    for _ in range(start, end):
        state, out = _apply(
            state,
            qkv_ptr,
            gates_ptr,
            rate,
            time_bias,
            scale,
            key_head,
            head,
            offs_key,
            offs_value,
            mask_key,
            mask_value,
            NUM_HEADS,
            NUM_KEY_HEADS,
            KEY_DIM,
            VALUE_DIM,
        )
        tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), mask=mask_value)
        qkv_ptr += stride_qkv
        gates_ptr += stride_gates
        out_ptr += NUM_HEADS * VALUE_DIM
    tl.store(states_ptr, state, mask=(offs_key < num_stored)[:, None] & mask_value[None, :])


def gated_delta(
    qkv: Tensor,  # [num_tokens, 2 * num_key_heads * key_dim + num_heads * value_dim]
    gates: Tensor,  # [num_tokens, 2 * num_heads]: of what is written and of the decay, see below
    rates: Tensor,  # f32[num_heads], below 0
    time_bias: Tensor,  # f32[num_heads]
    states: Tensor,  # f32[num_slots, num_heads, key_dim, value_dim], written in place
    slots: Tensor,  # i32[num_seqs], each another
    seq_lens: Tensor,  # i32[num_seqs], computed and new tokens
    cu_seqlens_q: Tensor,  # i32[num_seqs + 1], exclusive prefix sum of the new tokens
    run_inputs: Tensor | None = None,  # like qkv and gates side by side: [num_slots, num_places, columns]
    runs: Tensor | None = None,  # i32[num_seqs, 2]: see `reference.short_conv`
) -> Tensor:  # [num_tokens, num_heads, value_dim]
    """Apply the gated delta rule to the tokens of each sequence; see `reference.gated_delta`.

    A program holds some columns of a head's state in registers while it processes the tokens of a sequence.
    Raises ValueError for a shape, dtype, stride or value that does not fit.
    """
    tensors = qkv, gates, rates, time_bias, states, slots, seq_lens, cu_seqlens_q, run_inputs, runs
    launch, size = _launches.find(combination(tensors), *tensors)
    out = qkv.new_empty(size)
    launch(*tensors, out)
    return out


@checked_as("gated_delta")
def _bind(
    qkv: Tensor,
    gates: Tensor,
    rates: Tensor,  # noqa: ARG001
    time_bias: Tensor,  # noqa: ARG001
    states: Tensor,
    slots: Tensor,
    seq_lens: Tensor,  # noqa: ARG001
    cu_seqlens_q: Tensor,  # noqa: ARG001
    run_inputs: Tensor | None,
    runs: Tensor | None,  # noqa: ARG001
) -> tuple[BoundLaunch, tuple[int, int, int]]:
    """Check the arguments. Return the launch, and the size of the output."""
    check_last_dim_contiguous("qkv", qkv)
    check_last_dim_contiguous("gates", gates)
    check_contiguous("states of a slot", states[:1])
    if run_inputs is not None:
        check_contiguous("run_inputs of a slot", run_inputs[:1])
    check_launchable("qkv", qkv)
    num_heads, key_dim, value_dim = states.shape[1:]
    block_key = triton.next_power_of_2(key_dim)
    block_value = min(triton.next_power_of_2(value_dim), max(1, _NUMBERS // block_key))
    launch = BoundLaunch(
        _gated_delta_kernel,
        (len(slots), num_heads, triton.cdiv(value_dim, block_value)),
        scale=key_dim**-0.5,
        stride_qkv=qkv.stride(0),
        stride_gates=gates.stride(0),
        stride_state=states.stride(0),
        stride_run=0 if run_inputs is None else run_inputs.stride(0),
        NUM_PLACES=1 if run_inputs is None else run_inputs.shape[1],
        NUM_HEADS=num_heads,
        NUM_KEY_HEADS=(qkv.shape[1] - num_heads * value_dim) // (2 * key_dim),
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_KEY=block_key,
        BLOCK_VALUE=block_value,
        num_warps=4,
    )
    return launch, (len(qkv), num_heads, value_dim)


_launches = Launches(_bind)
