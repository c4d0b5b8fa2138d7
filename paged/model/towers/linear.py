"""Linear layers of towers."""

from __future__ import annotations

from ..layers.linear import Linear
from ..weights.loading import Loader


class TowerLinear(Linear):
    """A linear layer of a vision tower. Its weights stay floats in a quantised model."""

    stays_float = True

    def load(self, loader: Loader) -> None:
        super().load(loader.in_floats)
