"""The forms that a weight may take in memory, and those for torch's products of floats."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from ...kernels.operations import Kernels


# What a weight is for: a layer; gate and up in one; a router, whose products are float32; the output head;
# the embedding of tokens; a table that is only looked up. A head tied to the embedding shares its form.
Role = Literal["layer", "gated", "router", "head", "embedding", "table"]


class WeightForm(Protocol):
    """A weight [out_features, in_features] in memory, laid out for the product y = x Wᵀ + b."""

    gated: bool  # whether the product is silu(gate) * up, which has half as many columns

    @property
    def is_recordable(self) -> bool:
        """Whether steps with this product can be recorded: it must not launch torch operations."""

    def lay_out(self, bias: Tensor) -> None:  # noqa: ARG002
        """Convert the bias to the order of the weight. Most forms change nothing."""
        return

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply [num_tokens, in_features] to [num_tokens, out_features].

        The result has the dtype of x, or float32 if the form was made to return it.
        """

    def store(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Store the product in `out`, whose rows may be apart. A recordable form stores it directly."""
        out.copy_(self(x, bias))

    def of_experts(
        self,
        forms: Sequence[WeightForm],
        biases: Sequence[Tensor] | None,
        kernels: Kernels,
    ) -> ExpertsForm:
        """Combine the weights of all experts into one form. This form is the first expert's.

        By default each expert has a product of its own.
        """
        return EachExpert(forms, biases, kernels)


class ExpertsForm(Protocol):
    """The weights of all experts, laid out for products of rows that are sorted by expert."""

    gated: bool  # as that of a WeightForm
    is_recordable: bool

    def __call__(self, x: Tensor, offsets: Tensor, sources: Tensor | None) -> Tensor:
        """Multiply rows by the weights of their experts, see `reference.grouped_linear`."""


class EachExpert(ExpertsForm):
    """Weights of all experts in any forms. Each is multiplied separately.

    Some may be gated and others not, because the gate and up of one expert may be stored in two formats.
    """

    is_recordable = False

    def __init__(
        self, forms: Sequence[WeightForm], biases: Sequence[Tensor] | None, kernels: Kernels
    ) -> None:
        self.forms = forms
        self.biases = biases
        self.gated = any(form.gated for form in forms)
        self._silu_and_mul = kernels.silu_and_mul

    def __call__(self, x: Tensor, offsets: Tensor, sources: Tensor | None) -> Tensor:
        bounds = offsets.tolist()
        rows = x if sources is None else x.index_select(0, sources)
        products = [
            self._product(expert, rows[start:end])
            for expert, (start, end) in enumerate(pairwise(bounds))
            if end > start
        ]
        return torch.cat(products)

    def _product(self, expert: int, rows: Tensor) -> Tensor:
        form = self.forms[expert]
        product = form(rows, None if self.biases is None else self.biases[expert])
        return self._silu_and_mul(product) if self.gated and not form.gated else product


class StackedExperts(ExpertsForm):
    """Stacked weights of all experts in their loaded dtype, for the kernels of a GPU."""

    gated = is_recordable = False

    def __init__(self, weight: Tensor, bias: Tensor | None, kernels: Kernels) -> None:
        self.weight = weight
        self.bias = bias
        self.kernels = kernels

    def __call__(self, x: Tensor, offsets: Tensor, sources: Tensor | None) -> Tensor:
        return self.kernels.grouped_linear(x, self.weight, offsets, sources, self.bias)


class TableForm(WeightForm, Protocol):
    """A weight [vocab_size, hidden_size] that also serves as an embedding table."""

    def rows(self, indices: Tensor) -> Tensor:
        """Look up rows: i64[n] -> [n, hidden_size], in the dtype of the model."""


class PlainWeight(TableForm):
    """A weight as it was loaded, multiplied by torch."""

    gated = is_recordable = False

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight, bias)

    def rows(self, indices: Tensor) -> Tensor:
        return F.embedding(indices, self.weight)

    def of_experts(
        self, forms: Sequence[WeightForm], biases: Sequence[Tensor] | None, kernels: Kernels
    ) -> ExpertsForm:
        """Stack the weights of all experts. Each form then frees its own, so that one at a time is held
        twice.
        """
        plain = [form for form in forms if isinstance(form, PlainWeight)]
        if not kernels.has_grouped_linear or len(plain) < len(forms):
            return EachExpert(forms, biases, kernels)
        stack = self.weight.new_empty(len(forms), *self.weight.shape)
        for own, form in zip(stack, plain, strict=True):
            own.copy_(form.weight)
            form.weight = own
        return StackedExperts(stack, None if biases is None else torch.stack([*biases]), kernels)


class Float32Weight(PlainWeight):
    """A weight in float32 with float32 products for x of any dtype, as for a router's logits."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight.float())

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x.float(), self.weight, None if bias is None else bias.float())


class Float32Product(PlainWeight):
    """A 16-bit weight whose product stays in float32, as cuBLAS computes it, without rounding."""

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out = torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        return out if bias is None else out.add_(bias)
