"""Linear layers, embeddings, and the forms that their weights may take. `weight_forms` chooses the form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class WeightForm(Protocol):
    """A weight [out_features, in_features], laid out for the product y = x Wᵀ + b."""

    gated: bool  # whether the product is silu(gate) * up, which has half as many columns

    @property
    def is_recordable(self) -> bool:
        """Whether it launches our kernels only, which a recorded step can replay."""

    def lay_out(self, bias: Tensor) -> None:  # noqa: ARG002
        """Prepare for this bias, which every product will add. Most forms have nothing to do."""
        return

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply [num_tokens, in_features] to [num_tokens, out_features].

        The result has the dtype of x, or float32 if the form was made to return it.
        """


class TableForm(WeightForm, Protocol):
    """A weight [vocab_size, hidden_size] that also serves as an embedding table."""

    def rows(self, indices: Tensor) -> Tensor:
        """Look up i64[n] -> [n, hidden_size], in the dtype of the model."""


class Linear(nn.Module):
    """y = x Wᵀ + b. The weight is loaded into `weight`; after `take_form` the layer can be called.

    gated: the first half of the outputs are the gates of the second; the weight's form may apply them.
    """

    form: WeightForm

    def __init__(self, in_features: int, out_features: int, *, bias: bool, gated: bool = False) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.gated = gated
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:  # [num_tokens, in_features] -> [num_tokens, out_features]
        return self.form(x, self.bias)

    def take_form(self, form: Callable[[Tensor], WeightForm]) -> None:
        """Replace the loaded weight by its form."""
        self.form = form(self.weight.detach())
        del self.weight
        if self.bias is not None:
            self.form.lay_out(self.bias.detach())


class Embedding(nn.Module):
    """Lookup of token ids in a table. Like `Linear`, it is loaded and then takes a form."""

    form: TableForm

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:  # i64[num_tokens] -> [num_tokens, hidden_size]
        return self.form.rows(token_ids)

    def take_form(self, form: Callable[[Tensor], TableForm]) -> None:
        """Replace the loaded weight by its form."""
        self.form = form(self.weight.detach())
        del self.weight


class PlainWeight(TableForm):
    """The weight as it was loaded."""

    gated = is_recordable = False

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight, bias)

    def rows(self, indices: Tensor) -> Tensor:
        return F.embedding(indices, self.weight)


def split_rows(names: list[str], fused: Linear, sizes: list[int]) -> dict[str, Tensor]:
    """Return views of the rows of weight and bias that are tensors of their own in a checkpoint."""
    parts = dict(zip([f"{name}.weight" for name in names], torch.split(fused.weight, sizes), strict=True))
    if fused.bias is not None:
        parts |= zip([f"{name}.bias" for name in names], torch.split(fused.bias, sizes), strict=True)
    return parts
