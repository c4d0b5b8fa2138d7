"""The gated delta rule over ragged sequences, one chain over the tokens of each."""

from torch import Tensor

from ...checked import checked
from ..formats import KINDS
from ..launch.tasks import Task, are_contiguous
from ..rows.row_kernels import has_regular_rows, in_torch
from ..target import LANES, padded
from .short_conv import has_regular_places

WIDE = 4  # vectors of a unit's columns

GATED_DELTA = Task(
    "states.gated_delta.gated_delta",
    (
        "qkv", "gates", "rates", "time_bias", "states", "slots", "seq_lens", "cu_seqlens_q", "run_inputs",
        "runs", "out",
    ),
    (
        "kind", "num_tokens", "num_key_heads", "num_heads", "key_dim", "value_dim", "num_parts",
        "num_places", "qkv_stride", "gates_stride", "state_stride", "run_stride",
    ),
)  # fmt: skip


by_torch = in_torch("gated_delta")


@checked
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

    A work unit is a part of the columns of one head's state, small enough for the L1 cache. Columns are
    independent, so threads can share a head. Prompts and decodes run the same code.
    """
    sequences = slots, seq_lens, cu_seqlens_q, run_inputs, runs
    if not (has_regular_rows(qkv, gates) and are_contiguous(states[:1]) and has_regular_places(run_inputs)):
        return by_torch(qkv, gates, rates, time_bias, states, *sequences)
    num_heads, key_dim, value_dim = states.shape[1:]
    num_key_heads = (qkv.shape[1] - num_heads * value_dim) // (2 * key_dim)
    out = qkv.new_empty(len(qkv), num_heads, value_dim)
    num_parts = -(-value_dim // (WIDE * LANES))
    # The rows of a unit's state, which a run changes in a copy.
    num_copied = 0 if runs is None else key_dim
    GATED_DELTA.run(
        num_heads * num_parts,
        scratch_size=4 * (3 * padded(key_dim) + (2 + num_copied) * WIDE * LANES),
        qkv=qkv,
        gates=gates,
        rates=rates,
        time_bias=time_bias,
        states=states,
        slots=slots,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        run_inputs=run_inputs,
        runs=runs,
        out=out,
        kind=KINDS[qkv.dtype],
        num_tokens=len(qkv),
        num_key_heads=num_key_heads,
        num_heads=num_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        num_parts=num_parts,
        num_places=1 if run_inputs is None else run_inputs.shape[1],
        qkv_stride=qkv.stride(0) * qkv.itemsize,
        gates_stride=gates.stride(0) * gates.itemsize,
        state_stride=states.stride(0) * states.itemsize,
        run_stride=0 if run_inputs is None else run_inputs.stride(0) * run_inputs.itemsize,
    )
    return out
