"""What the shards of a layer exchange. Nothing is added up: each number comes from where it was computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.steps import call_within_step
from .part import Shard, TensorGroup

if TYPE_CHECKING:
    pass


def group_of(shard: Shard) -> TensorGroup:
    """Return the process group of a shard."""
    assert shard.group is not None, f"shard {shard.index} of {shard.count} was made without a group"
    return shard.group


def gather(x: Tensor, shard: Shard) -> Tensor:  # [n, share of columns] -> [n, columns]
    """Gather the columns of x from all shards."""
    if shard.is_whole:
        return x
    out = x.new_empty(x.shape[0], x.shape[1] * shard.count)

    def exchange(x: Tensor, out: Tensor) -> None:
        out.copy_(group_of(shard).gather(x))

    call_within_step(exchange, x, out)
    return out


def collect_logits(x: Tensor, shard: Shard, vocab_size: int) -> Tensor:  # [n, share] -> [n, vocab_size]
    """Gather the logits of all shards on the first shard. Other shards return their own columns."""
    if shard.is_whole:
        return x
    widest = len(Shard(0, shard.count).tokens(vocab_size))
    out = x.new_empty(x.shape[0], vocab_size) if shard.index == 0 else x

    def exchange(x: Tensor, out: Tensor) -> None:
        padded = torch.nn.functional.pad(x, (0, widest - x.shape[1]))
        found = group_of(shard).collect(padded)
        if found is not None:
            out.copy_(found[:, :vocab_size])

    call_within_step(exchange, x, out)
    return out
