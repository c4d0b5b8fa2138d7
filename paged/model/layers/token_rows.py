"""TokenRows: what the tokens of a step have beside their hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ...kernels.backend import Kernels
from .rotary import Angles


class TokenRows(NamedTuple):
    """Values that every layer gets for each token: row i belongs to token i.

    angles: of each rotary embedding of the model.
    inputs: of all layers, see PerLayerEmbeddings; None: the model has none.
    real_count: as of a `Batch`.
    """

    angles: Sequence[Angles]
    inputs: Tensor | None
    real_count: Tensor | None = None

    def take(self, indices: Tensor, kernels: Kernels) -> TokenRows:
        """Return the rows with these indices, i64[n]."""
        inputs = None if self.inputs is None else kernels.take_rows(self.inputs, indices)
        return TokenRows([angles.take(indices, kernels) for angles in self.angles], inputs)
