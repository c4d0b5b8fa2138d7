"""The order of rows by expert: one program for each expert reads which experts tokens have chosen."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...checked import checked_as
from ...checks import check_contiguous
from ...routing import ExpertRows
from ..launch import BoundLaunch, Launches, combination
from ..target import check_launchable

_BLOCK = 2048  # rows: 64 KB of 8192 tokens and 8 experts of each, which all programs find in the L2


@triton.jit(do_not_specialize=["num_rows"])
def _sort_by_expert_kernel(
    experts_ptr,  # i32[num_rows]
    adapters_ptr,  # i32[num_rows / NUM_CHOSEN], or None, as slots_ptr
    sources_ptr,  # i64[num_rows]
    places_ptr,  # i64[num_rows]
    offsets_ptr,  # i32[NUM_EXPERTS + 1]
    slots_ptr,  # i32[num_rows]
    num_rows,
    NUM_CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    # Rows of experts below this one come before its own. Nothing is counted by atomics.
    below = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_rows, BLOCK):
        rows = start + offs
        chosen = tl.load(experts_ptr + rows, mask=rows < num_rows, other=expert)
        below += (chosen < expert).to(tl.int32)
    next_place = tl.sum(below, axis=0)
    tl.store(offsets_ptr + expert, next_place)
    for start in range(0, num_rows, BLOCK):
        rows = start + offs
        chosen = tl.load(experts_ptr + rows, mask=rows < num_rows, other=-1)
        mask = chosen == expert
        places = next_place + tl.cumsum(mask.to(tl.int32), axis=0) - 1
        tl.store(places_ptr + rows, places.to(tl.int64), mask=mask)
        tl.store(sources_ptr + places, (rows // NUM_CHOSEN).to(tl.int64), mask=mask)
        if slots_ptr is not None:
            slots = tl.load(adapters_ptr + rows // NUM_CHOSEN, mask=mask, other=-1)
            num_experts = tl.num_programs(0) - 1  # the last program has the rows of no expert
            has_slot = (slots >= 0) & (expert < num_experts)
            tl.store(slots_ptr + places, tl.where(has_slot, slots * num_experts + expert, -1), mask=mask)
        next_place += tl.sum(mask.to(tl.int32), axis=0)


def sort_by_expert(
    experts: Tensor,  # i32[num_tokens, num_chosen]
    num_experts: int,
    adapters: Tensor | None = None,  # i32[num_tokens]
) -> ExpertRows:
    """Sort the pairs of a token and an expert by expert, and pairs with the same expert by token.

    The order stays on the device. Raises ValueError for a shape, dtype, stride or number that does not fit.
    """
    launch = _launches.find(combination((experts, adapters), num_experts), experts, num_experts, adapters)
    places = torch.empty(experts.shape, dtype=torch.int64, device=experts.device)
    sources = places.new_empty(experts.numel())
    offsets = experts.new_empty(num_experts + 1)
    slots = None if adapters is None else experts.new_empty(experts.numel())
    launch(experts, adapters, sources, places, offsets, slots)
    return ExpertRows(sources, places, offsets, slots)


@checked_as("sort_by_expert")
def _bind(experts: Tensor, num_experts: int, adapters: Tensor | None) -> BoundLaunch:  # noqa: ARG001
    """Check the arguments. Return the launch."""
    check_contiguous("experts", experts)
    check_launchable("experts", experts)
    return BoundLaunch(
        _sort_by_expert_kernel,
        (num_experts + 1,),  # the last one finds the end of all rows
        num_rows=experts.numel(),
        NUM_CHOSEN=experts.shape[1],
        BLOCK=_BLOCK,
        num_warps=4,
    )


_launches = Launches(_bind)
