"""Weights for the CPU kernels: floats, packed into panels. See `kernels.cpu.linear.linear`.

The products are batch-invariant, so a request's results do not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...checkpoints.coded import Weight, WholeWeight
from ...kernels.checks import TrustedContents
from ...kernels.panels import (
    Panels,
    can_pair,
    linear,
    pack,
    pack_bf12,
    pad,
    take_panel_rows,
    take_rows,
    widen_rows,
)
from .forms import ExpertsForm, PlainWeight, TableForm, WeightForm

if TYPE_CHECKING:
    from ...kernels.operations import Kernels

ALONE = WholeWeight()  # of a weight that is no shard

ROWS_AT_A_TIME = 256  # of a comparison: it takes little memory, and ends early for most weights that differ


def narrowed(weight: Tensor, whole: WholeWeight) -> Tensor:
    """Convert a float32 weight to bfloat16 or float16 if this changes no number, as in most checkpoints.

    A narrowed weight is read in half the time. Its products are bitwise equal to those in float32, except on
    AMX, which adds in another order. Therefore all shards decide by the numbers of the whole weight.
    """
    if weight.dtype == torch.float32:
        for dtype in (torch.bfloat16, torch.float16):
            if whole.has(weight, partial(_loses_nothing, dtype=dtype)):
                return weight.to(dtype)
    return weight


def _loses_nothing(weight: Weight, dtype: torch.dtype) -> bool:
    assert isinstance(weight, Tensor), "codes are not narrowed"
    return all(_are_equal(rows, rows.to(dtype)) for rows in torch.split(weight, ROWS_AT_A_TIME))


def _are_equal(wide: Tensor, narrow: Tensor) -> bool:
    """Compare bits: as numbers, subnormals equal 0 in a thread that flushes them."""
    return torch.equal(wide.view(torch.int32), narrow.float().view(torch.int32))


class Table(PlainWeight):
    """A weight that is only looked up, never multiplied."""

    def __init__(self, weight: Tensor, whole: WholeWeight = ALONE) -> None:
        super().__init__(narrowed(weight, whole).contiguous())
        self.is_narrowed = self.weight.dtype != weight.dtype

    def rows(self, indices: Tensor) -> Tensor:
        take = widen_rows if self.is_narrowed else take_rows
        return take(self.weight, indices)


class PanelWeight(TableForm):
    """A float weight in panels: in its own dtype, `narrowed`, or, if it is large, in bf12. Accumulators are
    float32.

    out_dtype: the dtype of products, by default the dtype of x.
    gated: whether the weight [2 * n, in_features] holds gates and ups. The products are then the n numbers
        silu(gate) * up.
    whole: the whole weight, of which this may be a shard.

    stays: whether the panels lie in one piece of memory with the panels of all weights.
    """

    stays = False

    def __init__(
        self,
        weight: Tensor,
        *,
        out_dtype: torch.dtype | None = None,
        gated: bool = False,
        whole: WholeWeight = ALONE,
    ) -> None:
        self._whole = whole
        self.dtype = weight.dtype
        self._out_dtype = out_dtype
        self.gated = gated
        self.panels = self._pack(weight, can_pair(weight.dtype, weight.shape[1]), gated)
        self.padded_bias: Tensor | None = None

    def _pack(self, weight: Tensor, pairs: bool, gated: bool) -> Panels:
        kept = narrowed(weight, self._whole)
        panels = pack(kept, pairs=pairs and kept.dtype == torch.bfloat16, gated=gated)
        with TrustedContents():
            return pack_bf12(panels, num_shards=self._whole.num_shards)

    @property
    def is_recordable(self) -> bool:
        """Whether products launch no torch operation. Torch widens 16-bit x that is not in pairs."""
        return self.panels.in_pairs or self.dtype == torch.float32

    def lay_out(self, bias: Tensor) -> None:
        """Convert the bias to the order of the panels, with padding."""
        self.padded_bias = pad(bias, gated=self.gated)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._product(x, bias)

    def store(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Store the product in `out`, whose rows may be apart."""
        self._product(x, bias, out)

    def _product(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        if bias is not None and self.padded_bias is None:
            self.lay_out(bias)
        return linear(x, self.panels, None if bias is None else self.padded_bias, self._out_dtype, out)

    def rows(self, indices: Tensor) -> Tensor:
        return take_panel_rows(self.panels, indices, self.dtype)

    def of_experts(
        self, forms: Sequence[WeightForm], biases: Sequence[Tensor] | None, kernels: Kernels
    ) -> ExpertsForm:
        panels = [form for form in forms if isinstance(form, PanelWeight) and form.takes_inputs_in_order]
        kinds = {(form.panels.gated, form.panels.in_pairs) for form in panels}
        if len(panels) < len(forms) or len(kinds) > 1:
            return super().of_experts(forms, biases, kernels)
        from .expert_panels import PanelExperts

        return PanelExperts(panels, with_bias=biases is not None)

    @property
    def takes_inputs_in_order(self) -> bool:
        """Whether column k of the weight is multiplied by input k of x."""
        return True
