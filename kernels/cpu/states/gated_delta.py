"""The gated delta rule over ragged sequences, one chain over the tokens of each."""

from torch import Tensor

from ...checked import checked
from ..formats import KINDS
from ..launch.tasks import Task, are_contiguous
from ..rows.row_kernels import has_regular_rows, in_torch
from ..target import LANES, padded

WIDE = 4  # vectors of a unit's columns

GATED_DELTA = Task(
    "states.gated_delta.gated_delta",
    ("qkv", "gates", "rates", "time_bias", "states", "slots", "seq_lens", "cu_seqlens_q", "out"),
    (
        "kind", "num_tokens", "num_key_heads", "num_heads", "key_dim", "value_dim", "num_parts",
        "qkv_stride", "gates_stride", "state_stride",
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
) -> Tensor:  # [num_tokens, num_heads, value_dim]
    """Apply the gated delta rule to the tokens of each sequence; see `reference.gated_delta`.

    A work unit is a part of the columns of one head's state, small enough for the L1 cache. Columns are
    independent, so threads can share a head. Prompts and decodes run the same code.
    """
    if not (has_regular_rows(qkv, gates) and are_contiguous(states[:1])):
        return by_torch(qkv, gates, rates, time_bias, states, slots, seq_lens, cu_seqlens_q)
    num_heads, key_dim, value_dim = states.shape[1:]
    num_key_heads = (qkv.shape[1] - num_heads * value_dim) // (2 * key_dim)
    out = qkv.new_empty(len(qkv), num_heads, value_dim)
    num_parts = -(-value_dim // (WIDE * LANES))
    GATED_DELTA.run(
        num_heads * num_parts,
        scratch_size=4 * (3 * padded(key_dim) + 2 * WIDE * LANES),
        qkv=qkv,
        gates=gates,
        rates=rates,
        time_bias=time_bias,
        states=states,
        slots=slots,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        out=out,
        kind=KINDS[qkv.dtype],
        num_tokens=len(qkv),
        num_key_heads=num_key_heads,
        num_heads=num_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        num_parts=num_parts,
        qkv_stride=qkv.stride(0) * qkv.itemsize,
        gates_stride=gates.stride(0) * gates.itemsize,
        state_stride=states.stride(0) * states.itemsize,
    )
    return out
