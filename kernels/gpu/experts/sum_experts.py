"""The sum of what a token's experts have computed, in an order that its own experts decide alone."""

import triton
import triton.language as tl
from torch import Tensor

from ...checked import checked_as
from ...checks import check_contiguous, check_last_dim_contiguous
from ..launch import BoundLaunch, Launches, combination
from ..rows.activations import sigmoid
from ..target import check_launchable

_BLOCK = 2048  # in bfloat16 16 bytes a thread of each expert, even for 256 threads: 4 warps on AMD


@triton.jit
def _sum_experts_kernel(
    x_ptr,
    places_ptr,  # i64[num_tokens, NUM_CHOSEN]
    weights_ptr,  # f32[num_tokens, NUM_CHOSEN]
    shared_ptr,  # [num_tokens, SIZE], or None
    gate_ptr,  # f32[num_tokens], or None
    out_ptr,  # [num_tokens, SIZE]
    stride_x: tl.constexpr,
    stride_shared: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(NUM_CHOSEN):
        place = tl.load(places_ptr + token * NUM_CHOSEN + i)
        weight = tl.load(weights_ptr + token * NUM_CHOSEN + i)
        total += tl.load(x_ptr + place * stride_x + offs, mask=mask, other=0.0).to(tl.float32) * weight
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + token * stride_shared + offs, mask=mask, other=0.0).to(tl.float32)
        if gate_ptr is not None:
            shared *= sigmoid(tl.load(gate_ptr + token))
        total += shared
    tl.store(out_ptr + token * SIZE + offs, total.to(out_ptr.dtype.element_ty), mask=mask)


def sum_experts(
    x: Tensor,  # [num_rows, size], sorted by expert
    places: Tensor,  # i64[num_tokens, num_chosen], see ExpertRows
    weights: Tensor,  # f32[num_tokens, num_chosen]
    shared: Tensor | None = None,  # [num_tokens, size], like x: of the experts that every token has
    shared_gate: Tensor | None = None,  # f32[num_tokens, 1], logits: `shared` is multiplied by their sigmoid
) -> Tensor:  # [num_tokens, size]
    """Return for each token the weighted sum of its experts' outputs, in float32, in the order of `places`.

    `shared` is added last, and only the sum is rounded to x's dtype. Raises ValueError for a shape, dtype,
    stride or device that does not fit.
    """
    key = combination((x, places, weights, shared, shared_gate))
    launch = _launches.find(key, x, places, weights, shared, shared_gate)
    out = x.new_empty(len(places), x.shape[1])
    launch(x, places, weights, shared, shared_gate, out)
    return out


@checked_as("sum_experts")
def _bind(
    x: Tensor, places: Tensor, weights: Tensor, shared: Tensor | None, shared_gate: Tensor | None
) -> BoundLaunch:
    """Check the arguments. Return the launch."""
    check_last_dim_contiguous("x", x)
    check_contiguous("places", places)
    check_contiguous("weights", weights)
    if shared is not None:
        check_last_dim_contiguous("shared", shared)
    if shared_gate is not None:
        check_contiguous("shared_gate", shared_gate)
    check_launchable("x", x)
    num_tokens, num_chosen = places.shape
    size = x.shape[1]
    return BoundLaunch(
        _sum_experts_kernel,
        (num_tokens, triton.cdiv(size, _BLOCK)),
        stride_x=x.stride(0),
        stride_shared=0 if shared is None else shared.stride(0),
        NUM_CHOSEN=num_chosen,
        SIZE=size,
        BLOCK=_BLOCK,
        num_warps=4,
    )


_launches = Launches(_bind)
