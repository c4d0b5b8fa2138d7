"""Batch: one step as ragged device tensors. All sequences' new tokens are concatenated; nothing is padded."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
        block_tables = pad_tables(schedule.block_tables)
        new = np.array(schedule.num_new_tokens)
        computed = np.array([request.num_computed_tokens for request in schedule.requests])
        prompt_lens = np.array([len(request.prompt_token_ids) for request in schedule.requests])
        cu_seqlens_q = np.zeros(num_seqs + 1, np.int64)
        new.cumsum(out=cu_seqlens_q[1:])
        sequence = np.arange(num_seqs)
        positions = computed
        if num_tokens > num_seqs:  # else one token each: nothing to repeat
            sequence = sequence.repeat(new)
            positions = np.arange(num_tokens) + (computed - cu_seqlens_q[:-1])[sequence]
            prompt_lens = prompt_lens[sequence]
        # One row a tensor: on a GPU they cross the bus together.
        by_token = np.empty((4, num_tokens), np.int64)
        by_token[0] = token_ids
        by_token[1] = positions
        # A prompt is rotated for its whole length, a generated token for the length up to it.
        np.maximum(prompt_lens, positions + 1, out=by_token[2])
        blocks = block_tables[sequence, positions // block_size].astype(np.int64)
        by_token[3] = blocks * block_size + positions % block_size
        by_sequence = np.zeros((2, num_seqs + 1), np.int32)
        by_sequence[0, :-1] = computed + new
        by_sequence[1] = cu_seqlens_q

        def put(array: NDArray[Any]) -> Tensor:
            tensor = torch.from_numpy(array)
            return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)

        tokens, positions_, rope_lens, slot_mapping = put(by_token).unbind()
        seq_lens, cu = put(by_sequence).unbind()
        return cls(
            token_ids=tokens,
            positions=positions_,
            rope_lens=rope_lens,
            slot_mapping=slot_mapping,
            block_tables=put(block_tables),
            seq_lens=seq_lens[:-1],
            cu_seqlens_q=cu,
            logit_rows=put(cu_seqlens_q[1:][schedule.sampled] - 1),
            max_seqlen_q=max(schedule.num_new_tokens),
        )


def pad_tables(tables: Sequence[array[int]]) -> NDArray[np.int32]:
    """Block tables as the rows of one rectangle, zeros behind them: i32[num_seqs, max_blocks_per_seq]."""
    width = 4 * max(map(len, tables))
    # As bytes: a numpy assignment for each row, or one through a mask, takes 3 times as long.
    rows = [table.tobytes().ljust(width, b"\0") for table in tables]
    return np.frombuffer(bytearray().join(rows), np.int32).reshape(len(tables), -1)
