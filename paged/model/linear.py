"""Linear, and the forms that its weight may have: as it was loaded, laid out for a CPU, or quantised."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ConfigError
from .quantization import Int4Weight, Int8Weight, require_kernels, require_quantization


class WeightForm(Protocol):
    """A weight [out_features, in_features] that multiplies, made of the plain one."""

    gated: bool  # whether its products are silu(gate) * up

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features], in the dtype of x.

        It may be made to give float32, and half as many outputs, silu(gate) * up: see Forms.
        """


class TableForm(WeightForm, Protocol):
    """A weight [vocab_size, hidden_size] that is looked up, and may be the output head too."""

    def rows(self, indices: Tensor) -> Tensor:
        """i64[n] -> [n, hidden_size], in the dtype of the model."""


class Forms(NamedTuple):
    """The forms of a model's weights. A head that is tied to the embedding has the embedding's.

    A head's may give float32, that of gates apply them.
    """

    layers: Callable[[Tensor], WeightForm]
    gated: Callable[[Tensor], WeightForm]  # of a layer's gates and what they gate
    head: Callable[[Tensor], WeightForm]
    embedding: Callable[[Tensor], TableForm]
    group: int | None = None  # inputs of `layers` that share a scale


class Linear(nn.Module):
    """y = x Wᵀ + b, with nothing initialised: the checkpoint fills it, then `take_form` makes it callable.

    gated: the first half of its outputs are gates of the second, and its form may apply them: see `is_gated`.
    """

    form: WeightForm

    def __init__(self, in_features: int, out_features: int, *, bias: bool, gated: bool = False) -> None:
        super().__init__()
        self.in_features, self.gated = in_features, gated
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:  # [num_tokens, in_features] -> [num_tokens, out_features]
        return self.form(x, self.bias)

    def take_form(self, form: Callable[[Tensor], WeightForm]) -> None:
        """Trade the weight, once it is loaded, for one in this form."""
        self.form = form(self.weight.detach())
        del self.weight

    @property
    def is_gated(self) -> bool:
        """Whether what comes out is silu(gate) * up."""
        return self.form.gated

    def hf_tensors(self) -> dict[str, Tensor]:
        """The parameter of a linear that is not fused, under its Hugging Face name."""
        return {"weight": self.weight}


class PlainWeight:
    """The weight as it was loaded."""

    gated = False

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight, bias)

    def rows(self, indices: Tensor) -> Tensor:
        """See TableForm."""
        return F.embedding(indices, self.weight)


class PackedWeight:
    """Laid out as oneDNN reads it: 2 to 3 times faster up to a few dozen rows. Where `can_pack` holds."""

    gated = False
    # Rows that the layout is chosen for; measured, 1 to 512 make no difference beyond noise.
    FOR_ROWS = 16

    def __init__(self, weight: Tensor) -> None:
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, self.FOR_ROWS)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")
        return out


def choose_forms(
    device: torch.device, dtype: torch.dtype, quantization: str | None, *, tied: bool, in_panels: bool
) -> Forms:
    """The forms that weights of this dtype get on this device; in_panels as the CPU's own kernels take them.

    A quantised model has its output head in int8, which costs next to nothing in perplexity, and with it the
    embedding where the two are tied. An embedding alone is only looked up, and stays in floating point.

    Raises ConfigError where weights cannot be quantised.
    """
    if quantization is not None:
        require_quantization(quantization, device, dtype)
    group = Int4Weight.GROUP if quantization == "int4" else None
    if in_panels:
        from .panels import PANEL_FORMS, Table

        layers = PANEL_FORMS[quantization]
        head = partial(PANEL_FORMS[quantization and "int8"], out_dtype=torch.float32)
        return Forms(layers, partial(layers, gated=True), head, head if tied else Table, group)
    if quantization is not None:
        require_kernels(quantization)
        plain = Int4Weight if quantization == "int4" else Int8Weight
        return Forms(plain, plain, Int8Weight, Int8Weight if tied else PlainWeight, group)
    form = PackedWeight if can_pack(device, dtype) else PlainWeight
    return Forms(form, form, form, PlainWeight)


def require_whole_groups(model: nn.Module, forms: Forms) -> None:
    """Raise ConfigError for a layer whose inputs int4 cannot divide into groups."""
    group = forms.group
    if group is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.in_features % group and name != "head":
            raise ConfigError(
                f"quantization 'int4' divides inputs into groups of {group}, and {name} has "
                f"{module.in_features}; use quantization='int8'"
            )


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch packs linears on this CPU: what does it is private, so it is tried first."""
    if device.type != "cpu" or dtype == torch.float16 or not _has_onednn():
        return False
    x = torch.arange(64, dtype=dtype).view(2, 32)
    try:
        return torch.equal(PackedWeight(torch.eye(32, dtype=dtype))(x, None), x)
    except (AttributeError, RuntimeError, TypeError):
        return False


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
