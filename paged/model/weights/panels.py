"""Weights for the CPU kernels: packed into panels, plain or quantised. See `kernels.cpu.linear.linear`.

The products are batch-invariant, so a request's results do not depend on its batch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ...kernels.backend import Kernels
from ...kernels.checks import TrustedContents
from ...kernels.panels import (
    LEAST_GROUP,
    ExpertPanels,
    Panels,
    best_fit,
    can_pair,
    expert_memory,
    group_of,
    grouped_panel_linear,
    is_exact,
    linear,
    pack,
    pack_bf12,
    pack_codes,
    pad,
    take_panel_rows,
    take_rows,
    widen_rows,
)
from .coded import CodedWeight, Weight
from .forms import ExpertsForm, PlainWeight, Role, TableForm, WeightForm
from .quantization import INT4_TABLE, Int4Weight, Int8Weight, int4_codes
from .whole import WholeWeight

logger = logging.getLogger(__name__)

ALONE = WholeWeight()  # of a weight that is no shard

_NUMBERS_AT_A_TIME = 2**22  # that are converted: they take little memory
ROWS_AT_A_TIME = 256  # of a comparison: it takes little memory, and ends early for most weights that differ


def narrowed(weight: Tensor, whole: WholeWeight) -> Tensor:
    """Convert a float32 weight to bfloat16 or float16, if that loses nothing, as in most checkpoints.

    Reading it takes half the time, and products are bitwise equal, except by AMX, which adds up in another
    order. So all numbers of the whole weight decide, of which this may be a shard.
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
    """A weight in its dtype, or `narrowed`, large ones in bf12; accumulators are float32.

    out_dtype: of its products, by default that of x. gated: the weight [2 * n, in_features] holds gates and
    ups; its products are the n numbers silu(gate) * up. whole: what the weight may be a shard of.
    """

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
        return pack_bf12(panels, num_shards=self._whole.num_shards)

    @property
    def is_recordable(self) -> bool:
        """Whether products need no torch: it widens x of 16 bits, unless that is multiplied in pairs."""
        return self.panels.in_pairs or self.dtype == torch.float32

    def lay_out(self, bias: Tensor) -> None:
        """Order the bias as the panels are."""
        self.padded_bias = pad(bias, gated=self.gated)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._product(x, bias)

    def store(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Store the product into out, whose rows may be apart."""
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
        return PanelExperts(panels, with_bias=biases is not None)

    @property
    def takes_inputs_in_order(self) -> bool:
        """Whether column k of the weight is for input k of x."""
        return True


class PanelExperts(ExpertsForm):
    """The weights of experts in panels, multiplied by one launch."""

    def __init__(self, forms: Sequence[PanelWeight], *, with_bias: bool) -> None:
        first = forms[0]
        self.gated = first.gated
        self.is_recordable = first.is_recordable
        memory = expert_memory(first.panels, len(forms))
        for own, form in zip(memory, forms, strict=True):
            if form.panels.weight.shape == own.shape and form.panels.weight.dtype == own.dtype:
                own.copy_(form.panels.weight)
                form.panels = form.panels._replace(weight=own)  # so that one matrix is in memory twice
        biases = [form.padded_bias for form in forms if form.padded_bias is not None]
        with TrustedContents():  # they were checked when they were packed
            self.weights = ExpertPanels([form.panels for form in forms], biases if with_bias else None)

    def __call__(self, x: Tensor, offsets: Tensor, sources: Tensor | None) -> Tensor:
        return grouped_panel_linear(x, self.weights, offsets, sources)


class PanelInt8Weight(PanelWeight):
    """Symmetric int8, one scale for an output: see Int8Weight."""

    def _pack(self, weight: Tensor, pairs: bool, gated: bool) -> Panels:
        plain = Int8Weight(weight)
        return pack(plain.codes, plain.scale, pairs=pairs, gated=gated)


class PanelInt4Weight(PanelWeight):
    """int4 with a scale and a zero for every GROUP inputs: see Int4Weight."""

    GROUP = Int4Weight.GROUP

    def _pack(self, weight: Tensor, pairs: bool, gated: bool) -> Panels:
        codes, scales, zeros = int4_codes(weight.view(len(weight), -1, self.GROUP), best_fit)
        # For x in float32 the weights are finer than the bfloat16 of pairs.
        pairs = pairs and weight.dtype == torch.bfloat16
        return pack_codes(codes.flatten(1), scales, offset=zeros, table=INT4_TABLE, pairs=pairs, gated=gated)


class PanelCodes(PanelWeight):
    """A weight in the codes and factors of its file; it must be `keepable`."""

    def __init__(self, weight: CodedWeight, role: Role, *, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._out_dtype = _out_dtype_of(role)
        self.gated = role == "gated"
        self.order = weight.order
        pairs = dtype == torch.bfloat16 and can_pair(dtype, weight.shape[1])
        with TrustedContents():  # the checks of a loader are behind it
            self.panels = pack_codes(
                weight.stored, *weight.factors, table=weight.table, pairs=pairs, gated=self.gated
            )
        self.padded_bias: Tensor | None = None

    @property
    def takes_inputs_in_order(self) -> bool:
        return self.order is None

    @property
    def is_recordable(self) -> bool:
        """Whether products need no torch, which orders inputs."""
        return self.order is None and super().is_recordable

    def _product(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        return super()._product(x if self.order is None else x[:, self.order], bias, out)

    def rows(self, indices: Tensor) -> Tensor:
        found = super().rows(indices)
        return found if self.order is None else torch.empty_like(found).index_copy_(1, self.order, found)


def keepable(weight: CodedWeight, whole: WholeWeight = ALONE) -> CodedWeight | None:
    """Return a weight with the same numbers in codes that PanelCodes keeps; None if there are none.

    whole: what it may be a shard of: all of that is kept alike.
    """
    group = group_of(weight.group)
    if group < LEAST_GROUP:
        return None
    factors = weight.factors
    if factors.zero is None and factors.offset is None and weight.stored.dtype != torch.float8_e4m3fn:
        return weight
    if whole.has(weight, _is_exact):
        return weight
    return _folded(weight) if whole.has(weight, lambda each: _folded(each) is not None) else None


def _is_exact(weight: Weight) -> bool:
    assert isinstance(weight, CodedWeight), "floats are kept as they are"
    return is_exact(weight.stored, *weight.factors, table=weight.table)


def _folded(weight: Weight) -> CodedWeight | None:
    assert isinstance(weight, CodedWeight), "floats have no zeros"
    return _without_zero(weight)


def _without_zero(weight: CodedWeight) -> CodedWeight | None:
    """Subtract the zeros from the numbers if that gives integers of 8 bits."""
    zero = weight.factors.zero
    if zero is None or weight.stored.dtype == torch.float8_e4m3fn:
        return None
    codes = torch.empty(weight.shape, dtype=torch.int8)
    for rows in _parts_of(weight):
        part = weight.take(rows)
        assert part.factors.zero is not None
        groups = (
            part.numbers().view(len(part.stored), -1, weight.group) - part.factors.zero.float()[..., None]
        )
        integers = groups.to(torch.int8)
        if not torch.equal(integers.float(), groups):
            return None
        codes[rows] = integers.flatten(1)
    folded = replace(weight, stored=codes, factors=weight.factors._replace(zero=None), table=None)
    return folded if is_exact(codes, *folded.factors) else None


def _parts_of(weight: CodedWeight) -> list[slice]:
    size = max(1, _NUMBERS_AT_A_TIME // weight.shape[1])
    return [slice(start, start + size) for start in range(0, weight.shape[0], size)]


def _out_dtype_of(role: Role) -> torch.dtype | None:
    # A head may be tied to the embedding.
    return torch.float32 if role in ("head", "embedding", "router") else None


class CodedForms:
    """The forms of a model's weights in codes: as they are if readers take them, else in floats.

    dtype: of the model. whole: what each weight may be a shard of.
    """

    def __init__(self, dtype: torch.dtype, whole: WholeWeight = ALONE) -> None:
        self.dtype = dtype
        self._whole = whole
        self._has_widened = False

    def __call__(self, weight: CodedWeight, role: Role) -> PanelWeight:
        """Make the form of a weight."""
        kept = keepable(weight, self._whole)
        if kept is not None:
            return PanelCodes(kept, role, dtype=self.dtype)
        if not self._has_widened:
            self._has_widened = True
            logger.info(
                "weights whose groups of inputs are no multiple of %d (the first has %d), or whose numbers "
                "take more than one rounding, are kept in %s",
                LEAST_GROUP,
                weight.group,
                str(self.dtype).removeprefix("torch."),
            )
        floats = torch.empty(weight.shape, dtype=self.dtype)
        for rows in _parts_of(weight):
            floats[rows] = weight.take(rows).floats()
        return PanelWeight(floats, out_dtype=_out_dtype_of(role), gated=role == "gated", whole=self._whole)


PANEL_FORMS: dict[str | None, type[PanelWeight]] = {
    None: PanelWeight,
    "int8": PanelInt8Weight,
    "int4": PanelInt4Weight,
}
