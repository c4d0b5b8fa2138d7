"""The norms of a decoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...kernels.backend import Kernels
from ..spec import NormSpec


class RMSNorm(nn.Module):
    """Root mean square normalisation, see `kernels.rms_norm`."""

    def __init__(self, size: int, eps: float, kernels: Kernels, *, unit_offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps
        self.unit_offset = unit_offset
        self.kernels = kernels

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps, residual, unit_offset=self.unit_offset)

    def into(self, x: Tensor, out: Tensor, *, add: bool = False) -> None:
        """Write the norm of x into `out`, or add it, see `kernels.rms_norm_into`."""
        self.kernels.rms_norm_into(x, self.weight, self.eps, out, unit_offset=self.unit_offset, add=add)


class LayerNorm(nn.Module):
    """Normalisation to mean 0 and variance 1, see `kernels.layer_norm`."""

    def __init__(self, size: int, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps
        self.kernels = kernels

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.kernels.layer_norm(x, self.weight, self.bias, self.eps, residual)


def new_norm(spec: NormSpec, size: int, kernels: Kernels) -> RMSNorm | LayerNorm:
    """Make a norm over vectors of this size."""
    if spec.subtracts_mean:
        return LayerNorm(size, spec.eps, kernels)
    return RMSNorm(size, spec.eps, kernels, unit_offset=spec.unit_offset)
