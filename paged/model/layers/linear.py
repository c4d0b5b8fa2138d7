"""Linear layers and embeddings, whose weights take a form when they are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn

from ...checkpoints.stored import StoredRows
from ..part import UNDIVIDED, Shard
from ..weights.forms import Role, TableForm, WeightForm
from ..weights.loading import Loadable, Loader

if TYPE_CHECKING:
    from ...kernels.operations import Kernels


class AddsAdapters(Protocol):
    """The interface of `lora.LoraLayer`, so that models without adapters need not import that module."""

    def add(self, x: Tensor, out: Tensor, slots: Tensor) -> None:
        """Add the product of x and each token's adapter to the layer's output."""


class Linear(Loadable):
    """y = x Wᵀ + b. The layer can be called once its weight has been converted to a `WeightForm`.

    role: "gated" if the first half of the outputs are gates for the second half; the form may apply the gates
        itself.
    num_precise: in an int4 model, the weights of this many last outputs are in int8.
    lora: the matrices of LoRA adapters; None: the layer takes none.
    """

    form: WeightForm
    role: Role
    stays_float = False  # whether it is not quantised where the model is

    def __init__(
        self,
        in_features: int,
        stored: StoredRows,
        *,
        bias: bool,
        role: Role = "layer",
        num_precise: int = 0,
    ) -> None:
        super().__init__(stored)
        self.in_features = in_features
        self.role = role
        self.num_precise = num_precise
        self.lora: AddsAdapters | None = None
        self.weight = nn.Parameter(torch.empty(stored.num_rows, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(stored.num_rows), requires_grad=False) if bias else None

    def forward(self, x: Tensor, adapters: Tensor | None = None) -> Tensor:  # -> [num_tokens, out_features]
        """Multiply x [num_tokens, in_features] by the weight.

        adapters: see `Batch`.
        """
        out = self.form(x, self.bias)
        if adapters is not None and self.lora is not None:
            self.lora.add(x, out, adapters)
        return out

    def load(self, loader: Loader) -> None:
        if self.bias is not None:
            self.bias = loader.parameter(self.stored, "bias", self.bias)
        self.take_form(loader.form(self.stored, self.weight, self.role, self.num_precise))

    def take_form(self, form: WeightForm) -> None:
        """Replace the weight parameter by a `WeightForm`."""
        self.form = form
        del self.weight
        if self.bias is not None:
            form.lay_out(self.bias.detach())


class Embedding(Loadable):
    """Looks up token ids in a table. As in `Linear`, the weight is converted to a `WeightForm` when loaded.

    shard: the shard of the rows that this process holds.
    """

    form: TableForm
    role: Role

    def __init__(
        self, stored: StoredRows, width: int, role: Role, kernels: Kernels, shard: Shard = UNDIVIDED
    ) -> None:
        self.num_rows = stored.num_rows
        self.kernels = kernels
        self.shard = shard
        own = stored if shard.is_whole else stored.take(shard.tokens(stored.num_rows))
        super().__init__(own)
        self.role = role
        self.weight = nn.Parameter(torch.empty(own.num_rows, width), requires_grad=False)
        self.row = self.weight[0]  # on the meta device: what a row is like

    def forward(self, token_ids: Tensor) -> Tensor:  # i64[num_tokens] -> [num_tokens, width]
        if self.shard.is_whole:
            return self.form.rows(token_ids)
        from ..divided_table import look_up

        return look_up(self.form.rows, token_ids, self.row, self.num_rows, self.shard, self.kernels)

    def load(self, loader: Loader) -> None:
        self.form = cast(TableForm, loader.form(self.stored, self.weight, self.role))
        del self.weight
