"""HostBatches: batches that the host makes, number by number."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...blocks.sequence import SequenceBlocks
from ...device.transfers import Sent, Upload
from ...model.batch import Batch, Queries
from ...model.spec import LongContext
from ...requests.request import Request
from ...scheduler.schedule import Schedule


@dataclass(slots=True)
class _Step:
    """What is sent for a step, and how it is divided into the tensors of a batch."""

    by_token: Sent  # i64: token ids, output rows, positions, lengths for rope, slots of each group
    by_sequence: Sent  # i32: the numbers of `Queries`, and of those of the output rows
    token_sizes: list[int]
    sequence_sizes: list[int]
    num_new_tokens: list[int]
    output_lengths: list[int]
    num_logits: int
    is_decode: bool
    decoding: list[Request] | None  # the requests, if the batch may be advanced in place


class HostBatches:
    """Makes batches on the host, for one model on one device. The reference for `SeatedBatches`.

    On a CPU, if the same requests decode again, the last batch is advanced in place and returned once more,
    because making tensors costs more than changing them. The caller must be done with it by then.
    """

    def __init__(
        self,
        block_size: int,
        device: torch.device,
        *,
        with_rope_lens: bool = False,
        long_context: LongContext | None = None,
    ) -> None:
        self.block_size = block_size
        self.device = device
        self.with_rope_lens = with_rope_lens
        self.long_context = long_context
        self._last: _Decodes | None = None

    def put(self, schedule: Schedule, upload: Upload) -> _Step | Batch:
        """Add the numbers of a batch to the upload. The blocks of the schedule are allocated."""
        last = self._last
        again = last is not None and schedule.is_decode and schedule.requests == last.requests
        if last is not None and again and self._advance(last, schedule):
            return last.batch
        self._last = None
        return self._step(schedule, upload)

    def batch(self, step: _Step | Batch) -> Batch:
        """Make the batch of a step whose upload is sent."""
        if isinstance(step, Batch):
            return step
        num_groups = len(step.token_sizes) - 4
        token_ids, output_rows, positions, rope_lens, *slots = step.by_token.tensor.split_with_sizes(
            step.token_sizes
        )
        by_sequence = step.by_sequence.tensor.split_with_sizes(step.sequence_sizes)
        queries = _queries(by_sequence[: 2 + num_groups], step.num_new_tokens)
        output_queries = queries if step.is_decode else None
        if rest := by_sequence[2 + num_groups :]:
            output_queries = _queries(rest, step.output_lengths)
        batch = Batch(
            token_ids=token_ids,
            output_rows=output_rows,
            positions=positions,
            rope_lens=rope_lens if self.with_rope_lens else None,
            slot_mapping=tuple(slots),
            queries=queries,
            output_queries=output_queries,
            num_logits=step.num_logits,
            is_decode=step.is_decode,
        )
        if step.decoding is not None:
            self._last = _Decodes(step.decoding, step, batch)
        return batch

    def record(self, step: _Step | Batch, tokens: Tensor) -> None:
        """Do nothing: the next step's tokens are sent by the host."""

    def _step(self, schedule: Schedule, upload: Upload) -> _Step:
        # Plain lists: for the few numbers of a decode step, numpy's calls cost more than they save.
        requests = schedule.requests
        num_new_tokens = schedule.num_new_tokens
        token_ids, positions, seq_lens = _tokens(schedule)
        if self.long_context is not None:
            positions = _offset_positions(positions, schedule, self.long_context)
        rope_lens = _rope_lens(schedule) if self.with_rope_lens else []
        ends = [*accumulate(num_new_tokens)]
        asked = schedule.asked_rows()
        rows = [ends[i] - 1 for i in schedule.sampled]
        for run in asked:
            rows += range(run.offset, run.offset + run.end - run.start)
        num_tokens = len(token_ids)
        num_logits = len(schedule.sampled)
        # Equal counts are not enough: samples of one prompt share its last row.
        is_decode = num_logits == num_tokens and rows == [*range(num_tokens)]

        # Only two parts, as each is a tensor to make.
        longs = array("q", token_ids + rows + positions + rope_lens)
        ints = array("i")
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
        return _Step(
            by_token=upload.put(longs, torch.int64),
            by_sequence=upload.put(ints, torch.int32),
            token_sizes=[num_tokens, len(rows), num_tokens, len(rope_lens)] + [num_tokens] * num_groups,
            sequence_sizes=sizes,
            num_new_tokens=num_new_tokens,
            output_lengths=lengths,
            num_logits=num_logits,
            is_decode=is_decode,
            decoding=requests if is_decode and schedule.is_decode and self.device.type == "cpu" else None,
        )

    def _advance(self, last: _Decodes, schedule: Schedule) -> bool:
        """Advance the last batch by one token of every request. Return False if a block table has no room."""
        num = len(last.requests)
        widths = last.widths
        grown = [(row, schedule.requests[row].blocks.tables) for row in schedule.grown]
        if any(len(tables[g]) > width for _, tables in grown for g, width in enumerate(widths)):
            return False
        last.batch.queries.plans.clear()
        last.batch.age += 1
        longs = last.longs
        ints = last.ints
        longs[:num] = [request.token_ids[-1] for request in schedule.requests]
        for numbers in last.growing:
            numbers += 1
        first_slot = len(longs) - num * len(widths)
        first_table = 2 * num + 1
        for g, width in enumerate(widths):
            for row, tables in grown:
                table = tables[g]
                at = first_table + row * width
                ints[at : at + len(table)] = table
                offset = (int(ints[row]) - 1) % self.block_size
                longs[first_slot + row] = table[-1] * self.block_size + offset
            first_slot += num
            first_table += num * width
        return True


class _Decodes:
    """The last batch of decodes only, to be advanced in place."""

    __slots__ = ("batch", "growing", "ints", "longs", "requests", "widths")

    def __init__(self, requests: list[Request], step: _Step, batch: Batch) -> None:
        num = len(requests)
        self.requests = requests
        self.batch = batch
        # The memory of the batch's tensors.
        self.longs: NDArray[np.int64] = step.by_token.numbers
        self.ints: NDArray[np.int32] = step.by_sequence.numbers
        self.growing = self.longs[2 * num :], self.ints[:num]  # increase by one with every step
        self.widths = [table.shape[1] for table in batch.queries.block_tables]


def _tokens(schedule: Schedule) -> tuple[list[int], list[int], list[int]]:
    """Return the new tokens, their positions, and the sequences' lengths with them."""
    requests = schedule.requests
    # Decodes come first; each computes the last token of its request.
    decoding = requests[: schedule.num_decode_tokens]
    token_ids = [request.token_ids[-1] for request in decoding]
    positions = schedule.num_computed_tokens[: len(decoding)]
    seq_lens = [position + 1 for position in positions]
    for i in range(len(decoding), len(requests)):
        request = requests[i]
        start = schedule.num_computed_tokens[i]
        n = schedule.num_new_tokens[i]
        token_ids += request.token_ids[start : start + n]
        positions += range(start, start + n)
        seq_lens.append(start + n)
    return token_ids, positions, seq_lens


def _offset_positions(positions: list[int], schedule: Schedule, long: LongContext) -> list[int]:
    """Return the positions, those of long requests higher by the offset."""
    shifted = positions.copy()
    start = 0
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
        start = seq_lens[i] - schedule.num_new_tokens[i]
        end = seq_lens[i]
        while start < end:  # block by block
            index, offset = divmod(start, block_size)
            first = tables[i][index] * block_size + offset
            count = min(end - start, block_size - offset)
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
    zeros = array("i", bytes(4 * width))
    rows = array("i")
    for table in tables:
        rows += table
        rows += zeros[len(table) :]
    return rows
