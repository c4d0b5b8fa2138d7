"""Weights for the CPU kernels in panels of codes: quantised while loading, or as files have them."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import Tensor

from ...checkpoints.coded import CodedWeight, Weight, WholeWeight
from ...kernels.checks import TrustedContents
from ...kernels.coded_panels import LEAST_GROUP, best_fit, group_of, is_exact, pack_codes
from ...kernels.panels import Panels, can_pair, pack
from .forms import Role
from .panels import ALONE, PanelWeight
from .quantization import INT4_TABLE, Int4Weight, Int8Weight, int4_codes

logger = logging.getLogger(__name__)

_NUMBERS_AT_A_TIME = 2**22  # that are converted: they take little memory


class PanelInt8Weight(PanelWeight):
    """Symmetric int8 in panels, with one scale per output; see Int8Weight."""

    def _pack(self, weight: Tensor, pairs: bool, gated: bool) -> Panels:
        plain = Int8Weight(weight)
        return pack(plain.codes, plain.scale, pairs=pairs, gated=gated)


class PanelInt4Weight(PanelWeight):
    """int4 in panels, with a scale and a zero point per GROUP inputs; see Int4Weight."""

    GROUP = Int4Weight.GROUP

    def _pack(self, weight: Tensor, pairs: bool, gated: bool) -> Panels:
        codes, scales, zeros = int4_codes(weight.view(len(weight), -1, self.GROUP), best_fit)
        # For x in float32 the weights are finer than the bfloat16 of pairs.
        pairs = pairs and weight.dtype == torch.bfloat16
        return pack_codes(codes.flatten(1), scales, offset=zeros, table=INT4_TABLE, pairs=pairs, gated=gated)


class PanelCodes(PanelWeight):
    """A quantised weight in panels, with the codes and factors of its file; see `keepable`."""

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
        """Whether products need no torch operation. Torch is needed only to reorder inputs."""
        return self.order is None and super().is_recordable

    def _product(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        return super()._product(x if self.order is None else x[:, self.order], bias, out)

    def rows(self, indices: Tensor) -> Tensor:
        found = super().rows(indices)
        return found if self.order is None else torch.empty_like(found).index_copy_(1, self.order, found)


def keepable(weight: CodedWeight, whole: WholeWeight = ALONE) -> CodedWeight | None:
    """Return a weight in codes that PanelCodes can store, with the same numbers; None if there is none.

    whole: the whole weight, of which this may be a shard. Either all shards store codes or none does.
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
    """Makes the forms of quantised weights: the stored codes if kernels can read them, else floats.

    dtype: the dtype of the model.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._has_widened = False

    def __call__(self, weight: CodedWeight, role: Role, *, whole: WholeWeight = ALONE) -> PanelWeight:
        """Make the form of a weight. whole: the weight that this may be a shard of."""
        kept = keepable(weight, whole)
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
        return PanelWeight(floats, out_dtype=_out_dtype_of(role), gated=role == "gated", whole=whole)


PANEL_FORMS: dict[str | None, type[PanelWeight]] = {
    None: PanelWeight,
    "int8": PanelInt8Weight,
    "int4": PanelInt4Weight,
}
