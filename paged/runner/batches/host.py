"""HostBatches: batches that the host makes, number by number."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...architectures.spec import LongContext
from ...device.transfers import Sent, Upload, arrived
from ...model.batch import Batch, Queries
from ..plan import ComputedPart
from .batches import StepAdapters, put_adapters

Tables: TypeAlias = "list[array[int]]"  # the block tables of one sequence, one for each layer group


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
    sampled_seats: NDArray[np.intp]
    decoding: list[int] | None  # the seats, if the batch may be advanced in place
    seats: Sent | None = None  # where states are
    runs: Sent | None = None  # of drafts, where there are states
    decodes: _Decodes | None = None  # what is kept to do so
    adapters: StepAdapters | None = None


class HostBatches:
    """Makes batches on the host, which stores the state of each seat. The reference for `SeatedBatches`.

    On a CPU, if the same seats decode again, their last batch is updated in place and returned again, because
    this is cheaper than making new tensors. The caller must then no longer use the earlier batch.

    num_kept: the number of batches kept for reuse, which is the number of steps that may be in flight.
    """

    def __init__(
        self,
        block_size: int,
        device: torch.device,
        *,
        num_groups: int,
        max_num_seqs: int,
        with_rope_lens: bool = False,
        long_context: LongContext | None = None,
        num_kept: int = 1,
        with_seats: bool = False,
        run_numbers: Callable[[ComputedPart], list[int]] | None = None,
    ) -> None:
        self.block_size = block_size
        self.device = device
        self.num_kept = num_kept
        self.with_seats = with_seats
        self.run_numbers = run_numbers
        self.with_rope_lens = with_rope_lens
        self.long_context = long_context
        self.last_tokens = np.zeros(max_num_seqs, np.int64)
        self.tables: list[Tables] = [[array("i") for _ in range(num_groups)] for _ in range(max_num_seqs)]
        self._kept: list[_Decodes] = []  # of different seats, the last one at the end

    def put(self, plan: ComputedPart, upload: Upload) -> _Step | _Decodes:
        """Add the numbers of a batch to an upload."""
        for kept in self._kept:
            if kept.is_repeated_by(plan):
                self._advance(kept, plan)
                return kept
        self._drop_those_of(plan)
        self._update_seats(plan)
        if plan.last_tokens:
            self.last_tokens[plan.seats[: plan.num_decodes]] = plan.last_tokens
        return self._step(plan, upload)

    def batch(self, step: _Step | _Decodes) -> Batch:
        """Make the batch of a step, once its upload is sent."""
        if isinstance(step, _Decodes):
            return step.batch
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
            seats=arrived(step.seats),
            runs=None if step.runs is None else step.runs.tensor.view(-1, 2),
            is_decode=step.is_decode,
        )
        if step.adapters is not None:
            batch.adapters, batch.output_adapters = step.adapters.tensors()
        if step.decoding is not None:
            step.decodes = _Decodes(step.decoding, step, batch)
            self._kept.append(step.decodes)
        return batch

    def places(self, step: _Step | _Decodes) -> None:
        """Return None, because the sampler itself sends seats and positions."""

    def record(self, step: _Step | _Decodes, tokens: Tensor) -> None:
        """Store a step's drawn tokens, i64[num_logits]. On a GPU, this waits for the tokens."""
        drawn = tokens.cpu().numpy()
        decodes = step if isinstance(step, _Decodes) else step.decodes
        if decodes is None:
            self.last_tokens[step.sampled_seats] = drawn
        else:  # most decode once more: not yet in `last_tokens`
            decodes.drawn = drawn

    def _drop_those_of(self, plan: ComputedPart) -> None:
        """Keep no batch of a seat that is in a step or changes, and one batch less than the most."""
        if self.num_kept > 1:
            changed = {*plan.seats, *(change.seat for change in plan.changes)}
            dropped = [each for each in self._kept if not changed.isdisjoint(each.seats)]
            others = [each for each in self._kept if each not in dropped]
            dropped += others[: max(0, len(others) + 1 - self.num_kept)]
        else:
            dropped = self._kept
        for each in dropped:
            if each.drawn is not None:
                self.last_tokens[each.sampled_seats] = each.drawn
        self._kept = [each for each in self._kept if each not in dropped]

    def _update_seats(self, plan: ComputedPart) -> None:
        """Store the newest tokens of seats, and the new entries of their block tables."""
        start = 0
        for change in plan.changes:
            if change.last_token >= 0:
                self.last_tokens[change.seat] = change.last_token
            end = start + change.num_entries
            for table, entries in zip(self.tables[change.seat], plan.entries, strict=True):
                table[change.first_entry :] = entries[start:end]
            start = end

    def _step(self, plan: ComputedPart, upload: Upload) -> _Step:
        # Plain lists: for the few numbers of a decode step, numpy's calls cost more than they save.
        seq_lens = [start + n for start, n in zip(plan.starts, plan.counts, strict=True)]
        token_ids = self._token_ids(plan)
        positions = _positions(plan)
        if self.long_context is not None:
            positions = _offset_positions(positions, plan, self.long_context)
        if plan.rope_offsets:
            offsets = np.repeat(plan.rope_offsets, plan.counts)
            positions = (np.array(positions) + offsets).tolist()
        rope_lens = _rope_lens(plan) if self.with_rope_lens else []
        ends = [*accumulate(plan.counts)]
        reached = plan.positions()
        # A token that is drawn at a position has the row of the token before it.
        rows = [ends[i] - 1 - (seq_lens[i] - at) for i, at in zip(plan.sampled, reached, strict=True)]
        for run in plan.asked:
            rows += range(run.offset, run.offset + run.end - run.start)
        num_tokens = len(token_ids)
        num_logits = len(plan.sampled)
        # Equal counts are not enough: samples of one prompt share its last row.
        is_decode = num_logits == num_tokens and rows == [*range(num_tokens)]

        # Only two parts, as each is a tensor to make.
        longs = array("q", token_ids + rows + positions + rope_lens)
        ints = array("i")
        tables = [self.tables[seat] for seat in plan.seats]
        num_groups = len(tables[0])
        for g in range(num_groups):
            longs.extend(_slots([own[g] for own in tables], plan, seq_lens, self.block_size))
        sizes = _add_queries(ints, tables, seq_lens, plan.counts)
        lengths = [1] * num_logits + [run.end - run.start for run in plan.asked]
        if rows and not is_decode:
            sizes += _add_queries(
                ints,
                [tables[i] for i in plan.sampled] + [tables[run.row] for run in plan.asked],
                reached + [run.end for run in plan.asked],
                lengths,
            )
        return _Step(
            by_token=upload.put(longs, torch.int64),
            by_sequence=upload.put(ints, torch.int32),
            token_sizes=[num_tokens, len(rows), num_tokens, len(rope_lens)] + [num_tokens] * num_groups,
            sequence_sizes=sizes,
            num_new_tokens=plan.counts,
            output_lengths=lengths,
            num_logits=num_logits,
            is_decode=is_decode,
            sampled_seats=np.array(plan.sampled_seats, np.intp),
            seats=upload.put(plan.seats, torch.int32) if self.with_seats else None,
            runs=upload.put(self.run_numbers(plan), torch.int32) if self.run_numbers else None,
            adapters=put_adapters(plan, upload) if plan.adapters else None,
            decoding=plan.seats if is_decode and plan.is_decode and self.device.type == "cpu" else None,
        )

    def _token_ids(self, plan: ComputedPart) -> list[int]:
        """Return the new tokens. Decodes come first: each computes the last token of its seat."""
        token_ids: list[int] = self.last_tokens[plan.seats[: plan.num_decodes]].tolist()
        num_prompt_tokens = sum(plan.counts[plan.num_decodes :])
        # Newcomers that decode have sent theirs, before those of prompts.
        return token_ids + plan.tokens[len(plan.tokens) - num_prompt_tokens :].tolist()

    def _advance(self, last: _Decodes, plan: ComputedPart) -> None:
        """Advance a kept batch by one token of every seat, and extend the block tables that have grown."""
        last.batch.queries.plans.clear()
        last.batch.age += 1
        # What was drawn is replaced by `record`, or no longer counts if the step fails.
        drawn = plan.last_tokens or last.drawn
        assert drawn is not None, "a batch is advanced by tokens"
        last.token_ids[:] = drawn
        if last.batch.runs is not None:
            last.batch.runs.zero_()  # its step has applied all of them
        for numbers in last.growing:
            numbers += 1
        start = 0
        for row, seat, _, _, first, num_entries in plan.changes:
            offset = plan.starts[row] % self.block_size
            groups = zip(self.tables[seat], plan.entries, last.tables, last.slots, strict=True)
            for table, entries, rows, slots in groups:
                new = entries[start : start + num_entries]
                table[first:] = new
                rows[row, first : first + num_entries] = new
                slots[row] = new[-1] * self.block_size + offset
            start += num_entries


class _Decodes:
    """A batch of decodes only, to be advanced in place.

    drawn: the tokens that its step has drawn; None: not yet, or another process draws them.
    """

    __slots__ = (
        "batch",
        "drawn",
        "growing",
        "sampled_seats",
        "seats",
        "slots",
        "tables",
        "token_ids",
        "width",
    )

    def __init__(self, seats: list[int], step: _Step, batch: Batch) -> None:
        num = len(seats)
        longs = step.by_token.numbers
        ints = step.by_sequence.numbers
        self.seats = seats
        self.sampled_seats = step.sampled_seats
        self.batch = batch
        self.drawn: NDArray[np.int64] | None = None
        # The memory of the batch's tensors.
        self.token_ids: NDArray[np.int64] = longs[:num]
        self.growing = longs[2 * num :], ints[:num]  # increase by one with every step
        self.slots: list[NDArray[np.int64]] = [slots.numpy() for slots in batch.slot_mapping]
        self.tables: list[NDArray[np.int32]] = [table.numpy() for table in batch.queries.block_tables]
        self.width = self.tables[0].shape[1]

    def is_repeated_by(self, plan: ComputedPart) -> bool:
        """Return whether the same seats decode once more, and the batch has room for their block tables."""
        if not plan.last_tokens and self.drawn is None:
            return False
        return plan.repeats(self.seats) and all(
            change.first_entry + change.num_entries <= self.width for change in plan.changes
        )


def _positions(plan: ComputedPart) -> list[int]:
    """Return the positions of the new tokens."""
    positions = plan.starts[: plan.num_decodes]
    for start, n in zip(plan.starts[plan.num_decodes :], plan.counts[plan.num_decodes :], strict=True):
        positions += range(start, start + n)
    return positions


def _offset_positions(positions: list[int], plan: ComputedPart, long: LongContext) -> list[int]:
    """Return the positions; the positions of long requests are higher by the offset."""
    shifted = positions.copy()
    start = 0
    for length, num_new in zip(plan.rope_lens, plan.counts, strict=True):
        end = start + num_new
        if length >= long.num_tokens:
            shifted[start:end] = [position + long.offset for position in positions[start:end]]
        start = end
    return shifted


def _rope_lens(plan: ComputedPart) -> list[int]:
    """Return the length for dynamic rope: a prompt's full length, a generated token's own position + 1."""
    lengths: list[int] = []
    for prompt_len, start, n in zip(plan.rope_lens, plan.starts, plan.counts, strict=True):
        lengths += [prompt_len] * (min(prompt_len, start + n) - start)
        lengths += range(max(prompt_len, start) + 1, start + n + 1)
    return lengths


def _slots(
    tables: Sequence[array[int]], plan: ComputedPart, seq_lens: Sequence[int], block_size: int
) -> list[int]:
    """Return the slots of the new tokens."""
    num_decodes = plan.num_decodes
    slots = [
        table[-1] * block_size + (end - 1) % block_size
        for table, end in zip(tables[:num_decodes], seq_lens, strict=False)
    ]
    for i in range(num_decodes, len(tables)):
        start = plan.starts[i]
        end = seq_lens[i]
        while start < end:  # block by block
            index, offset = divmod(start, block_size)
            first = tables[i][index] * block_size + offset
            count = min(end - start, block_size - offset)
            slots += range(first, first + count)
            start += count
    return slots


def _add_queries(
    ints: array[int], tables: Sequence[Tables], seq_lens: Sequence[int], lengths: Sequence[int]
) -> list[int]:
    """Append the numbers of `Queries` with these lengths. Return the size of each of its tensors."""
    ints.extend(seq_lens)
    ints.extend([0, *accumulate(lengths)])
    sizes = [len(lengths), len(lengths) + 1]
    for of_group in zip(*tables, strict=True):
        table = pad_tables(of_group)
        ints += table
        sizes.append(len(table))
    return sizes


def _queries(tensors: Sequence[Tensor], lengths: Sequence[int]) -> Queries:
    seq_lens, cu_seqlens_q, *tables = tensors
    by_sequence = tuple(table.view(len(lengths), -1) for table in tables)
    return Queries(by_sequence, seq_lens, cu_seqlens_q, max(lengths), min(lengths))


def pad_tables(tables: Sequence[array[int]]) -> array[int]:
    """Pad block tables with zeros to equal lengths. Return them joined: [num_seqs * max_blocks_per_seq]."""
    width = max(map(len, tables))
    zeros = array("i", bytes(4 * width))
    rows = array("i")
    for table in tables:
        rows += table
        rows += zeros[len(table) :]
    return rows
