"""Linear layers of towers."""

from __future__ import annotations

from ..layers.linear import Linear
from ..weights.loading import Loader


class TowerLinear(Linear):
    """A linear layer whose weights stay floats in a quantised model, because a tower is small and would lose
    much.
    """

    stays_float = True

    def load(self, loader: Loader) -> None:
        super().load(loader.in_floats)
