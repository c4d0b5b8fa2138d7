"""x Wᵀ + b with the weight of each row's expert, batch-invariant: a row's bits do not depend on the others.

One launch, on a grid that does not depend on which experts the rows have. Each program finds its tiles in the
offsets, which stay on the device.
"""

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from ...arguments import Rules
from ...checked import checked_as
from ...checks import check_contiguous, check_device, check_dtype, check_last_dim_contiguous, check_shape
from ..launch import BoundLaunch, Launches, combination, programs_per_sm
from ..linear.coded_linear import compiler_options, dot_dtype, kind_of, shape_of
from ..linear.config import ROW_COUNTS, RowCount, linear_config, row_count
from ..linear.kernel import CodedShape, Product
from ..linear.numbers import CodeKind
from ..linear.packed import PackedExperts
from ..target import check_launchable, current_target, num_sms
from .kernel import Grouping, PlainShape, grouped_linear_kernel

_NO_FACTORS = (None,) * 5  # of a weight in numbers


def grouped_linear(
    x: Tensor,  # [num_rows, in_features], sorted by expert; with sources [num_tokens, in_features]
    weight: Tensor,  # [num_experts, out_features, in_features], of the dtype of x
    offsets: Tensor,  # i32[num_experts + 1], see ExpertRows
    sources: Tensor | None = None,  # i64[num_rows]: the row of x that each row is
    bias: Tensor | None = None,  # [num_experts, out_features], of the dtype of x
) -> Tensor:  # [num_rows, out_features]
    """Return x[sources[r]] weight[e]ᵀ + bias[e] as row r, for the rows of each expert e.

    Sums are computed in float32, in an order that depends on the weight alone, and rounded once to x's dtype.
    Raises ValueError for a shape, dtype, stride or device that does not fit.
    """
    key = combination((x, weight, offsets, sources, bias))
    launch, size = _launches.find(key, x, weight, offsets, sources, bias)
    out = x.new_empty(size)
    launch(x, sources, offsets, weight, *_NO_FACTORS, bias, out)
    return out


def grouped_coded_linear(
    x: Tensor,  # [num_rows, in_features], sorted by expert; with sources [num_tokens, in_features]
    weight: PackedExperts,
    offsets: Tensor,  # i32[num_experts + 1], see ExpertRows
    sources: Tensor | None = None,  # i64[num_rows]: the row of x that each row is
    bias: Tensor | None = None,  # [num_experts, out_features], in any dtype of x
) -> Tensor:  # [num_rows, out_features]
    """Return x[sources[r]] weight[e]ᵀ + bias[e] as row r, for the rows of each expert e.

    Weights are decoded in float32 and rounded once to the dtype of x. Sums are computed in float32, in an
    order that depends on the weight alone, and rounded once to x's dtype. Raises ValueError for a shape,
    dtype, stride or device that does not fit.
    """
    key = combination((x, offsets, sources, bias), weight.layout, weight.num_experts)
    launch, size = _coded_launches.find(key, x, weight, offsets, sources, bias)
    out = x.new_empty(size)
    launch(x, sources, offsets, *weight.tensors, bias, out)
    return out


@checked_as("grouped_linear")
def _bind(
    x: Tensor, weight: Tensor, offsets: Tensor, sources: Tensor | None, bias: Tensor | None
) -> tuple[BoundLaunch, tuple[int, int]]:
    """Check the arguments. Return the launch, after all kernels for such a weight are compiled, and the size
    of the output.
    """
    check_contiguous("weight", weight)
    num_experts, num_outputs, num_inputs = weight.shape
    block_k = 32 if x.dtype == torch.float32 else 64
    shape = PlainShape(num_outputs, num_inputs, 16 if current_target() == "interpreter" else block_k)
    return _bind_all(num_experts, shape, None, (weight, *_NO_FACTORS), (x, offsets, sources, bias))


def _bind_coded(
    x: Tensor, weight: PackedExperts, offsets: Tensor, sources: Tensor | None, bias: Tensor | None
) -> tuple[BoundLaunch, tuple[int, int]]:
    """Check the arguments. Return the launch, after all kernels for such a weight are compiled, and the size
    of the output.
    """
    layout = weight.layout
    num_experts = weight.num_experts
    rules = Rules({"x": x, "offsets": offsets, "sources": sources})
    check_shape("x", x, (None, layout.num_inputs))
    rules.rows("x")
    rules.grouped_rows(x, num_experts)
    check_device("x", x, layout.device)
    if bias is not None:
        check_shape("bias", bias, (num_experts, layout.num_outputs))
        check_dtype("bias", bias)
        check_device("bias", bias, layout.device)
    target = current_target()
    coded = shape_of(layout, target), kind_of(layout, target)
    return _bind_all(num_experts, *coded, weight.tensors, (x, offsets, sources, bias))


def _bind_all(
    num_experts: int,
    shape: PlainShape | CodedShape,
    kind: CodeKind | None,
    weights: tuple[Tensor | None, ...],
    tensors: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
) -> tuple[BoundLaunch, tuple[int, int]]:
    """Bind the launch for so many rows, after the kernels for any number of them are compiled."""
    x, offsets, sources, bias = tensors
    check_last_dim_contiguous("x", x)
    check_launchable("x", x)
    for name, tensor in (("sources", sources), ("bias", bias)):
        if tensor is not None:
            check_contiguous(name, tensor)
    num_rows = len(x) if sources is None else len(sources)
    target = current_target()
    dtypes = x.dtype, None if bias is None else bias.dtype
    kernels = target, num_experts, shape, kind, dtypes, sources is None, x.stride(0)
    if kernels not in _compiled and target != "interpreter":
        # A batch of another size must not wait for a compilation.
        out = x.new_empty(0)
        for rows in ROW_COUNTS:
            launch = _launch(num_experts, shape, kind, x, num_rows, rows)
            launch.compile(x, sources, offsets, *weights, bias, out)
        _compiled.add(kernels)
    rows = row_count(triton.cdiv(num_rows, num_experts))
    return _launch(num_experts, shape, kind, x, num_rows, rows), (num_rows, shape.NUM_OUTPUTS)


def _launch(
    num_experts: int,
    shape: PlainShape | CodedShape,
    kind: CodeKind | None,
    x: Tensor,
    num_rows: int,
    rows: RowCount,  # of an expert, if all had as many
) -> BoundLaunch:
    target = current_target()
    config = linear_config(x.dtype, rows, target)
    # An expert's last tile of rows may have one row only. It is no matter which experts have rows.
    most_tiles = min(num_experts, num_rows) + num_rows // config.BLOCK_M
    most_programs = most_tiles * triton.cdiv(shape.NUM_OUTPUTS, config.BLOCK_N)
    fitting = num_sms(x.device)

    def grid(compiled: CompiledKernel | None) -> tuple[int, ...]:
        return (min(most_programs, fitting * programs_per_sm(compiled, target)),)

    return BoundLaunch(
        grouped_linear_kernel,
        grid,
        stride_x=x.stride(0),
        grouping=Grouping(num_experts, triton.next_power_of_2(num_experts)),
        shape=shape,
        kind=kind,
        product=Product(
            config.BLOCK_N, config.BLOCK_M, NUM_SPLITS=1, PARTIAL=False, DOT_DTYPE=dot_dtype(x.dtype, target)
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **compiler_options(target),
    )


_launches = Launches(_bind)
_coded_launches = Launches(_bind_coded)
_compiled: set[object] = set()  # what kernels follow from, of those that are compiled
