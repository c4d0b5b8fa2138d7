"""The order of a grouped product's rows: a counting sort by expert."""

import torch
from torch import Tensor

from ... import reference
from ...arguments import checked
from ...routing import ExpertRows
from ..launch.tasks import Task, addresses
from ..simd.memory import get_int, get_long, set_int, set_long

# One unit: even of the longest prompt it takes a fraction of a millisecond.
SORT_BY_EXPERT = Task(("experts", "sources", "places", "offsets"), ("num_pairs", "num_chosen", "num_experts"))


@SORT_BY_EXPERT.each_unit
def _sort_by_expert(args, _unit, scratch):
    num_experts = args.num_experts
    for expert in range(num_experts + 1):
        set_long(scratch + 8 * expert, 0)
    for pair in range(args.num_pairs):
        at = scratch + 8 * (get_int(args.experts + 4 * pair) + 1)
        set_long(at, get_long(at) + 1)
    first = 0
    for expert in range(num_experts + 1):
        at = scratch + 8 * expert
        first += get_long(at)
        set_long(at, first)
        set_int(args.offsets + 4 * expert, first)
    for pair in range(args.num_pairs):
        at = scratch + 8 * get_int(args.experts + 4 * pair)
        place = get_long(at)
        set_long(at, place + 1)
        set_long(args.places + 8 * pair, place)
        set_long(args.sources + 8 * place, pair // args.num_chosen)


@checked
def sort_by_expert(experts: Tensor, num_experts: int) -> ExpertRows:  # i32[num_tokens, num_chosen]
    """Sort the pairs of a token and an expert by expert; see `reference.sort_by_expert`."""
    if not (experts.is_cpu and experts.is_contiguous()):
        return reference.sort_by_expert(experts, num_experts)
    num_pairs = experts.numel()
    sources = experts.new_empty(num_pairs, dtype=torch.int64)
    places = experts.new_empty(experts.shape, dtype=torch.int64)
    offsets = experts.new_empty(num_experts + 1)
    pointers = addresses(experts, sources, places, offsets)
    numbers = num_pairs, experts.shape[1], num_experts
    SORT_BY_EXPERT.run(1, *pointers, *numbers, scratch_size=8 * (num_experts + 1))
    return ExpertRows(sources, places, offsets)
