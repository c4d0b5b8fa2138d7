"""Batch: one step as ragged device tensors. All sequences' new tokens are concatenated; nothing is padded."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
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
        # Plain lists: for the few numbers of a decode step, numpy's calls cost more than they save.
        token_ids: list[int] = []
        positions: list[int] = []
        rope_lens: list[int] = []
        slots: list[int] = []
        seq_lens: list[int] = []
        for request, n, table in zip(
            schedule.requests, schedule.num_new_tokens, schedule.block_tables, strict=True
        ):
            start, prompt_len = request.num_computed_tokens, request.num_prompt_tokens
            end = start + n
            seq_lens.append(end)
            # A prompt is rotated for its whole length, a generated token for the length up to it.
            if n == 1:
                token_ids.append(request.token_ids[start])
                positions.append(start)
                rope_lens.append(max(prompt_len, end))
                slots.append(table[start // block_size] * block_size + start % block_size)
            else:
                token_ids += request.token_ids[start:end]
                positions += range(start, end)
                rope_lens += [prompt_len] * (min(prompt_len, end) - start)
                rope_lens += range(max(prompt_len, start) + 1, end + 1)
                slots += _slots(table, start, end, block_size)
        cu_seqlens_q = [0, *accumulate(schedule.num_new_tokens)]
        logit_rows = [cu_seqlens_q[i + 1] - 1 for i in schedule.sampled]

        # Two buffers: each costs a trip to a GPU.
        longs = torch.frombuffer(
            array("q", token_ids + positions + rope_lens + slots + logit_rows), dtype=torch.int64
        )
        tables = pad_tables(schedule.block_tables)
        ints = torch.frombuffer(array("i", seq_lens + cu_seqlens_q) + tables, dtype=torch.int32)
        if device.type != "cpu":
            longs, ints = longs.to(device, non_blocking=True), ints.to(device, non_blocking=True)
        num_seqs, num_tokens = len(seq_lens), len(token_ids)
        by_token = longs.split_with_sizes([num_tokens] * 4 + [len(logit_rows)])
        by_sequence = ints.split_with_sizes([num_seqs, num_seqs + 1, len(tables)])
        return cls(
            token_ids=by_token[0],
            positions=by_token[1],
            rope_lens=by_token[2],
            slot_mapping=by_token[3],
            logit_rows=by_token[4],
            seq_lens=by_sequence[0],
            cu_seqlens_q=by_sequence[1],
            block_tables=by_sequence[2].view(num_seqs, -1),
            max_seqlen_q=max(schedule.num_new_tokens),
        )


def _slots(table: array[int], start: int, end: int, block_size: int) -> list[int]:
    """Where the tokens [start, end) of a sequence go, block by block."""
    slots: list[int] = []
    while start < end:
        index, offset = divmod(start, block_size)
        stop = min(end, start - offset + block_size)
        first = table[index] * block_size + offset
        slots += range(first, first + stop - start)
        start = stop
    return slots


def pad_tables(tables: Sequence[array[int]]) -> array[int]:
    """Block tables as the rows of one rectangle, zeros behind them: [num_seqs * max_blocks_per_seq]."""
    width = max(map(len, tables))
    zeros, rows = array("i", bytes(4 * width)), array("i")
    for table in tables:
        rows += table
        rows += zeros[len(table) :]
    return rows
