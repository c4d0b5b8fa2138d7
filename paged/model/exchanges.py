"""What the shards of a layer exchange. Nothing is added up: each number comes from where it was computed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels.backend import Kernels
from ..kernels.steps import call_within_step
from .part import Shard, TensorGroup


def group_of(shard: Shard) -> TensorGroup:
    """Return the process group through which a shard exchanges tensors."""
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
    """Gather the logits of all shards on the first shard, the driver. Others get their own columns."""
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


def look_up(
    rows_of: Callable[[Tensor], Tensor],  # this shard's rows of a table, i64[n] -> [n, width]
    token_ids: Tensor,  # i64[n]
    like: Tensor,  # a row of the whole table, on any device
    num_rows: int,  # of the whole table
    shard: Shard,
    kernels: Kernels,
) -> Tensor:  # [n, width]
    """Look up rows of a table that is divided among shards. Each row comes from the shard that holds it."""
    own = shard.tokens(num_rows)
    widest = len(Shard(0, shard.count).tokens(num_rows))
    out = token_ids.new_empty(len(token_ids), len(like), dtype=like.dtype)

    def exchange(token_ids: Tensor, out: Tensor) -> None:
        places = (token_ids - own.start).clamp_(0, len(own) - 1)
        found = group_of(shard).gather(rows_of(places), dim=0)
        places = torch.arange(len(token_ids), device=token_ids.device)
        kernels.take_rows(found, places + token_ids // widest * len(token_ids), out)

    call_within_step(exchange, token_ids, out)
    return out
