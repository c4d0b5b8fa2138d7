"""Choose the form of each weight of a model: as loaded, packed for oneDNN, in panels, or quantised."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .layers.linear import Linear, PlainWeight, TableForm, WeightForm
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


def require_whole_groups(model: nn.Module, forms: Forms) -> None:
    """Raise ConfigError for a layer whose inputs do not divide into int4's groups."""
    size = forms.group_size
    if size is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.in_features % size and name != "head":
            raise ConfigError(
                f"quantization 'int4' divides inputs into groups of {size}, and {name} has "
                f"{module.in_features}; use quantization='int8'"
            )


class Float32Product(PlainWeight):
    """A weight of 16 bits whose product is float32, as cuBLAS sums it: not rounded, and converted again."""

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out = torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        return out if bias is None else out.add_(bias)


class PackedWeight(WeightForm):
    """The weight in oneDNN's layout: 2 to 3 times faster up to a few dozen rows. Requires `can_pack`."""

    gated = is_recordable = False
    # The number of rows that oneDNN chooses the layout for; 1 to 512 measure the same within noise.
    FOR_ROWS = 16

    def __init__(self, weight: Tensor) -> None:
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, self.FOR_ROWS)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")
        return out


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this torch packs linear layers on this CPU.

    The operations are private to torch, so they are tried out rather than assumed.
    """
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if device.type != "cpu" or dtype == torch.float16 or not has_onednn:
        return False
    x = torch.arange(64, dtype=dtype).view(2, 32)
    try:
        return torch.equal(PackedWeight(torch.eye(32, dtype=dtype))(x, None), x)
    except (AttributeError, RuntimeError, TypeError):
        return False
