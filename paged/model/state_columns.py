"""Which columns of a layer's states and convolution are those of a shard."""

from __future__ import annotations

from ..architectures.states import StateSpec
from .part import Shard


def own_columns(whole: StateSpec, shard: Shard) -> list[range]:
    """Return the columns of a convolution that are a shard's, in its order: of its heads in Q, K and V."""
    if whole.kind == "conv":
        return [shard.share(whole.columns)]
    key_heads = shard.kv_heads(whole.num_key_heads)
    num_keys = whole.num_key_heads * whole.key_dim
    return [
        of_heads(key_heads, whole.key_dim, 0),
        of_heads(key_heads, whole.key_dim, num_keys),
        of_heads(shard.share(whole.num_heads), whole.value_dim, 2 * num_keys),
    ]


def of_heads(heads: range, size: int, first: int) -> range:
    """Return the places of heads of a size, of which the first one begins at `first`."""
    return range(first + heads.start * size, first + heads.stop * size)
