"""Batch: one step as ragged device tensors. All sequences' new tokens are concatenated; nothing is padded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .block_manager import BlockManager
from .scheduler import Schedule

IntArray = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors of one step over num_seqs sequences with num_tokens new tokens between them."""

    token_ids: Tensor  # i64[num_tokens]
    positions: Tensor  # i64[num_tokens]
    rope_lens: Tensor  # i64[num_tokens], the sequence length that dynamic rope scaling goes by
    slot_mapping: Tensor  # i64[num_tokens], where each new token's K and V go
    block_tables: Tensor  # i32[num_seqs, max_blocks_per_seq], 0 behind a sequence's own blocks
    seq_lens: Tensor  # i32[num_seqs], computed and new tokens
    cu_seqlens_q: Tensor  # i32[num_seqs + 1], exclusive prefix sum of the new tokens
    logit_rows: Tensor  # i64[num_logits], the tokens whose logits are sampled from
    max_seqlen_q: int

    @property
    def num_tokens(self) -> int:
        """Rows of every activation."""
        return self.token_ids.shape[0]

    @property
    def num_logits(self) -> int:
        """Rows of the logits."""
        return self.logit_rows.shape[0]

    @classmethod
    def from_schedule(cls, schedule: Schedule, block_manager: BlockManager, device: torch.device) -> Batch:
        """Lay out a schedule whose blocks are allocated."""
        token_ids: list[int] = []
        num_new, computed, prompt_lens, logit_rows, tables = [], [], [], [], []
        for request, n, samples in schedule.entries:
            start = request.num_computed_tokens
            token_ids += request.token_ids[start : start + n]
            num_new.append(n)
            computed.append(start)
            prompt_lens.append(len(request.prompt_token_ids))
            tables.append(block_manager.table(request.request_id))
            if samples:
                logit_rows.append(len(token_ids) - 1)

        new = np.array(num_new, np.int64)
        cu_seqlens_q = np.zeros(len(num_new) + 1, np.int64)
        np.cumsum(new, out=cu_seqlens_q[1:])
        first = np.array(computed, np.int64)
        if len(token_ids) == len(num_new):  # one token each: nothing to repeat
            sequence, positions, rope_lens = np.arange(len(new)), first, np.array(prompt_lens, np.int64)
        else:
            sequence = np.repeat(np.arange(len(new)), new)
            positions = np.arange(len(token_ids)) + (first - cu_seqlens_q[:-1])[sequence]
            rope_lens = np.array(prompt_lens, np.int64)[sequence]
        block_tables = pad_tables(tables)
        size = block_manager.block_size
        slots = block_tables[sequence, positions // size].astype(np.int64) * size + positions % size

        def put(array: IntArray, dtype: Any = np.int64) -> Tensor:
            return torch.from_numpy(array.astype(dtype, copy=False)).to(device, non_blocking=True)

        return cls(
            token_ids=put(np.array(token_ids, np.int64)),
            positions=put(positions),
            # A prompt is rotated for its whole length, a generated token for the length up to it.
            rope_lens=put(np.maximum(rope_lens, positions + 1)),
            slot_mapping=put(slots),
            block_tables=put(block_tables, np.int32),
            seq_lens=put(first + new, np.int32),
            cu_seqlens_q=put(cu_seqlens_q, np.int32),
            logit_rows=put(np.array(logit_rows, np.int64)),
            max_seqlen_q=max(num_new),
        )


def pad_tables(tables: list[Any]) -> NDArray[np.int32]:
    """Block tables, each an array of i32, as the rows of one rectangle with zeros behind them."""
    lengths = np.array([len(table) for table in tables])
    padded = np.zeros((len(tables), int(lengths.max())), np.int32)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.frombuffer(b"".join(tables), np.int32)
    return padded
