"""The norms of a decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...architectures.spec import NormSpec
from ...checkpoints.stored import StoredRows
from ..weights.loading import Loadable

if TYPE_CHECKING:
    from ...kernels.operations import Kernels


class RMSNorm(Loadable):
    """Root mean square normalisation, see `kernels.rms_norm`.

    name: the name of its weight in a checkpoint; None if the norm has no weight.
    index: the order in which the entries of the stored weight are read.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        kernels: Kernels,
        name: str | None,
        *,
        index: Tensor | None = None,
        unit_offset: bool = False,
    ) -> None:
        super().__init__(StoredRows({} if name is None else {name: size}, index))
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps
        self.unit_offset = unit_offset
        self.kernels = kernels

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps, residual, unit_offset=self.unit_offset)

    def into(self, x: Tensor, out: Tensor, *, add: bool = False) -> None:
        """Write the norm of x into `out`, or add it to `out`; see `kernels.rms_norm_into`."""
        self.kernels.rms_norm_into(x, self.weight, self.eps, out, unit_offset=self.unit_offset, add=add)


class LayerNorm(Loadable):
    """Normalisation to mean 0 and variance 1, see `kernels.layer_norm`.

    index: the order in which the entries of the stored weight and bias are read.
    """

    def __init__(
        self, size: int, eps: float, kernels: Kernels, name: str, *, index: Tensor | None = None
    ) -> None:
        super().__init__(StoredRows({name: size}, index))
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps
        self.kernels = kernels

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.kernels.layer_norm(x, self.weight, self.bias, self.eps, residual)


def new_norm(spec: NormSpec, size: int, kernels: Kernels, name: str) -> RMSNorm | LayerNorm:
    """Make a norm of vectors of this size.

    name: its name in a checkpoint.
    """
    if spec.subtracts_mean:
        return LayerNorm(size, spec.eps, kernels, name)
    return RMSNorm(size, spec.eps, kernels, name, unit_offset=spec.unit_offset)
