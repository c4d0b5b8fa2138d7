"""Weights for the CPU kernels: packed into panels, plain or quantised. See `kernels.cpu.linear.linear`.

The products are batch-invariant, so a request's results do not depend on its batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.panels import (
    INT4_GROUP,
    Panels,
    can_pair,
    linear,
    pack,
    pack_bf12,
    pack_int4,
    pad,
    take_panel_rows,
    take_rows,
    widen_rows,
)
from .forms import PlainWeight, TableForm
from .quantization import Int8Weight, int4_codes

ROWS_AT_A_TIME = 256  # of a comparison: it takes little memory, and ends early for most weights that differ


def narrowed(weight: Tensor) -> Tensor:
    """Convert a float32 weight to bfloat16 or float16, if that loses nothing, as in most checkpoints.

    Reading it takes half the time, and products are bitwise equal, except by AMX, which adds up in another
    order.
    """
    if weight.dtype == torch.float32:
        for dtype in (torch.bfloat16, torch.float16):
            if all(_are_equal(rows, rows.to(dtype)) for rows in torch.split(weight, ROWS_AT_A_TIME)):
                return weight.to(dtype)
    return weight


def _are_equal(wide: Tensor, narrow: Tensor) -> bool:
    """Compare bits: as numbers, subnormals equal 0 in a thread that flushes them."""
    return torch.equal(wide.view(torch.int32), narrow.float().view(torch.int32))


class Table(PlainWeight):
    """A weight that is only looked up, never multiplied."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(narrowed(weight).contiguous())
        self.is_narrowed = self.weight.dtype != weight.dtype

    def rows(self, indices: Tensor) -> Tensor:
        take = widen_rows if self.is_narrowed else take_rows
        return take(self.weight, indices)


class PanelWeight(TableForm):
    """A weight in its dtype, or `narrowed`, large ones in bf12; accumulators are float32.

    out_dtype: of its products, by default that of x. gated: the weight [2 * n, in_features] holds gates and
    ups; its products are the n numbers silu(gate) * up.
    """

    def __init__(self, weight: Tensor, *, out_dtype: torch.dtype | None = None, gated: bool = False) -> None:
        self.dtype = weight.dtype
        self._out_dtype = out_dtype
        self.gated = gated
        self.panels = self._pack(weight, can_pair(weight.dtype, weight.shape[1]), gated)
        self._bias: Tensor | None = None

    def _pack(self, weight: Tensor, pairs: bool, gated: bool) -> Panels:
        kept = narrowed(weight)
        return pack_bf12(pack(kept, pairs=pairs and kept.dtype == torch.bfloat16, gated=gated))

    @property
    def is_recordable(self) -> bool:
        """Whether products need no torch: it widens x of 16 bits, unless that is multiplied in pairs."""
        return self.panels.in_pairs or self.dtype == torch.float32

    def lay_out(self, bias: Tensor) -> None:
        """Order the bias as the panels are."""
        self._bias = pad(bias, gated=self.gated)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None and self._bias is None:
            self.lay_out(bias)
        return linear(x, self.panels, None if bias is None else self._bias, self._out_dtype)

    def rows(self, indices: Tensor) -> Tensor:
        return take_panel_rows(self.panels, indices, self.dtype)


class PanelInt8Weight(PanelWeight):
    """Symmetric int8, one scale for an output: see Int8Weight."""

    def _pack(self, weight: Tensor, pairs: bool, gated: bool) -> Panels:
        plain = Int8Weight(weight)
        return pack(plain.codes, plain.scale, pairs=pairs, gated=gated)


class PanelInt4Weight(PanelWeight):
    """int4 with a scale and a zero for every GROUP inputs: see Int4Weight. It cannot be looked up."""

    GROUP = INT4_GROUP

    def _pack(self, weight: Tensor, pairs: bool, gated: bool) -> Panels:
        codes, scales, zeros = int4_codes(weight.view(len(weight), -1, self.GROUP))
        # For x in float32 the weights are finer than the bfloat16 of pairs.
        pairs = pairs and weight.dtype == torch.bfloat16
        return pack_int4(codes.flatten(1), scales, zeros, pairs=pairs, gated=gated)


PANEL_FORMS: dict[str | None, type[PanelWeight]] = {
    None: PanelWeight,
    "int8": PanelInt8Weight,
    "int4": PanelInt4Weight,
}
