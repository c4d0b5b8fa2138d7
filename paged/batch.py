"""Batch: one step as ragged device tensors. All sequences' new tokens are concatenated; nothing is padded."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .scheduler import Schedule


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
    def from_schedule(cls, schedule: Schedule, block_size: int, device: torch.device) -> Batch:
        """Lay out a schedule whose blocks are allocated."""
        token_ids: list[int] = []
        for request, n in zip(schedule.requests, schedule.num_new_tokens, strict=True):
            start = request.num_computed_tokens
            token_ids += request.token_ids[start : start + n]
        num_seqs, num_tokens = len(schedule.requests), len(token_ids)
        computed = np.array([request.num_computed_tokens for request in schedule.requests])
        prompt_lens = np.array([request.num_prompt_tokens for request in schedule.requests])
        cu_seqlens_q = np.array([0, *accumulate(schedule.num_new_tokens)])
        sequence = np.arange(num_seqs)
        positions = computed
        if num_tokens > num_seqs:  # else one token each: nothing to repeat
            sequence = sequence.repeat(schedule.num_new_tokens)
            positions = np.arange(num_tokens) + (computed - cu_seqlens_q[:-1])[sequence]
            prompt_lens = prompt_lens[sequence]
        block_tables = pad_tables(schedule.block_tables)
        blocks = block_tables.take(sequence * block_tables.shape[1] + positions // block_size)
        logit_rows = cu_seqlens_q[1:][schedule.sampled] - 1

        # Two buffers: each costs a trip to a GPU.
        by_token = [
            token_ids,
            positions,
            # A prompt is rotated for its whole length, a generated token for the length up to it.
            np.maximum(prompt_lens, positions + 1),
            blocks * np.int64(block_size) + positions % block_size,
            logit_rows,
        ]
        by_sequence = [(computed + schedule.num_new_tokens), cu_seqlens_q, block_tables.ravel()]
        longs, ints = (
            torch.from_numpy(np.concatenate(parts, dtype=dtype, casting="same_kind"))
            for parts, dtype in ((by_token, np.int64), (by_sequence, np.int32))
        )
        if device.type != "cpu":
            longs, ints = longs.to(device, non_blocking=True), ints.to(device, non_blocking=True)
        sizes = [num_tokens] * 4 + [len(logit_rows)]
        tokens, positions_, rope_lens, slot_mapping, logit_rows_ = longs.split_with_sizes(sizes)
        seq_lens, cu_seqlens_q_, tables = ints.split_with_sizes([num_seqs, num_seqs + 1, block_tables.size])
        return cls(
            token_ids=tokens,
            positions=positions_,
            rope_lens=rope_lens,
            slot_mapping=slot_mapping,
            block_tables=tables.view(num_seqs, -1),
            seq_lens=seq_lens,
            cu_seqlens_q=cu_seqlens_q_,
            logit_rows=logit_rows_,
            max_seqlen_q=max(schedule.num_new_tokens),
        )


def pad_tables(tables: Sequence[array[int]]) -> NDArray[np.int32]:
    """Block tables as the rows of one rectangle, zeros behind them: i32[num_seqs, max_blocks_per_seq]."""
    width = 4 * max(map(len, tables))
    # As bytes: a numpy assignment for each row, or one through a mask, takes 3 times as long.
    rows = [table.tobytes().ljust(width, b"\0") for table in tables]
    return np.frombuffer(bytearray().join(rows), np.int32).reshape(len(tables), -1)
