"""Weights in codes for kernels of a GPU: as a checkpoint stores them, or quantised while it loads.

The products are batch-invariant.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...checkpoints.coded import CodedWeight, Factors
from ...kernels.checks import TrustedContents
from ...kernels.codes import (
    PackedExperts,
    can_pack_codes,
    coded_linear,
    grouped_coded_linear,
    pack_codes,
    stack_codes,
    take_coded_rows,
)
from .coded_forms import CodedProduct
from .forms import ExpertsForm, Role, TableForm, WeightForm
from .quantization import INT4_TABLE, Int4Weight, int4_codes, int8_codes

if TYPE_CHECKING:
    from ...kernels.operations import Kernels

logger = logging.getLogger(__name__)

# What is quantised or put in order at once, so that it takes little memory on its way.
_PART_ELEMENTS = 2**24


class PackedCodesWeight(TableForm):
    """A quantised weight, packed for the GPU kernels. A head's products are float32."""

    gated = is_recordable = False

    def __init__(self, weight: CodedWeight, role: Role, *, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._out_dtype = torch.float32 if role in ("head", "embedding", "router") else None
        with TrustedContents():  # the checks of a loader are behind it
            self.packed = pack_codes(weight.codes, *weight.factors, table=weight.table)
        self._order = None if weight.order is None else weight.order.to(weight.stored.device)
        self._places = None if self._order is None else self._order.argsort()

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self._order is not None:
            x = x.index_select(1, self._order)
        return coded_linear(x, self.packed, bias, self._out_dtype)

    def rows(self, indices: Tensor) -> Tensor:
        found = take_coded_rows(self.packed, indices, self.dtype)
        return found if self._places is None else found.index_select(1, self._places)

    def of_experts(
        self, forms: Sequence[WeightForm], biases: Sequence[Tensor] | None, kernels: Kernels
    ) -> ExpertsForm:
        """Stack the weights of all experts. Each form then frees its own."""
        layout = self.packed.layout
        alike = [
            form for form in forms if isinstance(form, PackedCodesWeight) and form.packed.layout == layout
        ]
        if len(alike) < len(forms):
            _log_once("experts in codes of several kinds have a product each")
            return super().of_experts(forms, biases, kernels)
        stacked = stack_codes((form.packed for form in alike), len(alike))
        for expert, form in enumerate(alike):
            form.packed = stacked.of_expert(expert)
        bias = None if biases is None else torch.stack([*biases])
        return CodedExperts(stacked, bias, _orders_of([form._order for form in alike], layout.num_inputs))


class CodedExperts(ExpertsForm):
    """The quantised weights of all experts, packed for the GPU kernels."""

    gated = is_recordable = False

    def __init__(self, packed: PackedExperts, bias: Tensor | None, orders: Tensor | None = None) -> None:
        self.packed = packed
        self.bias = bias
        self.orders = orders  # i64[num_experts, num_inputs]: which input each stored one is; None: itself

    def __call__(self, x: Tensor, offsets: Tensor, sources: Tensor | None) -> Tensor:
        if self.orders is not None:
            x = _in_stored_order(x, self.orders, offsets, sources)
            sources = None
        return grouped_coded_linear(x, self.packed, offsets, sources, self.bias)


def _orders_of(orders: Sequence[Tensor | None], num_inputs: int) -> Tensor | None:
    """Return the orders of inputs of all experts; None if no expert has another one than the model's."""
    first = next((order for order in orders if order is not None), None)
    if first is None:
        return None
    own = torch.arange(num_inputs, dtype=first.dtype, device=first.device)
    return torch.stack([own if order is None else order for order in orders])


def _in_stored_order(x: Tensor, orders: Tensor, offsets: Tensor, sources: Tensor | None) -> Tensor:
    """Return the rows of a grouped product, each with its inputs in the stored order of its expert.

    Which rows an expert has stays on the device.
    """
    num_rows = len(x) if sources is None else len(sources)
    rows = torch.arange(num_rows, dtype=offsets.dtype, device=x.device)
    experts = torch.searchsorted(offsets, rows, right=True) - 1
    out = x.new_empty(num_rows, x.shape[1])
    for part in _parts(num_rows, x.shape[1]):
        held = x[part] if sources is None else x.index_select(0, sources[part])
        torch.gather(held, 1, orders.index_select(0, experts[part]), out=out[part])
    return out


def coded_form(weight: CodedWeight, role: Role, *, dtype: torch.dtype) -> PackedCodesWeight | CodedProduct:
    """Make the form of a quantised weight. Torch decodes it if no kernel has its groups or its table."""
    takes = can_pack_codes(weight.stored, weight.factors.scale, weight.table)
    if takes and weight.factors.scale_divisor is not None:
        _log_once("scales with a divisor, as compressed-tensors has in NVFP4, are kept in float32 on a GPU")
    return (PackedCodesWeight if takes else CodedProduct)(weight, role, dtype=dtype)


@functools.cache
def _log_once(text: str) -> None:
    logger.info(text)


def quantized_form(name: str, weight: Tensor, role: Role) -> PackedCodesWeight:
    """Quantise a float weight. Return its form."""
    return PackedCodesWeight(quantized(name, weight), role, dtype=weight.dtype)


def quantized(name: str, weight: Tensor) -> CodedWeight:
    """Quantise a float weight to "int8" or "int4" on the weight's device; see `quantization.py`."""
    return _int8(weight) if name == "int8" else _int4(weight)


def _int8(weight: Tensor) -> CodedWeight:
    codes, scale = int8_codes(weight)
    return CodedWeight(codes, Factors(scale[:, None]))


def _int4(weight: Tensor) -> CodedWeight:
    num_outputs, num_inputs = weight.shape
    size = num_outputs, num_inputs // Int4Weight.GROUP
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(size, dtype=torch.bfloat16, device=weight.device)
    offset = torch.empty_like(scale)
    for rows in _parts(num_outputs, num_inputs):
        groups = weight[rows].reshape(-1, size[1], Int4Weight.GROUP)
        own_codes, scale[rows], offset[rows] = int4_codes(groups)
        codes[rows] = own_codes.flatten(1)
    return CodedWeight(codes, Factors(scale, offset=offset), INT4_TABLE)


def _parts(num_rows: int, num_inputs: int) -> Iterator[slice]:
    step = max(1, _PART_ELEMENTS // num_inputs)
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))
