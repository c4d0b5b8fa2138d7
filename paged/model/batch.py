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

from ..blocks.sequence import SequenceBlocks
from ..requests.request import Request
from ..scheduler.schedule import Schedule


@dataclass(slots=True)
class Queries:
    """The tokens that attention is computed for: of each of num_seqs sequences the last ones."""

    # One for each layer group: i32[num_seqs, max_blocks_per_seq], 0 behind a sequence's own blocks
    block_tables: tuple[Tensor, ...]
    seq_lens: Tensor  # i32[num_seqs], these tokens and all before them
    cu_seqlens_q: Tensor  # i32[num_seqs + 1], exclusive prefix sum of how many these are
    max_seqlen_q: int
    min_seqlen_q: int
    # What attention works out from the lengths, once for all layers.
    plans: dict[Any, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Batch:
    """Tensors of one step with num_tokens new tokens, those of all sequences together."""

    token_ids: Tensor  # i64[num_tokens]
    positions: Tensor  # i64[num_tokens]
    rope_lens: Tensor | None  # i64[num_tokens], the sequence length that dynamic rope scaling goes by
    slot_mapping: tuple[Tensor, ...]  # for each layer group, i64[num_tokens]: where new K and V go
    queries: Queries  # the new tokens
    # i64[num_rows], the tokens whose final hidden states are wanted: first those that are sampled from, then
    # what reports ask for
    rows: Tensor
    wanted: Queries | None  # these; a sequence may be there more than once, or end early. None without rows
    num_logits: int  # how many are sampled from
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
        ends, asked = [*accumulate(num_new_tokens)], schedule.asked_rows()
        rows = [ends[i] - 1 for i in schedule.sampled]
        for run in asked:
            rows += range(run.offset, run.offset + run.end - run.start)
        num_tokens, num_rows, num_logits = len(token_ids), len(rows), len(schedule.sampled)
        # Counts alone would not do: samples of one prompt share its last row.
        is_decode = num_logits == num_tokens and rows == [*range(num_tokens)]

        # Two buffers: each costs a trip to a GPU.
        longs, ints = array("q", token_ids + rows + positions + rope_lens), array("i")
        blocks = [request.blocks for request in requests]
        num_groups = len(blocks[0].tables)
        for g in range(num_groups):
            longs.extend(_slots([own.tables[g] for own in blocks], schedule, seq_lens, self.block_size))
        sizes = _add_queries(ints, blocks, seq_lens, num_new_tokens)
        lengths = [1] * num_logits + [run.end - run.start for run in asked]
        if rows and not is_decode:
            sizes += _add_queries(
                ints,
                [blocks[i] for i in schedule.sampled] + [run.request.blocks for run in asked],
                [seq_lens[i] for i in schedule.sampled] + [run.end for run in asked],
                lengths,
            )
        token_sizes = [num_tokens, num_rows, num_tokens, len(rope_lens)] + [num_tokens] * num_groups
        by_token = _split(longs, torch.int64, self.device, token_sizes)
        by_sequence = _split(ints, torch.int32, self.device, sizes)
        queries = _queries(by_sequence[: 2 + num_groups], num_new_tokens)
        rest = by_sequence[2 + num_groups :]
        wanted = queries if is_decode else _queries(rest, lengths) if rest else None
        batch = Batch(
            token_ids=by_token[0],
            rows=by_token[1],
            positions=by_token[2],
            rope_lens=by_token[3] if self.with_rope_lens else None,
            slot_mapping=by_token[4:],
            queries=queries,
            wanted=wanted,
            num_logits=num_logits,
            is_decode=is_decode,
        )
        self._last = None
        if is_decode and schedule.is_decode and self.device.type == "cpu":
            num = len(requests)
            growing = (np.frombuffer(longs, np.int64)[2 * num :], np.frombuffer(ints, np.int32)[:num])
            widths = [table.shape[1] for table in queries.block_tables]
            self._last = _Decodes(requests, longs, ints, growing, widths, batch)
        return batch

    def _go_on(self, last: _Decodes, schedule: Schedule) -> bool:
        """Make the last batch this one: every request has its next token. False if a table has no room."""
        num, widths = len(last.requests), last.widths
        grown = [(row, schedule.requests[row].blocks.tables) for row in schedule.grown]
        if any(len(tables[g]) > width for _, tables in grown for g, width in enumerate(widths)):
            return False
        last.batch.queries.plans.clear()
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


def _add_queries(
    ints: array[int], blocks: Sequence[SequenceBlocks], seq_lens: Sequence[int], lengths: Sequence[int]
) -> list[int]:
    """Append what `Queries` of these lengths hold. Returns how many numbers each of its tensors has."""
    ints.extend(seq_lens)
    ints.extend([0, *accumulate(lengths)])
    sizes = [len(lengths), len(lengths) + 1]
    for tables in zip(*(own.tables for own in blocks), strict=True):  # a group's
        table = pad_tables(tables)
        ints += table
        sizes.append(len(table))
    return sizes


def _queries(tensors: Sequence[Tensor], lengths: Sequence[int]) -> Queries:
    seq_lens, cu_seqlens_q, *tables = tensors
    by_sequence = tuple(table.view(len(lengths), -1) for table in tables)
    return Queries(by_sequence, seq_lens, cu_seqlens_q, max(lengths), min(lengths))


def pad_tables(tables: Sequence[array[int]]) -> array[int]:
    """Block tables as the rows of one rectangle, zeros behind them: [num_seqs * max_blocks_per_seq]."""
    width = max(map(len, tables))
    zeros, rows = array("i", bytes(4 * width)), array("i")
    for table in tables:
        rows += table
        rows += zeros[len(table) :]
    return rows
