"""Which columns of a layer's states and convolution belong to a shard."""

from __future__ import annotations

from collections.abc import Iterable

from ..architectures.states import StateSpec
from .part import Shard


def own_columns(whole: StateSpec, shard: Shard) -> list[range]:
    """Return the ranges of a convolution's columns that a shard computes, in the shard's order."""
    if whole.kind == "conv":
        return [shard.share(whole.columns)]
    if whole.kind == "mamba2":
        return [own_values(whole, shard, 0), *own_keys(whole, shard, whole.num_values)]
    values = own_values(whole, shard, 2 * whole.num_key_heads * whole.key_dim)
    return [*own_keys(whole, shard, 0), values]


def own_keys(whole: StateSpec, shard: Shard, first: int) -> Iterable[range]:
    """Yield the ranges of a shard's key heads, or groups, in each of two consecutive parts of the columns.

    first: the column at which the first part begins.
    """
    own = shard.kv_heads(whole.num_key_heads)
    for part in range(2):
        yield of_heads(own, whole.key_dim, first + part * whole.num_key_heads * whole.key_dim)


def own_values(whole: StateSpec, shard: Shard, first: int) -> range:
    """Return the range of columns with the values of a shard's heads.

    first: the column at which the values of all heads begin.
    """
    return of_heads(shard.share(whole.num_heads), whole.value_dim, first)


def of_heads(heads: range, size: int, first: int) -> range:
    """Return the range of columns of consecutive heads.

    size: the number of columns of a head. first: the column at which head 0 begins.
    """
    return range(first + heads.start * size, first + heads.stop * size)
