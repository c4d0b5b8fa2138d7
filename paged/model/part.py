"""ModelPart: the layers of a model that one process computes, and its shard of each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class TensorGroup(Protocol):
    """The processes that share every layer. All make the same calls in the same order."""

    def gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Return the tensors of all shards, which are alike, one after the other in the order of shards."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` equal shares of every layer's outputs. group: how the shares are exchanged."""

    index: int = 0
    count: int = 1
    group: TensorGroup | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.index < self.count, f"there is no shard {self.index} of {self.count}"

    @property
    def is_whole(self) -> bool:
        """Whether the layers are not divided."""
        return self.count == 1

    def share(self, size: int) -> range:
        """Return this shard's share of so many outputs, which it divides."""
        assert size % self.count == 0, f"{self.count} shards do not divide {size}"
        own = size // self.count
        return range(self.index * own, (self.index + 1) * own)


UNDIVIDED = Shard()


@dataclass(frozen=True, slots=True)
class ModelPart:
    """What one process computes of a model: consecutive layers, of each its shard.

    The part with the first layer has the embedding; that with the last one has the norm and the head.
    """

    layers: range
    num_layers: int  # of the model
    shard: Shard = UNDIVIDED

    @classmethod
    def whole(cls, num_layers: int) -> ModelPart:
        """Return what a process computes that has no others beside it."""
        return cls(range(num_layers), num_layers)

    @property
    def is_first(self) -> bool:
        """Whether the embedding is in this part."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """Whether the final norm and the head are in this part."""
        return self.layers.stop == self.num_layers
