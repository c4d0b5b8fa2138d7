"""Repetition, frequency and presence penalties, in one pass over the rows that have one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...arguments import check_call
from ...checks import check_contiguous, check_last_dim_contiguous
from ..target import check_launchable

_CHUNK = 4096  # tokens of one program


@triton.jit(
    do_not_specialize_on_alignment=[  # views at any offset
        "rows_ptr",
        "slots_ptr",
        "repetition_ptr",
        "frequency_ptr",
        "presence_ptr",
    ]
)
def _penalties_kernel(
    logits_ptr,
    rows_ptr,
    slots_ptr,
    counts_ptr,
    seen_ptr,  # i8: Triton keeps bools as bytes
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    stride_row: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Penalise CHUNK tokens of one row. A chunk without a seen token is neither read nor written."""
    item = tl.program_id(0)
    slot = tl.load(slots_ptr + item).to(tl.int64)
    offs = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    mask = offs < SIZE
    # [CHUNK]
    seen = tl.load(seen_ptr + slot * SIZE + offs, mask=mask, other=0) != 0
    if tl.max(seen.to(tl.int32), axis=0) == 0:
        return
    count = tl.load(counts_ptr + slot * SIZE + offs, mask=mask, other=0)
    repetition = tl.load(repetition_ptr + item)
    frequency = tl.load(frequency_ptr + item)
    presence = tl.load(presence_ptr + item)
    logits_ptr += tl.load(rows_ptr + item).to(tl.int64) * stride_row
    logits = tl.load(logits_ptr + offs, mask=mask, other=0.0)
    # The whole tile is stored, so that threads write 16 bytes; tokens not seen keep their bits.
    repeated = tl.where(logits > 0, tl.math.div_rn(logits, repetition), logits * repetition)
    penalised = tl.where(seen, repeated, logits)
    taken = count.to(tl.float32) * frequency
    penalised = tl.where(count > 0, penalised - taken - presence, penalised)
    tl.store(logits_ptr + offs, penalised, mask=mask)


def apply_penalties(
    logits: Tensor,  # f32[num_rows, vocab_size], changed in place
    rows: Tensor,  # i64[n], the rows of logits to change
    slots: Tensor,  # i64[n], the slot of each row's history
    output_counts: Tensor,  # i32[num_slots, vocab_size], how often each token was generated
    seen: Tensor,  # bool[num_slots, vocab_size], the tokens of prompt and output
    repetition_penalty: Tensor,  # f32[n]
    frequency_penalty: Tensor,  # f32[n]
    presence_penalty: Tensor,  # f32[n]
) -> None:
    """Penalise the tokens that were seen before, in these rows; see `reference.apply_penalties`.

    Other rows, and tokens never seen, keep their bits. Every operation is rounded as in the reference, so
    that the result is bitwise equal on every device. No row may be given twice. Raises ValueError for a
    shape, dtype or stride that does not fit; in debug mode (see `checks`) also for rows and slots that do not
    exist or are given twice.
    """
    tensors = {
        "rows": rows,
        "slots": slots,
        "output_counts": output_counts,
        "seen": seen,
        "repetition_penalty": repetition_penalty,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
    }
    check_call("apply_penalties", {"logits": logits, **tensors})
    check_last_dim_contiguous("logits", logits)
    check_launchable("logits", logits)
    for name, tensor in tensors.items():
        check_contiguous(name, tensor)
    num_items = len(rows)
    size = logits.shape[1]
    if num_items == 0:
        return
    _penalties_kernel[(num_items, triton.cdiv(size, _CHUNK))](
        logits_ptr=logits,
        rows_ptr=rows,
        slots_ptr=slots,
        counts_ptr=output_counts,
        seen_ptr=seen.view(torch.int8),
        repetition_ptr=repetition_penalty,
        frequency_ptr=frequency_penalty,
        presence_ptr=presence_penalty,
        stride_row=logits.stride(0),
        SIZE=size,
        CHUNK=_CHUNK,
        num_warps=8,
        enable_fp_fusion=False,
    )
