"""Batch: one step as ragged device tensors. All sequences' new tokens are concatenated; nothing is padded."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .request import Request
from .schedule import Schedule


@dataclass(slots=True)
class Batch:
    """Tensors of one step over num_seqs sequences with num_tokens new tokens between them."""

    token_ids: Tensor  # i64[num_tokens]
    positions: Tensor  # i64[num_tokens]
    rope_lens: Tensor | None  # i64[num_tokens], the sequence length that dynamic rope scaling goes by
    # One for each layer group:
    slot_mapping: tuple[Tensor, ...]  # i64[num_tokens], where each new token's K and V go
    block_tables: tuple[Tensor, ...]  # i32[num_seqs, max_blocks_per_seq], 0 behind a sequence's own blocks
    seq_lens: Tensor  # i32[num_seqs], computed and new tokens
    cu_seqlens_q: Tensor  # i32[num_seqs + 1], exclusive prefix sum of the new tokens
    # i64[num_rows], the tokens whose final hidden states are wanted: first those that are sampled from, then
    # what reports ask for
    rows: Tensor
    num_logits: int  # how many are sampled from
    max_seqlen_q: int
    min_seqlen_q: int
    # What attention works out from the lengths, once for all layers.
    plans: dict[Any, Any] = field(default_factory=dict)
    age: int = 0  # how often every sequence got one more token in place
    is_decode: bool = False  # a token is sampled behind every new one, once and in order, and nothing else

    @property
    def num_tokens(self) -> int:
        """Rows of every activation."""
        return self.token_ids.shape[0]

    @property
    def num_rows(self) -> int:
        """Rows of the final hidden states."""
        return self.rows.shape[0]


@dataclass(slots=True)
class _Decodes:
    """A step of decodes alone as it was laid out, to go on from."""

    requests: list[Request]
    longs: array[int]
    ints: array[int]
    growing: tuple[NDArray[Any], NDArray[Any]]  # what is one more with every step
    widths: list[int]  # of the block tables
    batch: Batch


class BatchBuilder:
    """Lays schedules out as batches for one model on one device.

    On a CPU, where the same requests decode again, the last batch is brought up to date in place and given
    out once more, so it must be done with: making tensors costs more than changing what is new in them.
    """

    def __init__(self, block_size: int, device: torch.device, *, with_rope_lens: bool) -> None:
        self.block_size, self.device, self.with_rope_lens = block_size, device, with_rope_lens
        self._last: _Decodes | None = None

    def build(self, schedule: Schedule) -> Batch:
        """Lay out a schedule whose blocks are allocated."""
        last = self._last
        again = last is not None and schedule.is_decode and schedule.requests == last.requests
        if last is not None and again and self._go_on(last, schedule):
            return last.batch
        # Plain lists: for the few numbers of a decode step, numpy's calls cost more than they save.
        requests, num_new_tokens = schedule.requests, schedule.num_new_tokens
        token_ids, positions, seq_lens = _tokens(schedule)
        rope_lens = _rope_lens(schedule) if self.with_rope_lens else []
        cu_seqlens_q = [0, *accumulate(num_new_tokens)]
        rows = [cu_seqlens_q[i + 1] - 1 for i in schedule.sampled]
        for asked in schedule.asked_rows():
            rows += range(asked.offset, asked.offset + asked.end - asked.start)
        tables = [[r.blocks.tables[g] for r in requests] for g in range(len(requests[0].blocks.tables))]

        # Two buffers: each costs a trip to a GPU.
        longs = array("q", token_ids + rows + positions + rope_lens)
        ints = array("i", seq_lens + cu_seqlens_q)
        for group in tables:
            longs.extend(_slots(group, schedule, seq_lens, self.block_size))
            ints += pad_tables(group)
        widths = [max(map(len, group)) for group in tables]
        num_logits, extremes = len(schedule.sampled), (max(num_new_tokens), min(num_new_tokens))
        sizes = (len(requests), len(token_ids), len(rows), num_logits, *extremes, *widths)
        batch, self._last = self._batch(longs, ints, *sizes), None
        # Counts alone would not do: samples of one prompt share its last row.
        batch.is_decode = num_logits == len(token_ids) and rows == [*range(num_logits)]
        if schedule.is_decode and self.device.type == "cpu":
            num = len(requests)
            growing = (np.frombuffer(longs, np.int64)[2 * num :], np.frombuffer(ints, np.int32)[:num])
            self._last = _Decodes(requests, longs, ints, growing, widths, batch)
        return batch

    def _go_on(self, last: _Decodes, schedule: Schedule) -> bool:
        """Make the last batch this one: every request has its next token. False if a table has no room."""
        num, widths = len(last.requests), last.widths
        grown = [(row, schedule.requests[row].blocks.tables) for row in schedule.grown]
        if any(len(tables[g]) > width for _, tables in grown for g, width in enumerate(widths)):
            return False
        last.batch.plans.clear()
        last.batch.age += 1
        last.longs[:num] = array("q", [request.token_ids[-1] for request in schedule.requests])
        for numbers in last.growing:
            numbers += 1
        first_slot, first_table = len(last.longs) - num * len(widths), 2 * num + 1
        for g, width in enumerate(widths):
            for row, tables in grown:
                table, at = tables[g], first_table + row * width
                last.ints[at : at + len(table)] = table
                offset = (last.ints[row] - 1) % self.block_size
                last.longs[first_slot + row] = table[-1] * self.block_size + offset
            first_slot += num
            first_table += num * width
        return True

    def _batch(
        self,
        longs: array[int],
        ints: array[int],
        num_seqs: int,
        num_tokens: int,
        num_rows: int,
        num_logits: int,
        max_seqlen_q: int,
        min_seqlen_q: int,
        *widths: int,
    ) -> Batch:
        num_rope_lens = num_tokens if self.with_rope_lens else 0
        by_token = _split(
            longs,
            torch.int64,
            self.device,
            [num_tokens, num_rows, num_tokens, num_rope_lens] + [num_tokens] * len(widths),
        )
        by_sequence = _split(
            ints, torch.int32, self.device, [num_seqs, num_seqs + 1, *(num_seqs * width for width in widths)]
        )
        return Batch(
            token_ids=by_token[0],
            rows=by_token[1],
            num_logits=num_logits,
            positions=by_token[2],
            rope_lens=by_token[3] if self.with_rope_lens else None,
            slot_mapping=by_token[4:],
            seq_lens=by_sequence[0],
            cu_seqlens_q=by_sequence[1],
            block_tables=tuple(table.view(num_seqs, -1) for table in by_sequence[2:]),
            max_seqlen_q=max_seqlen_q,
            min_seqlen_q=min_seqlen_q,
        )


def _tokens(schedule: Schedule) -> tuple[list[int], list[int], list[int]]:
    """The new tokens, their positions, and every sequence's length with them."""
    requests = schedule.requests
    # Those who decode come first, and compute the last of their tokens.
    decoding = requests[: schedule.num_decode_tokens]
    token_ids = [request.token_ids[-1] for request in decoding]
    positions = [request.num_computed_tokens for request in decoding]
    seq_lens = [position + 1 for position in positions]
    for request, n in zip(requests[len(decoding) :], schedule.num_new_tokens[len(decoding) :], strict=True):
        start = request.num_computed_tokens
        token_ids += request.token_ids[start : start + n]
        positions += range(start, start + n)
        seq_lens.append(start + n)
    return token_ids, positions, seq_lens


def _rope_lens(schedule: Schedule) -> list[int]:
    """A prompt is rotated for its whole length, a generated token for the length up to it."""
    lengths: list[int] = []
    for request, n in zip(schedule.requests, schedule.num_new_tokens, strict=True):
        start, prompt_len = request.num_computed_tokens, request.num_prompt_tokens
        lengths += [prompt_len] * (min(prompt_len, start + n) - start)
        lengths += range(max(prompt_len, start) + 1, start + n + 1)
    return lengths


def _split(
    data: array[int], dtype: torch.dtype, device: torch.device, sizes: list[int]
) -> tuple[Tensor, ...]:
    tensor = torch.frombuffer(data, dtype=dtype)
    if device.type != "cpu":
        tensor = tensor.to(device, non_blocking=True)
    return tensor.split_with_sizes(sizes)


def _slots(
    tables: Sequence[array[int]], schedule: Schedule, seq_lens: Sequence[int], block_size: int
) -> list[int]:
    """Where the new tokens of each sequence go."""
    num_decodes = schedule.num_decode_tokens
    slots = [
        table[-1] * block_size + (end - 1) % block_size
        for table, end in zip(tables[:num_decodes], seq_lens, strict=False)
    ]
    for i in range(num_decodes, len(tables)):
        start, end = seq_lens[i] - schedule.num_new_tokens[i], seq_lens[i]
        while start < end:  # block by block
            index, offset = divmod(start, block_size)
            first, count = tables[i][index] * block_size + offset, min(end - start, block_size - offset)
            slots += range(first, first + count)
            start += count
    return slots


def pad_tables(tables: Sequence[array[int]]) -> array[int]:
    """Block tables as the rows of one rectangle, zeros behind them: [num_seqs * max_blocks_per_seq]."""
    width = max(map(len, tables))
    zeros, rows = array("i", bytes(4 * width)), array("i")
    for table in tables:
        rows += table
        rows += zeros[len(table) :]
    return rows
