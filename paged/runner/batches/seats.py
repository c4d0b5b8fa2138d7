"""SeatedBatches: batches that a GPU makes itself, from one upload and the state of the seats."""

from __future__ import annotations

import math
from array import array
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...architectures.spec import LongContext
from ...base.errors import ResourceError
from ...device.transfers import Sent, Upload, arrived
from ...kernels.steps import (
    ENTRIES,
    FIRST_ENTRY,
    FIRST_TOKEN,
    FROM_SEAT,
    LAST_TOKEN,
    NUM_COLUMNS,
    NUM_ENTRIES,
    SEAT,
    START,
    UnpackStep,
)
from ...model.batch import Batch, Queries
from ..plan import ComputedPart

NO_NEW_ENTRIES = 2**30  # as FIRST_ENTRY: beyond every entry, so that all are taken from the seat


class _Outputs(NamedTuple):
    """The output rows of a batch, and the same rows as queries, if they are not all new tokens in order."""

    rows: Sent
    sources: Sent  # the row of the step of each query
    seq_lens: Sent
    cu_seqlens_q: Sent
    max_seqlen_q: int
    min_seqlen_q: int


class _Step(NamedTuple):
    """The uploaded arrays of a step, and the properties of its batch that the host computes."""

    rows: Sent
    cu_seqlens_q: Sent
    tokens: Sent
    entries: Sent
    rope_lens: Sent | None
    seq_lens: Sent
    sizes: dict[str, int]  # arguments of `unpack_step`
    max_seqlen_q: int
    min_seqlen_q: int
    outputs: _Outputs | None
    num_logits: int
    sampled_seats: Sent
    seats: Sent | None  # where states are
    last_tokens: tuple[Sent, Sent] | None  # seats, and the tokens that another process has drawn for them


class SeatedBatches:
    """Batches made on a GPU, which keeps the last token and the block tables of each seat's request.

    `HostBatches` is the reference.

    Raises ResourceError if there is no memory for so many seats.
    """

    def __init__(
        self,
        unpack_step: UnpackStep,
        block_size: int,
        device: torch.device,
        *,
        num_groups: int,
        max_num_seqs: int,
        max_model_len: int,
        with_rope_lens: bool = False,
        long_context: LongContext | None = None,
        with_seats: bool = False,
    ) -> None:
        self._unpack_step = unpack_step
        self.block_size = block_size
        self.with_rope_lens = with_rope_lens
        self.with_seats = with_seats
        self._num_groups = num_groups
        self.long_context = long_context
        shape = num_groups, max_num_seqs, -(-max_model_len // block_size)
        try:
            self.last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
            self.tables = torch.zeros(shape, dtype=torch.int32, device=device)
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                f"no memory for the block tables of max_num_seqs {max_num_seqs} requests, each of "
                f"max_model_len {max_model_len} tokens: {4 * math.prod(shape) / 2**20:,.0f} MiB cannot be "
                f"allocated on {device}; lower either"
            ) from error
        self._all_rows = torch.arange(max_num_seqs, device=device)
        self._last: tuple[list[int], NDArray[np.int32]] | None = None  # seats and rows of the last decodes

    def put(self, plan: ComputedPart, upload: Upload) -> _Step:
        """Add what the device needs for the batch of a step to the upload."""
        num_new = np.array(plan.counts, np.int32)
        rows, max_entries = self._rows(plan)
        seq_lens = rows[: len(num_new), START] + num_new
        ends = np.zeros(len(num_new) + 1, np.int32)
        np.cumsum(num_new, out=ends[1:])
        rope_lens = None
        max_seqlen_q = int(num_new.max())
        if self.with_rope_lens or self.long_context is not None:
            rope_lens = upload.put(plan.rope_lens, torch.int32)
        last_tokens = None
        if plan.last_tokens:
            decodes = upload.put(plan.seats[: plan.num_decodes], torch.int64)
            last_tokens = decodes, upload.put(plan.last_tokens, torch.int64)
        sizes = {
            "num_tokens": int(ends[-1]),
            "max_seq_len": int(seq_lens.max()),
            "longest": max(max_seqlen_q, max_entries),
        }
        return _Step(
            rows=upload.put(rows, torch.int32),
            cu_seqlens_q=upload.put(ends, torch.int32),
            tokens=upload.put(_padded(plan.tokens), torch.int32),
            entries=upload.put([_padded(group) for group in plan.entries], torch.int32),
            rope_lens=rope_lens,
            seq_lens=upload.put(seq_lens, torch.int32),
            sizes=sizes,
            max_seqlen_q=max_seqlen_q,
            min_seqlen_q=int(num_new.min()),
            outputs=_put_outputs(plan, seq_lens, ends, upload),
            num_logits=len(plan.sampled),
            sampled_seats=upload.put(plan.sampled_seats, torch.int64),
            seats=upload.put(plan.seats, torch.int32) if self.with_seats else None,
            last_tokens=last_tokens,
        )

    def batch(self, step: _Step) -> Batch:
        """Make the batch of a step whose upload is sent."""
        outputs = step.outputs
        if step.last_tokens is not None:
            seats, tokens = step.last_tokens
            self.last_tokens.index_copy_(0, seats.tensor, tokens.tensor)
        cu_seqlens_q = step.cu_seqlens_q.tensor
        by_token, tables = self._unpack_step(
            step.rows.tensor,
            cu_seqlens_q,
            step.tokens.tensor,
            step.entries.tensor,
            self.last_tokens,
            self.tables,
            None if outputs is None else outputs.sources.tensor,
            arrived(step.rope_lens),
            block_size=self.block_size,
            **step.sizes,
        )
        num_rows = len(cu_seqlens_q) - 1
        columns = by_token.unbind()
        tables_of_step, tables_of_outputs = tables.split_with_sizes([num_rows, tables.shape[1] - num_rows], 1)
        extremes = step.max_seqlen_q, step.min_seqlen_q
        queries = Queries(tables_of_step.unbind(), step.seq_lens.tensor, cu_seqlens_q, *extremes)
        output_rows = self._all_rows[: step.num_logits]
        output_queries = queries if step.num_logits else None
        if outputs is not None:
            output_rows = outputs.rows.tensor
            lens = outputs.seq_lens.tensor, outputs.cu_seqlens_q.tensor
            extremes = outputs.max_seqlen_q, outputs.min_seqlen_q
            output_queries = Queries(tables_of_outputs.unbind(), *lens, *extremes)
        positions = columns[1]
        if self.long_context is not None:
            positions = positions + self.long_context.offset * (columns[-1] >= self.long_context.num_tokens)
        return Batch(
            token_ids=columns[0],
            positions=positions,
            rope_lens=columns[-1] if self.with_rope_lens else None,
            slot_mapping=columns[2 : 2 + self._num_groups],
            queries=queries,
            output_rows=output_rows,
            output_queries=output_queries,
            num_logits=step.num_logits,
            seats=arrived(step.seats),
            is_decode=outputs is None and step.num_logits > 0,
        )

    def record(self, step: _Step, tokens: Tensor) -> None:
        """Keep the tokens that a step has drawn, i64[num_logits], as the last ones of their seats."""
        self.last_tokens.index_copy_(0, step.sampled_seats.tensor, tokens)

    def _rows(self, plan: ComputedPart) -> tuple[NDArray[np.int32], int]:
        """Return the rows for `unpack_step`, and the length of the longest block table with new entries."""
        rows = self._advanced_rows(plan)
        if rows is None:
            seats = plan.seats + plan.absent_seats
            rows = np.zeros((len(seats), NUM_COLUMNS), np.int32)
            rows[:, SEAT] = seats
            rows[: len(plan.starts), START] = plan.starts
        rows[:, [FIRST_TOKEN, LAST_TOKEN, FIRST_ENTRY, NUM_ENTRIES]] = FROM_SEAT, FROM_SEAT, NO_NEW_ENTRIES, 0
        self._last = (plan.seats, rows) if plan.repeats(plan.seats) else None
        max_entries = 0
        num_tokens = num_entries = 0  # of the changes before
        for change in plan.changes:
            row = rows[change.row]
            if change.last_token >= 0:
                row[FIRST_TOKEN], row[LAST_TOKEN] = num_tokens, change.last_token
                num_tokens += change.num_tokens
            row[FIRST_ENTRY], row[ENTRIES] = change.first_entry, num_entries
            row[NUM_ENTRIES] = change.num_entries
            num_entries += change.num_entries
            max_entries = max(max_entries, change.first_entry + change.num_entries)
        return rows, max_entries

    def _advanced_rows(self, plan: ComputedPart) -> NDArray[np.int32] | None:
        """Return the last step's rows advanced by one token; None unless the same seats decode once more."""
        if self._last is None:
            return None
        seats, rows = self._last
        if not plan.repeats(seats):
            return None
        rows[:, START] += 1
        return rows


def _padded(numbers: array[int]) -> array[int]:
    """Pad with zeros to a power of 2, at least 16, so that few different sizes occur."""
    missing = max(16, 1 << (len(numbers) - 1).bit_length()) - len(numbers)
    return numbers + array("i", bytes(4 * missing))


def _put_outputs(
    plan: ComputedPart, seq_lens: NDArray[np.int32], ends: NDArray[np.int32], upload: Upload
) -> _Outputs | None:
    """Upload the rows whose final hidden states are needed: first rows to sample from, then rows of reports.

    Return None if all rows are needed, in order, or none.
    """
    sampled = plan.sampled
    asked = plan.asked
    if not asked and (plan.is_decode or not sampled):
        return None
    lengths = [1] * len(sampled) + [run.end - run.start for run in asked]
    at = np.array(sampled, np.int64)
    positions = np.array(plan.positions(), np.int64)
    # A token that is drawn at a position has the row of the token before it.
    drawn = ends[at + 1] - 1 - (seq_lens[at] - positions)
    if not asked and len(drawn) == ends[-1] and (drawn == np.arange(len(drawn))).all():
        return None
    rows: list[NDArray[Any]] = [
        drawn,
        *(np.arange(r.offset, r.offset + r.end - r.start) for r in asked),
    ]
    reached = [*positions, *(run.end for run in asked)]
    return _Outputs(
        upload.put(np.concatenate(rows), torch.int64),
        upload.put(sampled + [run.row for run in asked], torch.int32),
        upload.put(reached, torch.int32),
        upload.put([0, *np.cumsum(lengths)], torch.int32),
        max(lengths),
        min(lengths),
    )
