"""Routing: which experts each token has, and with what weights."""

from typing import get_args

import torch
from torch import Tensor

from ...checked import checked
from ...routing import RoutingOptions, Score
from ..launch.tasks import Task
from ..target import padded
from .row_kernel import has_regular_rows, in_torch

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


by_torch = in_torch("route")


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
        return by_torch(logits, options, correction_bias, expert_scales, count)
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
