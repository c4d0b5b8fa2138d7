"""ModelPart: the layers of a model that one process computes, and its shard of each of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from ..architectures.spec import AttentionSpec, KVShape

if TYPE_CHECKING:
    from torch import Tensor

    from ..architectures.states import StateSpec


class TensorGroup(Protocol):
    """The processes with the shards of the same layers. All must make the same calls in the same order."""

    def gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Concatenate the tensors of all shards, which have equal shapes, in the order of the shards."""

    def collect(self, tensor: Tensor) -> Tensor | None:
        """Concatenate the tensors along the last dimension at shard 0. Return None at other shards."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` equal shares of every layer's outputs.

    group: exchanges the shares among the processes.
    """

    index: int = 0
    count: int = 1
    group: TensorGroup | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.index < self.count, f"there is no shard {self.index} of {self.count}"

    @property
    def is_whole(self) -> bool:
        """Whether there is only one shard."""
        return self.count == 1

    @property
    def apart(self) -> Shard:
        """This shard without a process group, for planning only."""
        return replace(self, group=None)

    def share(self, size: int) -> range:
        """Return this shard's range of `size` outputs. `count` must divide `size`."""
        assert size % self.count == 0, f"{self.count} shards do not divide {size}"
        own = size // self.count
        return range(self.index * own, (self.index + 1) * own)

    def tokens(self, vocab_size: int) -> range:
        """Return this shard's range of a vocabulary. The last shard's range may be smaller."""
        own = -(-vocab_size // self.count)
        return range(min(self.index * own, vocab_size), min((self.index + 1) * own, vocab_size))

    def kv_heads(self, num_kv_heads: int) -> range:
        """Return this shard's range of KV heads. With more shards than KV heads, shards share a head."""
        if self.count <= num_kv_heads:
            return self.share(num_kv_heads)
        assert self.count % num_kv_heads == 0, f"{num_kv_heads} KV heads do not divide {self.count} shards"
        head = self.index * num_kv_heads // self.count
        return range(head, head + 1)

    def kv_shape(self, shape: KVShape) -> KVShape:
        """Return the shape of K and V that this shard caches for a layer."""
        return replace(shape, num_kv_heads=len(self.kv_heads(shape.num_kv_heads)))

    def attention(self, spec: AttentionSpec) -> AttentionSpec:
        """Return the attention spec of this shard: with its own heads only."""
        return replace(spec, num_heads=len(self.share(spec.num_heads)), kv=self.kv_shape(spec.kv))

    def state(self, spec: StateSpec) -> StateSpec:
        """Return the state spec of this shard: with its own heads, or its own columns of a convolution."""
        if spec.kind == "conv":
            return replace(spec, columns=len(self.share(spec.columns)))
        num_heads = len(self.share(spec.num_heads))
        num_key_heads = len(self.kv_heads(spec.num_key_heads))
        columns = 2 * num_key_heads * spec.key_dim + num_heads * spec.value_dim
        return replace(spec, num_heads=num_heads, num_key_heads=num_key_heads, columns=columns)


UNDIVIDED = Shard()


@dataclass(frozen=True, slots=True)
class ModelPart:
    """The part of a model that one process computes: consecutive layers, and a shard of each.

    The part with the first layer also has the embedding; the part with the last layer has the final norm and
    the output head.
    """

    layers: range
    num_layers: int  # of the model
    shard: Shard = UNDIVIDED

    @classmethod
    def whole(cls, num_layers: int) -> ModelPart:
        """Return the part that is the whole model, for a model in one process."""
        return cls(range(num_layers), num_layers)

    @property
    def apart(self) -> ModelPart:
        """This part without process groups, for planning only."""
        return replace(self, shard=self.shard.apart)

    @property
    def is_first(self) -> bool:
        """Whether the embedding is in this part."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """Whether the final norm and the head are in this part."""
        return self.layers.stop == self.num_layers
