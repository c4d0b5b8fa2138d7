"""Lookups in a table that is divided among shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.steps import call_within_step
from .exchanges import group_of
from .part import Shard

if TYPE_CHECKING:
    from ..kernels.operations import Kernels


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
