"""Batch: one step as ragged device tensors. The sequences' new tokens are concatenated, without padding."""

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
from ..kernels.attention_options import AttentionPlan
from ..requests.request import Request
from ..scheduler.schedule import Schedule
from .spec import LongContext


@dataclass(slots=True)
class Queries:
    """The tokens that attention is computed for: the last ones of each of num_seqs sequences."""

    # One per layer group: i32[num_seqs, max_blocks_per_seq], zeros after a sequence's own blocks
    block_tables: tuple[Tensor, ...]
    seq_lens: Tensor  # i32[num_seqs], up to and including these tokens
    cu_seqlens_q: Tensor  # i32[num_seqs + 1], exclusive prefix sum of the number of these tokens
    max_seqlen_q: int
    min_seqlen_q: int
    # By a layer's `plan_key`, the stride of its queries and the width of its block table; made by the first
    # such layer
    plans: dict[tuple[int | None, int, int, int], AttentionPlan] = field(default_factory=dict)


@dataclass(slots=True)
class Batch:
    """The tensors of one step, over num_tokens new tokens of all sequences together."""

    token_ids: Tensor  # i64[num_tokens]
    positions: Tensor  # i64[num_tokens], higher by an offset in a long request: see LongContext
    rope_lens: Tensor | None  # i64[num_tokens], the sequence length for dynamic rope scaling
    slot_mapping: tuple[Tensor, ...]  # one per layer group: i64[num_tokens], where new K and V go
    queries: Queries  # the new tokens
    # i64[num_output_rows]: the new tokens whose final hidden states are needed, first for sampling, then for
    # reports
    output_rows: Tensor
    # output_rows as queries, where a sequence may occur several times; None if there are none
    output_queries: Queries | None
    num_logits: int  # output rows to sample from
    age: int = 0  # how many times the batch was advanced by one token in place
    is_decode: bool = False  # output_rows are all new tokens, in order, and all are sampled from

    @property
    def num_tokens(self) -> int:
        """The number of rows of every activation."""
        return self.token_ids.shape[0]

    @property
    def num_output_rows(self) -> int:
        """The number of rows of the final hidden states."""
        return self.output_rows.shape[0]


@dataclass(slots=True)
class _Decodes:
    """The last batch of decodes only, to be advanced in place."""

    requests: list[Request]
    longs: array[int]
    ints: array[int]
    growing: tuple[NDArray[Any], NDArray[Any]]  # numbers that increase by one with every step
    widths: list[int]  # of the block tables
    batch: Batch


class BatchBuilder:
    """Makes batches from schedules, for one model on one device.

    On a CPU, if the same requests decode again, `build` advances the last batch in place and returns it once
    more, because making tensors costs more than changing them. The caller must be done with it by then.
    """

    def __init__(
        self,
        block_size: int,
        device: torch.device,
        *,
        with_rope_lens: bool = False,
        long_context: LongContext | None = None,
    ) -> None:
        self.block_size, self.device, self.with_rope_lens = block_size, device, with_rope_lens
        self.long_context = long_context
        self._last: _Decodes | None = None

    def build(self, schedule: Schedule) -> Batch:
        """Make the batch of a schedule whose blocks are allocated."""
        last = self._last
        again = last is not None and schedule.is_decode and schedule.requests == last.requests
        if last is not None and again and self._advance(last, schedule):
            return last.batch
        # Plain lists: for the few numbers of a decode step, numpy's calls cost more than they save.
        requests, num_new_tokens = schedule.requests, schedule.num_new_tokens
        token_ids, positions, seq_lens = _tokens(schedule)
        if self.long_context is not None:
            positions = _offset_positions(positions, schedule, self.long_context)
        rope_lens = _rope_lens(schedule) if self.with_rope_lens else []
        ends, asked = [*accumulate(num_new_tokens)], schedule.asked_rows()
        rows = [ends[i] - 1 for i in schedule.sampled]
        for run in asked:
            rows += range(run.offset, run.offset + run.end - run.start)
        num_tokens, num_rows, num_logits = len(token_ids), len(rows), len(schedule.sampled)
        # Equal counts are not enough: samples of one prompt share its last row.
        is_decode = num_logits == num_tokens and rows == [*range(num_tokens)]

        # Only two buffers, as each is a transfer to the GPU.
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
        output_queries = queries if is_decode else _queries(rest, lengths) if rest else None
        batch = Batch(
            token_ids=by_token[0],
            output_rows=by_token[1],
            positions=by_token[2],
            rope_lens=by_token[3] if self.with_rope_lens else None,
            slot_mapping=by_token[4:],
            queries=queries,
            output_queries=output_queries,
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

    def _advance(self, last: _Decodes, schedule: Schedule) -> bool:
        """Advance the last batch by one token of every request. Return False if a block table has no room."""
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
    """Return the new tokens, their positions, and the sequences' lengths with them."""
    requests = schedule.requests
    # Decodes come first; each computes the last token of its request.
    decoding = requests[: schedule.num_decode_tokens]
    token_ids = [request.token_ids[-1] for request in decoding]
    positions = schedule.num_computed_tokens[: len(decoding)]
    seq_lens = [position + 1 for position in positions]
    for i in range(len(decoding), len(requests)):
        request, start, n = requests[i], schedule.num_computed_tokens[i], schedule.num_new_tokens[i]
        token_ids += request.token_ids[start : start + n]
        positions += range(start, start + n)
        seq_lens.append(start + n)
    return token_ids, positions, seq_lens


def _offset_positions(positions: list[int], schedule: Schedule, long: LongContext) -> list[int]:
    """Return the positions, those of long requests higher by the offset."""
    shifted, start = positions.copy(), 0
    for request, num_new in zip(schedule.requests, schedule.num_new_tokens, strict=True):
        end = start + num_new
        if request.num_tokens >= long.num_tokens:
            shifted[start:end] = [position + long.offset for position in positions[start:end]]
        start = end
    return shifted


def _rope_lens(schedule: Schedule) -> list[int]:
    """Return the length for dynamic rope: a prompt's full length, a generated token's own position + 1."""
    lengths: list[int] = []
    steps = zip(schedule.requests, schedule.num_computed_tokens, schedule.num_new_tokens, strict=True)
    for request, start, n in steps:
        prompt_len = request.num_prompt_tokens
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
    """Return the slots of the new tokens."""
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
    """Append the numbers of `Queries` with these lengths. Return the size of each of its tensors."""
    ints.extend(seq_lens)
    ints.extend([0, *accumulate(lengths)])
    sizes = [len(lengths), len(lengths) + 1]
    for tables in zip(*(own.tables for own in blocks), strict=True):  # one layer group
        table = pad_tables(tables)
        ints += table
        sizes.append(len(table))
    return sizes


def _queries(tensors: Sequence[Tensor], lengths: Sequence[int]) -> Queries:
    seq_lens, cu_seqlens_q, *tables = tensors
    by_sequence = tuple(table.view(len(lengths), -1) for table in tables)
    return Queries(by_sequence, seq_lens, cu_seqlens_q, max(lengths), min(lengths))


def pad_tables(tables: Sequence[array[int]]) -> array[int]:
    """Pad block tables with zeros to equal length, one after another: [num_seqs * max_blocks_per_seq]."""
    width = max(map(len, tables))
    zeros, rows = array("i", bytes(4 * width)), array("i")
    for table in tables:
        rows += table
        rows += zeros[len(table) :]
    return rows
