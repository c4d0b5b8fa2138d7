"""The choice of experts: one program for each token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...checked import checked_as
from ...checks import check_last_dim_contiguous
from ...routing import RoutingOptions
from ..launch import BoundLaunch, Launches, combination
from ..rows.activations import sigmoid
from ..sampling.filter_row import ordered, unordered
from ..target import check_launchable

_PER_WARP = 512  # experts: 16 for each thread, whose registers hold a few numbers of each
_CHOSEN = tl.constexpr(-(2**31))  # below the key of every number
_NAN = tl.constexpr(2**31 - 1)  # above it


@triton.jit
def _key(x):
    """Map floats to i32 in the same order: NaN is above all, and -0 equals 0."""
    return tl.where(x == x, ordered(x + 0.0), _NAN)


@triton.jit
def _without_highest(keys, places, axis: tl.constexpr):
    """Return the keys with _CHOSEN for the highest one, the first of those that are equal, along an axis."""
    highest = tl.max(keys, axis=axis, keep_dims=True)
    first = tl.min(tl.where(keys == highest, places, keys.shape[axis]), axis=axis, keep_dims=True)
    return tl.where(places == first, _CHOSEN, keys)


@triton.jit
def _highest(keys, NUM: tl.constexpr, SIZE: tl.constexpr):
    """Return a mask of the NUM highest of SIZE keys, the first ones of those that are equal."""
    left = keys
    for _ in range(NUM):
        left = _without_highest(left, tl.arange(0, SIZE), 0)
    return left != keys


@triton.jit
def _of_kept_groups(
    keys,  # [BLOCK_G, BLOCK_S]
    NUM_KEPT: tl.constexpr,
    BEST_TWO: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Return the keys with _CHOSEN outside of the groups of the highest scores."""
    score = tl.max(keys, axis=1)
    if BEST_TWO:
        others = _without_highest(keys, tl.arange(0, BLOCK_S)[None, :], 1)
        sum_of_two = _key(unordered(score) + unordered(tl.max(others, axis=1)))
        score = tl.where(score == _CHOSEN, _CHOSEN, sum_of_two)  # a group that pads the others stays last
    return tl.where(_highest(score, NUM_KEPT, BLOCK_G)[:, None], keys, _CHOSEN)


@triton.jit
def _softmax(logits, mask):
    """Return the softmax over those of a mask, 0 elsewhere; NaN if one of them is."""
    logits = tl.where(mask, logits, float("-inf"))
    highest = tl.max(tl.where(logits == logits, logits, float("-inf")), axis=0)
    shares = tl.exp(logits - highest)
    return shares / tl.sum(shares, axis=0)


@triton.jit(do_not_specialize_on_alignment=["count_ptr"])
def _route_kernel(
    logits_ptr,  # f32[num_tokens, NUM_GROUPS * GROUP]
    bias_ptr,  # f32[NUM_GROUPS * GROUP], or None
    scales_ptr,  # f32[NUM_GROUPS * GROUP], or None
    count_ptr,  # i32[1], or None: all tokens have experts
    experts_ptr,  # i32[num_tokens, NUM_CHOSEN]
    weights_ptr,  # f32[num_tokens, NUM_CHOSEN]
    epsilon,
    scale,
    stride_logits: tl.constexpr,
    SCORE: tl.constexpr,
    BY_LOGITS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    RENORMALISE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    BEST_TWO: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    # [BLOCK_G * BLOCK_S]
    place = tl.arange(0, BLOCK_G * BLOCK_S)
    expert = place // BLOCK_S * GROUP + place % BLOCK_S
    mask = (place // BLOCK_S < NUM_GROUPS) & (place % BLOCK_S < GROUP)
    logits = tl.load(logits_ptr + token * stride_logits + expert, mask=mask, other=float("-inf"))
    scores = sigmoid(logits) if SCORE == "sigmoid" else _softmax(logits, mask)
    ranked = logits if BY_LOGITS else scores
    if bias_ptr is not None:
        ranked += tl.load(bias_ptr + expert, mask=mask, other=0.0)
    keys = tl.where(mask, _key(ranked), _CHOSEN)
    if NUM_KEPT < NUM_GROUPS:
        by_group = tl.reshape(keys, [BLOCK_G, BLOCK_S])
        keys = _of_kept_groups(by_group, NUM_KEPT, BEST_TWO, BLOCK_G, BLOCK_S).reshape(BLOCK_G * BLOCK_S)
    chosen = _highest(keys, NUM_CHOSEN, BLOCK_G * BLOCK_S)
    weights = _softmax(logits, chosen) if SCORE == "softmax_of_chosen" else tl.where(chosen, scores, 0.0)
    if RENORMALISE:
        weights /= tl.sum(weights, axis=0) + epsilon
    weights *= scale
    if scales_ptr is not None:
        weights *= tl.load(scales_ptr + expert, mask=chosen, other=0.0)
    if count_ptr is not None:
        expert = tl.where(token < tl.load(count_ptr), expert, NUM_GROUPS * GROUP)
    offs = token * NUM_CHOSEN + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(experts_ptr + offs, expert, mask=chosen)
    tl.store(weights_ptr + offs, weights, mask=chosen)


def route(
    logits: Tensor,  # f32[num_tokens, num_experts]
    options: RoutingOptions,
    correction_bias: Tensor | None = None,  # f32[num_experts], added to scores for choosing only
    expert_scales: Tensor | None = None,  # f32[num_experts], multiply the weights of each expert
    count: Tensor | None = None,  # i32[1], the tokens that have experts, which come first; None: all
) -> tuple[Tensor, Tensor]:  # i32 and f32 [num_tokens, num_chosen]
    """Choose the experts of each token, in ascending order, and their weights.

    The experts with the highest scores are chosen; at equal scores, the lower index. NaN counts as the
    highest score, so that a NaN logit gives a chosen expert a NaN weight. Tokens from `count` on are padding;
    they get the number num_experts, so that `sort_by_expert` puts their rows last and products skip them.
    Raises ValueError for a shape, dtype, stride or option that does not fit.
    """
    key = combination((logits, correction_bias, expert_scales, count), options)
    launch = _launches.find(key, logits, options, correction_bias, expert_scales, count)
    weights = logits.new_empty(len(logits), options.num_chosen)
    experts = torch.empty_like(weights, dtype=torch.int32)
    launch(logits, correction_bias, expert_scales, count, experts, weights)
    return experts, weights


@checked_as("route")
def _bind(
    logits: Tensor,
    options: RoutingOptions,
    correction_bias: Tensor | None,
    expert_scales: Tensor | None,  # noqa: ARG001  (its check is that of the operation)
    count: Tensor | None,  # noqa: ARG001
) -> BoundLaunch:
    """Check the arguments. Return the launch."""
    check_last_dim_contiguous("logits", logits)
    check_launchable("logits", logits)
    num_tokens, num_experts = logits.shape
    group = num_experts // options.num_groups
    block = triton.next_power_of_2(options.num_groups), triton.next_power_of_2(group)
    return BoundLaunch(
        _route_kernel,
        (num_tokens,),
        epsilon=float(options.epsilon),  # an int would be compiled for
        scale=float(options.scale),
        stride_logits=logits.stride(0),
        SCORE=options.score,
        BY_LOGITS=options.orders_by_logits and correction_bias is None,
        NUM_CHOSEN=options.num_chosen,
        RENORMALISE=options.renormalise,
        NUM_GROUPS=options.num_groups,
        NUM_KEPT=options.num_kept_groups,
        BEST_TWO=options.group_score == "best_two",
        GROUP=group,
        BLOCK_G=block[0],
        BLOCK_S=block[1],
        num_warps=min(8, max(1, block[0] * block[1] // _PER_WARP)),
    )


_launches = Launches(_bind)
