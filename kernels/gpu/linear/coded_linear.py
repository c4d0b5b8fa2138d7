"""x Wᵀ + b for a weight in codes, batch-invariant: a row's result is bitwise equal in any batch."""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...checks import check_contiguous, check_device, check_dtype, check_last_dim_contiguous, check_shape
from ..attention.config import FAMILIES
from ..launch import BoundLaunch, Launches, combination
from ..target import check_launchable, current_target
from .config import ROW_COUNTS, RowCount, linear_config, row_count, split_tiles
from .kernel import CodedShape, Product, add_splits_kernel, coded_linear_kernel
from .numbers import CodeKind
from .packed import SUB, PackedCodes, PackedLayout, table_words

_BLOCK = 1024  # outputs whose splits are added by one program
_TL_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def coded_linear(
    x: Tensor,  # [num_rows, num_inputs]
    weight: PackedCodes,
    bias: Tensor | None = None,  # [num_outputs], in any dtype of x
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # [num_rows, num_outputs]
    """Return x Wᵀ + b in out_dtype: x's dtype, which is the default, or float32.

    Weights are decoded in float32 and rounded once to the dtype of x. Sums are computed in float32, in an
    order that depends on the weight alone: inputs are divided into splits, whose sums are added one after the
    other, by one program or, if programs would be too few, by a second kernel. Raises ValueError for a shape,
    dtype, stride or device that does not fit.
    """
    key = combination((x, bias), weight.layout, out_dtype)
    return _launches.find(key, x, weight, bias, out_dtype)(x, weight, bias)


class _Launch:
    """The launch of one combination: the product, and the sum of its splits if these are in parallel."""

    __slots__ = ("_add_splits", "_num_splits", "_out_dtype", "_product", "_shape")

    def __init__(
        self, x: Tensor, layout: PackedLayout, rows: RowCount, out_dtype: torch.dtype, target: str
    ) -> None:
        num_rows = len(x)
        num_outputs = layout.num_outputs
        config = linear_config(x.dtype, rows, target)
        shape = shape_of(layout, target)
        num_splits = triton.cdiv(shape.NUM_TILES, shape.SPLIT_TILES)
        in_parallel = num_splits > 1 and rows != "most"
        grid = triton.cdiv(num_outputs, config.BLOCK_N), triton.cdiv(num_rows, config.BLOCK_M)
        self._shape = num_rows, num_outputs
        self._out_dtype = out_dtype
        self._num_splits = num_splits
        self._product = BoundLaunch(
            coded_linear_kernel,
            (*grid, num_splits if in_parallel else 1),
            num_rows=num_rows,
            stride_x=x.stride(0),
            shape=shape,
            kind=kind_of(layout, target),
            product=Product(
                config.BLOCK_N,
                config.BLOCK_M,
                NUM_SPLITS=1 if in_parallel else num_splits,
                PARTIAL=in_parallel,
                DOT_DTYPE=dot_dtype(x.dtype, target),
            ),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **compiler_options(target),
        )
        self._add_splits = None
        if in_parallel:
            self._add_splits = BoundLaunch(
                add_splits_kernel,
                (num_rows, triton.cdiv(num_outputs, _BLOCK)),
                num_rows=num_rows,
                NUM_OUTPUTS=num_outputs,
                NUM_SPLITS=num_splits,
                BLOCK=_BLOCK,
                num_warps=4,
            )

    def __call__(self, x: Tensor, weight: PackedCodes, bias: Tensor | None) -> Tensor:
        out = x.new_empty(self._shape, dtype=self._out_dtype)
        if self._add_splits is None:
            self._product(x, *weight.tensors, bias, out)
        else:
            partial = x.new_empty((self._num_splits, *self._shape), dtype=torch.float32)
            self._product(x, *weight.tensors, None, partial)
            self._add_splits(partial, bias, out)
        return out

    def compile(self, x: Tensor, weight: PackedCodes, bias: Tensor | None) -> None:
        """Compile for these arguments, and launch nothing."""
        out = x.new_empty(0, dtype=self._out_dtype)
        if self._add_splits is None:
            self._product.compile(x, *weight.tensors, bias, out)
        else:
            partial = x.new_empty(0, dtype=torch.float32)
            self._product.compile(x, *weight.tensors, None, partial)
            self._add_splits.compile(partial, bias, out)


def _bind(x: Tensor, weight: PackedCodes, bias: Tensor | None, out_dtype: torch.dtype | None) -> _Launch:
    """Check the arguments. Return their launch, after all kernels for such a weight are compiled."""
    layout = weight.layout
    _check(x, layout, bias, out_dtype)
    target = current_target()
    out_dtype = out_dtype or x.dtype
    kernels = target, layout, x.dtype, out_dtype, None if bias is None else bias.dtype
    if kernels not in _compiled and target != "interpreter":
        # A batch of another size must not wait for a compilation.
        for rows in ROW_COUNTS:
            _Launch(x, layout, rows, out_dtype, target).compile(x, weight, bias)
        _compiled.add(kernels)
    return _Launch(x, layout, row_count(len(x)), out_dtype, target)


def _check(x: Tensor, layout: PackedLayout, bias: Tensor | None, out_dtype: torch.dtype | None) -> None:
    check_shape("x", x, (None, layout.num_inputs))
    check_dtype("x", x)
    check_device("x", x, layout.device)
    check_last_dim_contiguous("x", x)
    check_launchable("x", x)
    if bias is not None:
        check_shape("bias", bias, (layout.num_outputs,))
        check_dtype("bias", bias)
        check_device("bias", bias, layout.device)
        check_contiguous("bias", bias)
    if out_dtype not in (None, x.dtype, torch.float32):
        raise ValueError(f"out_dtype must be None, {x.dtype} or {torch.float32}, got {out_dtype}")


def shape_of(layout: PackedLayout, target: str) -> CodedShape:
    """Return the constants of a weight's shape."""
    num_groups = layout.num_inputs // layout.group
    unit_tiles = max(1, layout.unit // layout.tile)
    return CodedShape(
        NUM_OUTPUTS=layout.num_outputs,
        NUM_INPUTS=layout.num_inputs,
        NUM_GROUPS=num_groups,
        GROUP=layout.group,
        GROUP_SUBS=layout.per_word if num_groups == 1 else math.gcd(layout.group // SUB, layout.per_word),
        UNIT_TILES=layout.num_tiles if layout.unit == layout.num_inputs else unit_tiles,
        NUM_TILES=layout.num_tiles,
        SPLIT_TILES=split_tiles(layout.num_outputs, layout.num_tiles, layout.tile, target),
    )


def kind_of(layout: PackedLayout, target: str) -> CodeKind:
    """Return the constants of a weight's codes."""
    table = layout.table
    return CodeKind(
        NUMBERS=layout.numbers,
        FIRST=int(table[0]) if table is not None and layout.numbers == "integers" else 0,
        TABLE=table_words(table) if table is not None and layout.numbers == "table" else (),
        PER_WORD=layout.per_word,
        SUB=SUB,
        E4M3_SCALES=layout.dtypes[0] == torch.float8_e4m3fn,
        HAS_E4M3=target.startswith("sm_") and int(target[3:]) >= 89,
    )


def dot_dtype(dtype: torch.dtype, target: str) -> tl.dtype:
    """Return the dtype in which x and weights are multiplied on this target."""
    return tl.float32 if target == "interpreter" else _TL_DTYPES[dtype]


def compiler_options(target: str) -> dict[str, Any]:
    """Return compiler options for a target. On CDNA they select matrix instructions with few rows."""
    return {"matrix_instr_nonkdim": 16} if FAMILIES.get(target) == "cdna" else {}


_launches = Launches(_bind)
_compiled: set[object] = set()  # what kernels follow from, of those that are compiled
