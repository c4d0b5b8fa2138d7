"""Linear layers of towers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ...checkpoints.stored import StoredRows
from ..layers.linear import Linear
from ..weights.loading import Loadable, Loader

# Of each of several outputs that are concatenated, the ranges that a shard has.
Shares = Sequence[Sequence[range]]


class TowerLinear(Linear):
    """A linear layer of a vision tower. Its weights stay floats in a quantised model."""

    stays_float = True

    def load(self, loader: Loader) -> None:
        super().load(loader.in_floats)


class NamelessParameter(Loadable):
    """A parameter that is stored under the bare name of a module's part, without ".weight".

    shape: the shape of the stored tensor.
    """

    def __init__(self, name: str, *shape: int) -> None:
        module, _, self._own = name.rpartition(".")
        super().__init__(StoredRows({module: shape[0]}))
        self.register_parameter(self._own, nn.Parameter(torch.empty(shape), requires_grad=False))

    def take(self) -> Tensor:
        """Return the parameter once it is loaded, and leave it to the caller."""
        found: Tensor = getattr(self, self._own).detach()
        delattr(self, self._own)
        return found


class _Bounds(Loadable):
    """The least and largest inputs and outputs of a linear layer."""

    def __init__(self, name: str) -> None:
        super().__init__(StoredRows({name: 1}))
        for own in ("input_min", "input_max", "output_min", "output_max"):
            self.register_parameter(own, nn.Parameter(torch.empty(()), requires_grad=False))


class ClippedLinears(nn.Module):
    """Linear layers over the same inputs, whose outputs are concatenated. Inputs and outputs of each are
    clamped.

    outputs: how many outputs each has, by its name, behind which `linear` stands.
    indices: the order in which the outputs of each are read.
    shares: the ranges of outputs of each that a shard has; None: all.
    """

    def __init__(
        self,
        in_features: int,
        outputs: Mapping[str, int],
        linear: str,
        indices: Sequence[Tensor | None],
        shares: Shares | None,
        *,
        bias: bool,
    ) -> None:
        super().__init__()
        self.bounds = nn.ModuleList(map(_Bounds, outputs))
        stored = [
            StoredRows({name + linear: count}, index)
            for (name, count), index in zip(outputs.items(), indices, strict=True)
        ]
        if shares is not None:
            stored = [each.take(*share) for each, share in zip(stored, shares, strict=True)]
        self.linear = nn.ModuleList(TowerLinear(in_features, each, bias=bias) for each in stored)

    def forward(self, x: Tensor) -> Tensor:
        made = []
        for bounds, linear in zip(self.bounds, self.linear, strict=True):
            clamped = x.clamp(cast(Tensor, bounds.input_min), cast(Tensor, bounds.input_max))
            out: Tensor = linear(clamped)
            made.append(out.clamp_(cast(Tensor, bounds.output_min), cast(Tensor, bounds.output_max)))
        return made[0] if len(made) == 1 else torch.cat(made, dim=1)
