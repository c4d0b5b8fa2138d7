"""Choose the form of each float weight of a model: as loaded, packed for oneDNN, in panels, or quantised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from .coded import CodedWeight, Weight
from .forms import (
    Float32Product,
    Float32Weight,
    JoinedForm,
    PackedWeight,
    PlainWeight,
    Role,
    WeightForm,
    can_pack,
)
from .whole import WholeWeight

MakeForm = Callable[[Tensor], WeightForm]  # of a weight in floats
MakeCodedForm = Callable[[CodedWeight, Role], WeightForm]


@dataclass(frozen=True)
class Forms:
    """How to make the form of a weight, by what is stored of it and by its role.

    Those of embeddings and tables are of a TableForm. The head's may return float32, that of "gated" may
    apply silu(gate) * up itself.

    of_precise: rows of a layer that lose too much in its form; None: no rows do.
    whole: the weight that a form is made of now, which the loader sets.
    """

    of_floats: Mapping[Role, MakeForm]
    of_codes: MakeCodedForm
    of_precise: MakeForm | None = None
    whole: WholeWeight = field(default_factory=WholeWeight)

    def make(self, weight: Weight, role: Role, num_precise: int = 0) -> WeightForm:
        """Make the form of a weight. num_precise: how many of its last rows `of_precise` is for."""
        if isinstance(weight, CodedWeight):
            return self.of_codes(weight, role)
        make = self.of_floats[role]
        num_others, num_precise = self.split(len(weight), num_precise)
        if not num_precise:
            return make(weight)
        assert self.of_precise is not None
        precise = self.of_precise(weight[num_others:])
        if not num_others:
            return precise
        return JoinedForm([(make(weight[:num_others]), num_others), (precise, num_precise)])

    def split(self, num_rows: int, num_precise: int) -> tuple[int, int]:
        """Return how many rows of a weight in floats have the form of their role, and how many the other."""
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

    in_panels: multiply by the CPU backend's own kernels rather than torch's. has_coded_linear: the backend
        has kernels for weights in codes. num_shards: into how many each weight is divided.

    A quantised model has its output head in int8, which costs next to nothing in perplexity, and with it a
    tied embedding. An embedding that is not tied stays in floating point, as it is only looked up. In a model
    in int4 the weights that cost most are in int8 too: those of the values of attention, which are few, and
    `down` in half of the layers.

    Raises ConfigError where weights cannot be quantised.
    """
    from .coded_forms import CodedProduct
    from .quantization import Int4Weight, Int8Weight, require_kernels, require_quantization

    if quantization is not None and not has_coded_linear:
        require_quantization(quantization, device, dtype)
    whole = WholeWeight(num_shards)
    layer: MakeForm
    gated: MakeForm
    of_codes: MakeCodedForm = partial(CodedProduct, dtype=dtype)
    head: MakeForm
    table: MakeForm = PlainWeight
    router: MakeForm = Float32Weight
    int8: MakeForm = Int8Weight
    if has_coded_linear:
        from .gpu_codes import coded_form, quantized_form

        of_codes = partial(coded_form, dtype=dtype)
    if in_panels:
        from .panels import PANEL_FORMS, CodedForms, Table

        layer = partial(PANEL_FORMS[quantization], whole=whole)
        int8 = PANEL_FORMS["int8"]
        gated = partial(layer, gated=True)
        head = partial(PANEL_FORMS[quantization and "int8"], out_dtype=torch.float32, whole=whole)
        table = partial(Table, whole=whole)
        router = partial(PANEL_FORMS[None], out_dtype=torch.float32)
        of_codes = CodedForms(dtype, whole)
    elif quantization is not None and has_coded_linear:
        layer = gated = partial(quantized_form, quantization, role="layer")
        int8 = partial(quantized_form, "int8", role="layer")
        head = partial(quantized_form, "int8", role="head")
    elif quantization is not None:
        require_kernels(quantization)
        layer = gated = Int4Weight if quantization == "int4" else Int8Weight
        head = Int8Weight
    else:
        layer = gated = head = PackedWeight if can_pack(device, dtype) else PlainWeight
        if device.type == "cuda" and dtype != torch.float32 and not torch.version.hip:
            head = Float32Product
    # A weight that is packed for oneDNN cannot be looked up.
    embedding = head if tied and head is not PackedWeight else table
    of_floats: dict[Role, MakeForm] = {
        "layer": layer,
        "gated": gated,
        "router": router,
        "head": head,
        "embedding": embedding,
        "table": table,
    }
    return Forms(of_floats, of_codes, int8 if quantization == "int4" else None, whole)
