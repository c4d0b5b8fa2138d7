"""Choose the form of each weight of a model: as loaded, packed for oneDNN, in panels, or quantised."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .forms import Float32Product, PackedWeight, PlainWeight, TableForm, WeightForm, can_pack
from .quantization import Int4Weight, Int8Weight, require_kernels, require_quantization


class Forms(NamedTuple):
    """The forms of a model's weights. A head tied to the embedding shares the embedding's form.

    The head's form may return float32; the gated form may apply silu(gate) * up itself.
    """

    layers: Callable[[Tensor], WeightForm]
    gated: Callable[[Tensor], WeightForm]  # of the fused gate and up projections
    head: Callable[[Tensor], WeightForm]
    embedding: Callable[[Tensor], TableForm]
    table: Callable[[Tensor], TableForm]  # of weights that are only looked up
    group_size: int | None = None  # inputs of `layers` that share a scale, if in groups


def choose_forms(
    device: torch.device, dtype: torch.dtype, quantization: str | None, *, tied: bool, in_panels: bool
) -> Forms:
    """Choose the forms for weights of this dtype on this device.

    in_panels: multiply by the CPU backend's own kernels rather than torch's.

    A quantised model has its output head in int8, which costs next to nothing in perplexity, and with it a
    tied embedding. An embedding that is not tied stays in floating point, as it is only looked up.

    Raises ConfigError where weights cannot be quantised.
    """
    if quantization is not None:
        require_quantization(quantization, device, dtype)
    group_size = Int4Weight.GROUP if quantization == "int4" else None
    if in_panels:
        from .panels import PANEL_FORMS, Table

        layers = PANEL_FORMS[quantization]
        head = partial(PANEL_FORMS[quantization and "int8"], out_dtype=torch.float32)
        return Forms(layers, partial(layers, gated=True), head, head if tied else Table, Table, group_size)
    if quantization is not None:
        require_kernels(quantization)
        plain = Int4Weight if quantization == "int4" else Int8Weight
        return Forms(plain, plain, Int8Weight, Int8Weight if tied else PlainWeight, PlainWeight, group_size)
    form = PackedWeight if can_pack(device, dtype) else PlainWeight
    if device.type == "cuda" and dtype != torch.float32 and not torch.version.hip:
        return Forms(form, form, Float32Product, Float32Product if tied else PlainWeight, PlainWeight)
    return Forms(form, form, form, PlainWeight, PlainWeight)
