"""Linear layers and embeddings, whose weights take a form when they are loaded."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ..weights.forms import TableForm, WeightForm


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


def split_rows(names: list[str], fused: Linear, sizes: list[int]) -> dict[str, Tensor]:
    """Return views of the rows of weight and bias that are tensors of their own in a checkpoint."""
    parts = dict(zip([f"{name}.weight" for name in names], torch.split(fused.weight, sizes), strict=True))
    if fused.bias is not None:
        parts |= zip([f"{name}.bias" for name in names], torch.split(fused.bias, sizes), strict=True)
    return parts


def require_whole_groups(model: nn.Module, size: int | None) -> None:
    """Raise ConfigError for a layer whose inputs do not divide into int4's groups of this size."""
    if size is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.in_features % size and name != "head":
            raise ConfigError(
                f"quantization 'int4' divides inputs into groups of {size}, and {name} has "
                f"{module.in_features}; use quantization='int8'"
            )
