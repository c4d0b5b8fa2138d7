"""Experts: which ones each token has, the order of a grouped product's rows, and the sum of its products."""

from typing import get_args

import torch
from torch import Tensor

from ...checked import checked
from ...routing import ExpertRows, RoutingOptions, Score
from ..formats import KINDS
from ..launch.tasks import Task
from ..target import padded
from .row_kernels import has_regular_rows, in_torch, units_of_rows

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = range(3)
_SCORES = dict(zip(get_args(Score), (SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN), strict=True))

ROUTE = Task(
    "rows.route.route",
    ("logits", "bias", "expert_scales", "experts", "weights"),
    (
        "num_experts", "stride", "num_chosen", "score", "by_logits", "num_groups", "num_kept_groups",
        "by_best_two", "renormalise",
    ),
    ("epsilon", "scale"),
)  # fmt: skip


route_by_torch = in_torch("route")


@checked
def route(
    logits: Tensor,  # f32[num_tokens, num_experts]
    options: RoutingOptions,
    correction_bias: Tensor | None = None,  # f32[num_experts]
    expert_scales: Tensor | None = None,  # f32[num_experts]
    count: Tensor | None = None,  # i32[1]
) -> tuple[Tensor, Tensor]:  # i32 and f32 [num_tokens, num_chosen]
    """Choose the experts of each token and their weights; see `reference.route`."""
    if not has_regular_rows(logits) or count is not None:
        return route_by_torch(logits, options, correction_bias, expert_scales, count)
    num_tokens, num_experts = logits.shape
    experts = logits.new_empty(num_tokens, options.num_chosen, dtype=torch.int32)
    weights = logits.new_empty(num_tokens, options.num_chosen)
    ROUTE.run(
        num_tokens,
        logits=logits,
        bias=correction_bias,
        expert_scales=expert_scales,
        experts=experts,
        weights=weights,
        num_experts=num_experts,
        stride=logits.stride(0) * 4,
        num_chosen=options.num_chosen,
        score=_SCORES[options.score],
        by_logits=options.orders_by_logits and correction_bias is None,
        num_groups=options.num_groups,
        num_kept_groups=options.num_kept_groups,
        by_best_two=options.group_score == "best_two",
        renormalise=options.renormalise,
        epsilon=options.epsilon,
        scale=options.scale,
        # Scores, what is ranked, and keys of experts and of groups.
        scratch_size=(4 + 4 + 8 + 8) * padded(num_experts),
    )
    return experts, weights


# One unit: even of the longest prompt it takes a fraction of a millisecond.
SORT_BY_EXPERT = Task(
    "rows.sort_by_expert.sort_by_expert",
    ("experts", "adapters", "sources", "places", "offsets", "slots"),
    ("num_pairs", "num_chosen", "num_experts"),
)


sort_by_expert_by_torch = in_torch("sort_by_expert")


@checked
def sort_by_expert(
    experts: Tensor,  # i32[num_tokens, num_chosen]
    num_experts: int,
    adapters: Tensor | None = None,  # i32[num_tokens]
) -> ExpertRows:
    """Sort the pairs of a token and an expert by expert; see `reference.sort_by_expert`."""
    if not (experts.is_cpu and experts.is_contiguous()):
        return sort_by_expert_by_torch(experts, num_experts, adapters)
    num_pairs = experts.numel()
    sources = experts.new_empty(num_pairs, dtype=torch.int64)
    places = experts.new_empty(experts.shape, dtype=torch.int64)
    offsets = experts.new_empty(num_experts + 1)
    slots = None if adapters is None else experts.new_empty(num_pairs)
    SORT_BY_EXPERT.run(
        1,
        experts=experts,
        adapters=adapters,
        sources=sources,
        places=places,
        offsets=offsets,
        slots=slots,
        num_pairs=num_pairs,
        num_chosen=experts.shape[1],
        num_experts=num_experts,
        scratch_size=8 * (num_experts + 1),
    )
    return ExpertRows(sources, places, offsets, slots)


SUM_EXPERTS = Task(
    "rows.sum_experts.sum_experts",
    ("x", "places", "weights", "shared", "shared_gate", "out"),
    ("kind", "num_rows", "size", "num_chosen", "x_stride", "shared_stride", "rows_per_unit"),
)


sum_experts_by_torch = in_torch("sum_experts")


@checked
def sum_experts(
    x: Tensor,  # [num_rows, size], sorted by expert
    places: Tensor,  # i64[num_tokens, num_chosen]
    weights: Tensor,  # f32[num_tokens, num_chosen]
    shared: Tensor | None = None,  # [num_tokens, size]
    shared_gate: Tensor | None = None,  # f32[num_tokens, 1]
) -> Tensor:  # [num_tokens, size]
    """Return for each token the weighted sum of its experts' outputs; see `reference.sum_experts`."""
    rows = (x,) if shared is None else (x, shared)
    others = [y for y in (places, weights, shared_gate) if y is not None]
    if not (has_regular_rows(*rows) and all(y.is_contiguous() for y in others)):
        return sum_experts_by_torch(x, places, weights, shared, shared_gate)
    num_tokens, num_chosen = places.shape
    size = x.shape[1]
    out = x.new_empty(num_tokens, size)
    num_units, per_unit = units_of_rows(num_tokens, (num_chosen + 1) * size)
    SUM_EXPERTS.run(
        num_units,
        x=x,
        places=places,
        weights=weights,
        shared=shared,
        shared_gate=shared_gate,
        out=out,
        kind=KINDS[x.dtype],
        num_rows=num_tokens,
        size=size,
        num_chosen=num_chosen,
        x_stride=x.stride(0) * x.itemsize,
        shared_stride=0 if shared is None else shared.stride(0) * x.itemsize,
        rows_per_unit=per_unit,
    )
    return out
