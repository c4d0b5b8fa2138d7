"""Choose the form of each float weight of a model: as loaded, packed for oneDNN, in panels, or quantised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch

from ...checkpoints.coded import CodedWeight, Weight, WholeWeight
from .forms import Float32Product, Float32Weight, PlainWeight, Role, WeightForm

if TYPE_CHECKING:
    from .coded_panels import CodedForms

MakeForm = Callable[..., WeightForm]  # of a weight in floats, and of `whole` where forms depend on it
MakeCodedForm = Callable[..., WeightForm]  # of a CodedWeight and its role, and of `whole`


@dataclass(frozen=True)
class Forms:
    """Chooses the form of a weight (its layout in memory, and the kernel of its products) by its stored
    format and its role.

    Embeddings and tables get a `TableForm`. The form of a head may return float32; the form of a gated layer
    may apply silu(gate) * up itself.

    of_precise: makes the form of the rows that would lose too much precision in their layer's form; None if
        there are no such rows.
    num_shards: the number of shards of each weight; None if weights are not packed into panels. Only forms in
        panels depend on the other shards.
    """

    of_floats: Mapping[Role, MakeForm]
    of_codes: MakeCodedForm
    of_precise: MakeForm | None = None
    num_shards: int | None = None

    @property
    def in_panels(self) -> bool:
        """Whether weights are packed into panels."""
        return self.num_shards is not None

    def make(
        self,
        weight: Weight,
        role: Role,
        num_precise: int = 0,
        read_whole: Callable[[], Weight] | None = None,
    ) -> WeightForm:
        """Make the form of a weight.

        num_precise: how many of the last rows get the form `of_precise`.
        read_whole: reads the whole weight, of which `weight` is a shard; see `WholeWeight`.
        """
        given = {}
        if self.num_shards is not None:
            given["whole"] = WholeWeight(self.num_shards, read_whole)
        if isinstance(weight, CodedWeight):
            return self.of_codes(weight, role, **given)
        make = partial(self.of_floats[role], **given)
        num_others, num_precise = self.split(len(weight), num_precise)
        if not num_precise:
            return make(weight)
        assert self.of_precise is not None
        precise = self.of_precise(weight[num_others:], **given)
        if not num_others:
            return precise
        from .joined_form import JoinedForm

        return JoinedForm([(make(weight[:num_others]), num_others), (precise, num_precise)])

    def split(self, num_rows: int, num_precise: int) -> tuple[int, int]:
        """Return how many rows of a float weight get the form of their role, and how many `of_precise`."""
        if self.of_precise is None:
            num_precise = 0
        return num_rows - num_precise, num_precise


def choose_forms(
    device: torch.device,
    dtype: torch.dtype,
    quantization: str | None,
    *,
    tied: bool,
    in_panels: bool,
    has_coded_linear: bool = False,
    num_shards: int = 1,
) -> Forms:
    """Choose the forms for float weights of this dtype on this device.

    in_panels: whether the CPU backend's own kernels multiply, instead of torch's. has_coded_linear: whether
        the backend has kernels for quantised weights. num_shards: the number of shards of each weight.

    A quantised model has its output head in int8, and a tied embedding too; the perplexity hardly changes. An
    untied embedding stays in floating point, since it is only looked up. In an int4 model, the most sensitive
    weights are in int8 too: attention's value projections, which are small, and `down` in half of the layers.

    Raises ConfigError if weights cannot be quantised.
    """
    if quantization is not None and not has_coded_linear:
        from .quantization import require_quantization

        require_quantization(quantization, device, dtype)
    layer: MakeForm
    gated: MakeForm
    of_codes: MakeCodedForm = partial(_coded_product, dtype=dtype)
    head: MakeForm
    table: MakeForm = PlainWeight
    router: MakeForm = Float32Weight
    int8: MakeForm | None = None
    is_table = True  # whether the head's form can be looked up
    if has_coded_linear:
        from .gpu_codes import coded_form, quantized_form

        of_codes = partial(coded_form, dtype=dtype)
    if in_panels:
        from .panels import PanelWeight, Table

        layer = head = router = PanelWeight
        of_codes = _InPanels(dtype)
        if quantization is not None:
            from .coded_panels import PANEL_FORMS

            layer = PANEL_FORMS[quantization]
            head = int8 = PANEL_FORMS["int8"]
        gated = partial(layer, gated=True)
        head = partial(head, out_dtype=torch.float32)
        router = partial(router, out_dtype=torch.float32)
        table = Table
    elif quantization is not None and has_coded_linear:
        layer = gated = partial(quantized_form, quantization, role="layer")
        int8 = partial(quantized_form, "int8", role="layer")
        head = partial(quantized_form, "int8", role="head")
    elif quantization is not None:
        from .quantization import Int4Weight, Int8Weight, require_kernels

        require_kernels(quantization)
        int8 = Int8Weight
        layer = gated = Int4Weight if quantization == "int4" else Int8Weight
        head = Int8Weight
    else:
        from .onednn import PackedWeight, can_pack

        is_table = not can_pack(device, dtype)
        layer = gated = head = PlainWeight if is_table else PackedWeight
        if device.type == "cuda" and dtype != torch.float32 and not torch.version.hip:
            head = Float32Product
    embedding = head if tied and is_table else table
    of_floats: dict[Role, MakeForm] = {
        "layer": layer,
        "gated": gated,
        "router": router,
        "head": head,
        "embedding": embedding,
        "table": table,
    }
    of_precise = int8 if quantization == "int4" else None
    return Forms(of_floats, of_codes, of_precise, num_shards if in_panels else None)


def _coded_product(weight: CodedWeight, role: Role, *, dtype: torch.dtype) -> WeightForm:
    """Make the form of a weight in codes that is widened by torch when it is used."""
    from .coded_forms import CodedProduct

    return CodedProduct(weight, role, dtype=dtype)


class _InPanels:
    """Makes panels of weights in codes, whose module is imported for the first of them."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    @cached_property
    def _forms(self) -> CodedForms:
        from .coded_panels import CodedForms

        return CodedForms(self._dtype)

    def __call__(self, weight: CodedWeight, role: Role, *, whole: WholeWeight) -> WeightForm:
        return self._forms(weight, role, whole=whole)
