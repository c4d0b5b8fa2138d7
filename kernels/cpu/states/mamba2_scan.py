"""The state space of Mamba-2 over ragged sequences, one chain over the tokens of each."""

from torch import Tensor

from ...checked import checked
from ..formats import KINDS
from ..launch.tasks import Task, are_contiguous
from ..rows.row_kernels import has_regular_rows, in_torch
from ..target import LANES, padded
from .gated_delta import WIDE
from .short_conv import has_regular_places

MAMBA2_SCAN = Task(
    "states.mamba2_scan.mamba2_scan",
    (
        "x", "time_steps", "rates", "time_bias", "skip", "states", "slots", "seq_lens", "cu_seqlens_q",
        "run_inputs", "runs", "out",
    ),
    (
        "kind", "num_tokens", "num_groups", "num_heads", "state_dim", "head_dim", "num_parts",
        "num_places", "x_stride", "steps_stride", "state_stride", "run_stride",
    ),
    ("least", "most"),
)  # fmt: skip


by_torch = in_torch("mamba2_scan")


@checked
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

    A unit of work is a part of the columns of one head's state. Columns are independent, so several threads
    can share a head. Prompts and decodes run the same code.
    """
    sequences = slots, seq_lens, cu_seqlens_q, run_inputs, runs
    regular = has_regular_rows(x, time_steps) and are_contiguous(states[:1])
    if not (regular and has_regular_places(run_inputs)):
        return by_torch(x, time_steps, rates, time_bias, skip, states, *sequences, limits=limits)
    num_heads, state_dim, head_dim = states.shape[1:]
    out = x.new_empty(len(x), num_heads, head_dim)
    num_parts = -(-head_dim // (WIDE * LANES))
    least, most = limits
    # The rows of a unit's state, which a run changes in a copy.
    num_copied = 0 if runs is None else state_dim
    MAMBA2_SCAN.run(
        num_heads * num_parts,
        scratch_size=4 * (2 * padded(state_dim) + (1 + num_copied) * WIDE * LANES),
        x=x,
        time_steps=time_steps,
        rates=rates,
        time_bias=time_bias,
        skip=skip,
        states=states,
        slots=slots,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        run_inputs=run_inputs,
        runs=runs,
        out=out,
        kind=KINDS[x.dtype],
        num_tokens=len(x),
        num_groups=(x.shape[1] - num_heads * head_dim) // (2 * state_dim),
        num_heads=num_heads,
        state_dim=state_dim,
        head_dim=head_dim,
        num_parts=num_parts,
        num_places=1 if run_inputs is None else run_inputs.shape[1],
        x_stride=x.stride(0) * x.itemsize,
        steps_stride=time_steps.stride(0) * time_steps.itemsize,
        state_stride=states.stride(0) * states.itemsize,
        run_stride=0 if run_inputs is None else run_inputs.stride(0) * run_inputs.itemsize,
        least=float(least),
        most=float(most),
    )
    return out
