"""The order of a grouped product's rows: a counting sort by expert."""

import torch
from torch import Tensor

from ...checked import checked
from ...routing import ExpertRows
from ..launch.tasks import Task
from .row_kernel import in_torch

# One unit: even of the longest prompt it takes a fraction of a millisecond.
SORT_BY_EXPERT = Task(
    "rows.sort_by_expert.sort_by_expert",
    ("experts", "sources", "places", "offsets"),
    ("num_pairs", "num_chosen", "num_experts"),
)


by_torch = in_torch("sort_by_expert")


@checked
def sort_by_expert(experts: Tensor, num_experts: int) -> ExpertRows:  # i32[num_tokens, num_chosen]
    """Sort the pairs of a token and an expert by expert; see `reference.sort_by_expert`."""
    if not (experts.is_cpu and experts.is_contiguous()):
        return by_torch(experts, num_experts)
    num_pairs = experts.numel()
    sources = experts.new_empty(num_pairs, dtype=torch.int64)
    places = experts.new_empty(experts.shape, dtype=torch.int64)
    offsets = experts.new_empty(num_experts + 1)
    SORT_BY_EXPERT.run(
        1,
        experts=experts,
        sources=sources,
        places=places,
        offsets=offsets,
        num_pairs=num_pairs,
        num_chosen=experts.shape[1],
        num_experts=num_experts,
        scratch_size=8 * (num_experts + 1),
    )
    return ExpertRows(sources, places, offsets)
