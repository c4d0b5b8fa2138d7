"""SeatedBatches: batches that a GPU makes itself, from one upload and the state of the seats."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...architectures.spec import LongContext
from ...base.errors import ResourceError
from ...device.transfers import Sent, Upload, arrived
from ...kernels.seats import (
    DRAWN_AT,
    ENTRIES,
    FIRST_ENTRY,
    FIRST_TOKEN,
    FROM_SEAT,
    LAST_TOKEN,
    NO_SLOT,
    NUM_COLUMNS,
    NUM_ENTRIES,
    NUM_TOKEN_COLUMNS,
    POSITION,
    SEAT,
    SEAT_OF_TOKEN,
    START,
    TOKEN,
    StepTensors,
    UnpackStep,
)
from ...model.batch import Batch, Queries
from ...sampling.seat_parameters import SampledPlaces
from ..plan import ComputedPart
from .batches import WITHOUT_ADAPTER, StepAdapters, put_adapters

NO_NEW_ENTRIES = 2**30  # as FIRST_ENTRY: beyond every entry, so that all are taken from the seat
MOST_PARTS = 1024  # of the static tensors that are kept


class _Outputs(NamedTuple):
    """The output rows of a batch, and the same rows as queries, if they are not all new tokens in order."""

    rows: Sent
    sources: Sent  # the row of the step of each query
    seq_lens: Sent
    cu_seqlens_q: Sent
    max_seqlen_q: int
    min_seqlen_q: int


class _Step(NamedTuple):
    """The uploaded arrays of a step, and the properties of its batch that the host computes.

    num_rows, num_tokens: of the step; `out` may have more.
    out: where the step is unpacked; None: into new tensors.
    is_padded: whether `out` is as large as a graph's step, see `SeatedBatches.padded_shape`.
    sampled: the seats of the sampled rows, and the positions of the tokens that are drawn; None: those of all
        tokens, which the device finds.
    """

    rows: Sent
    cu_seqlens_q: Sent
    tokens: Sent
    entries: Sent
    rope_lens: Sent | None
    num_rows: int
    num_tokens: int
    longest: int  # an argument of `unpack_step`
    max_seqlen_q: int
    min_seqlen_q: int
    max_decode_q: int
    max_seq_len: int | None
    out: StepTensors | None
    is_padded: bool
    outputs: _Outputs | None
    num_logits: int
    sampled: tuple[Sent, Sent] | None
    seats: Sent | None  # where states are
    runs: Sent | None  # of drafts, where there are states
    adapters: StepAdapters | None
    last_tokens: tuple[Sent, Sent] | None  # seats, and the tokens that another process has drawn for them
    rope_offsets: Sent | None = None  # of each token


class SeatedBatches:
    """Makes batches on a GPU, which stores the last token and the block tables of each seat's request.

    If a step samples after each of its tokens, it is unpacked into tensors at fixed addresses, so that a CUDA
    graph can read them. Block tables are as wide as the longest possible request needs; launches therefore
    depend on a step's lengths only through `max_seq_len`.

    split_keys: attention does not split contexts of up to this many tokens.
    max_run: maximum number of tokens of a request in a decode step; more than one with drafts.
    padded_sizes: the numbers of rows to which steps are padded, in ascending order. Larger steps are not
        padded.

    `HostBatches` is the reference.

    Raises ResourceError if memory does not suffice for all seats.
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
        split_keys: int = 0,
        max_run: int = 1,
        with_rope_lens: bool = False,
        long_context: LongContext | None = None,
        with_seats: bool = False,
        run_numbers: Callable[[ComputedPart], list[int]] | None = None,
    ) -> None:
        self._unpack_step = unpack_step
        self.block_size = block_size
        self.with_rope_lens = with_rope_lens
        self.with_seats = with_seats
        self.run_numbers = run_numbers
        self._num_groups = num_groups
        self.long_context = long_context
        self._split_keys = split_keys
        self.max_run = max_run
        self._device = device
        self.padded_sizes: Sequence[int] = ()
        self._width = -(-max_model_len // block_size)
        self._num_columns = NUM_TOKEN_COLUMNS + num_groups + (with_rope_lens or long_context is not None)
        # One seat more, for the rows that pad a step. Nothing reads what they leave there.
        num_seats = max_num_seqs + 1
        shape = num_groups, num_seats, self._width
        # Columns begin at multiples of 128 bytes.
        self.capacity = -(-max_num_seqs // 16) * 16
        try:
            self.last_tokens = torch.zeros(num_seats, dtype=torch.int64, device=device)
            self.tables = torch.zeros(shape, dtype=torch.int32, device=device)
            self._static = self._new_tensors(self.capacity, self.capacity)
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                f"no memory for the block tables of max_num_seqs {max_num_seqs} requests, each of "
                f"max_model_len {max_model_len} tokens: {8 * math.prod(shape) / 2**20:,.0f} MiB cannot be "
                f"allocated on {device}; lower either"
            ) from error
        self._adapters: Tensor | None = None  # the slots of the tokens of a graph's step
        self._rope_offsets: Tensor | None = None  # of the tokens of a graph's step
        self._has_rope_offsets = False  # whether the last of these steps had some
        self._runs: Tensor | None = None  # `Batch.runs` of a graph's step
        if run_numbers is not None:
            self._runs = torch.zeros(self.capacity, 2, dtype=torch.int32, device=device)
        self._parts: dict[tuple[int, int], StepTensors] = {}  # of the static tensors, by rows and tokens
        self._all_rows = torch.arange(self.capacity, device=device)
        self._last: tuple[list[int], NDArray[np.int32]] | None = None  # seats and rows of the last decodes

    def take_adapters(self) -> None:
        """Allow steps to have LoRA adapters."""
        self._adapters = torch.full((self.capacity,), WITHOUT_ADAPTER, dtype=torch.int32, device=self._device)

    def take_rope_offsets(self) -> None:
        """Allow graphs' steps to rotate tokens by other numbers than their positions."""
        self._rope_offsets = torch.zeros(self.capacity, dtype=torch.int64, device=self._device)

    def put(self, plan: ComputedPart, upload: Upload) -> _Step:
        """Add to the upload what the device needs for the batch of a step."""
        num_new = np.array(plan.counts, np.int32)
        num_rows = len(num_new)
        rows, max_entries = self._rows(plan)
        seq_lens = rows[:num_rows, START] + num_new
        ends = np.zeros(num_rows + 1, np.int32)
        np.cumsum(num_new, out=ends[1:])
        num_tokens = int(ends[-1])
        rope_lens = None
        max_seqlen_q = int(num_new.max())
        if self.with_rope_lens or self.long_context is not None:
            rope_lens = upload.put(plan.rope_lens, torch.int32)
        last_tokens = None
        if plan.last_tokens:
            decodes = upload.put(plan.seats[: plan.num_decodes], torch.int64)
            last_tokens = decodes, upload.put(plan.last_tokens, torch.int64)
        outputs = sampled = out = None
        if not plan.is_decode or plan.asked:
            outputs = _put_outputs(plan, seq_lens, ends, upload)
        num_logits = len(plan.sampled)
        padded = None
        max_decode_q = 1
        if num_logits and outputs is None and num_tokens <= self.capacity:
            padded = self.padded_shape(num_rows, max_seqlen_q)
            out = self.static(*(padded or (num_rows, num_tokens)))
            # Runs of drafts are decodes, whose keys are split, where partial results are no more than of as
            # many decodes as there may be.
            if max_seqlen_q > 1 and num_rows * self.max_run <= self.capacity:
                max_decode_q = self.max_run
        # A draft model draws after the last token of each row alone.
        draws_last = len(plan.sampled_seats) != num_logits
        if num_logits and (out is None or draws_last):
            positions = upload.put(seq_lens if draws_last else plan.positions(), torch.int64)
            sampled = upload.put(plan.sampled_seats, torch.int64), positions
        return _Step(
            rows=upload.put(rows, torch.int32),
            cu_seqlens_q=upload.put(ends, torch.int32),
            tokens=upload.put(_padded(plan.tokens), torch.int32),
            entries=upload.put([_padded(group) for group in plan.entries], torch.int32),
            rope_lens=rope_lens,
            num_rows=num_rows,
            num_tokens=num_tokens,
            longest=max(max_seqlen_q, max_entries),
            max_seqlen_q=max_seqlen_q,
            min_seqlen_q=int(num_new.min()),
            max_decode_q=max_decode_q,
            max_seq_len=self._split_keys if int(seq_lens.max()) <= self._split_keys else None,
            out=out,
            is_padded=padded is not None,
            outputs=outputs,
            num_logits=num_logits,
            sampled=sampled,
            seats=upload.put(plan.seats, torch.int32) if self.with_seats else None,
            runs=self._put_runs(plan, upload, padded[0] if padded else num_rows),
            adapters=put_adapters(plan, upload, padded[1] if padded else 0) if plan.adapters else None,
            last_tokens=last_tokens,
            rope_offsets=_put_rope_offsets(plan, upload, padded[1] if padded else num_tokens),
        )

    def batch(self, step: _Step) -> Batch:
        """Make the batch of a step, once its upload is sent."""
        out = self.unpack(step)
        num_rows = step.num_rows
        num_tokens = step.num_tokens
        outputs = step.outputs
        extremes = step.max_seqlen_q, step.min_seqlen_q
        columns = [column[:num_tokens] for column in out.by_token.unbind()]
        lens = out.seq_lens[:num_rows], out.cu_seqlens_q[: num_rows + 1]
        tables = tuple(table[:num_rows] for table in out.tables.unbind())
        queries = Queries(tables, *lens, *extremes, step.max_decode_q, step.max_seq_len)
        output_rows = self._all_rows[: step.num_logits]
        output_queries = queries if step.num_logits else None
        if outputs is not None:
            output_rows = outputs.rows.tensor
            lens = outputs.seq_lens.tensor, outputs.cu_seqlens_q.tensor
            extremes = outputs.max_seqlen_q, outputs.min_seqlen_q
            tables = tuple(table[num_rows:] for table in out.tables.unbind())
            output_queries = Queries(tables, *lens, *extremes, max_seq_len=step.max_seq_len)
        batch = self._batch(columns, queries, output_rows, output_queries, step.num_logits)
        batch.seats = arrived(step.seats)
        batch.runs = None if step.runs is None else step.runs.tensor[:num_rows]
        if step.rope_offsets is not None:
            batch.positions = batch.positions + step.rope_offsets.tensor[:num_tokens]
        if step.adapters is not None:
            by_token, batch.output_adapters = step.adapters.tensors()
            batch.adapters = by_token[:num_tokens]
        return batch

    def unpack(self, step: _Step) -> StepTensors:
        """Compute the tensors of a step on the device, once its upload is sent."""
        if step.last_tokens is not None:
            seats, tokens = step.last_tokens
            self.last_tokens.index_copy_(0, seats.tensor, tokens.tensor)
        if self._adapters is not None and step.adapters is not None and step.is_padded:
            slots = step.adapters.by_token.tensor
            self._adapters[: len(slots)].copy_(slots)
        if self._rope_offsets is not None and step.is_padded:
            self._write_rope_offsets(step.rope_offsets)
        if self._runs is not None and step.runs is not None and step.is_padded:
            runs = step.runs.tensor
            self._runs[: len(runs)].copy_(runs)
        outputs = step.outputs
        out = step.out
        if out is None:
            num_more = 0 if outputs is None else len(outputs.sources.numbers)
            out = self._new_tensors(step.num_rows, step.num_tokens, num_more)
        self._unpack_step(
            step.rows.tensor,
            step.cu_seqlens_q.tensor,
            step.tokens.tensor,
            step.entries.tensor,
            self.last_tokens,
            self.tables,
            None if outputs is None else outputs.sources.tensor,
            arrived(step.rope_lens),
            out,
            num_tokens=step.num_tokens,
            longest=step.longest,
            block_size=self.block_size,
        )
        return out

    def _put_runs(self, plan: ComputedPart, upload: Upload, num_rows: int) -> Sent | None:
        """Add `Batch.runs` of a step to an upload, padded to so many rows."""
        if self.run_numbers is None:
            return None
        numbers = np.zeros((num_rows, 2), np.int32)
        numbers.reshape(-1)[: 2 * len(plan.seats)] = self.run_numbers(plan)
        return upload.put(numbers, torch.int32)

    def _write_rope_offsets(self, sent: Sent | None) -> None:
        assert self._rope_offsets is not None
        if sent is not None:
            self._has_rope_offsets = True
            self._rope_offsets[: len(sent.tensor)].copy_(sent.tensor)
        elif self._has_rope_offsets:
            self._rope_offsets.zero_()
            self._has_rope_offsets = False

    def places(self, step: _Step) -> SampledPlaces | None:
        """Return seats and positions of a step's sampled rows, once its batch is made; None without any."""
        if step.sampled is not None:
            seats, positions = step.sampled
            return SampledPlaces(seats.tensor, positions.tensor)
        return None if step.out is None else places_in(step.out, step.num_logits)

    def record(self, step: _Step, tokens: Tensor) -> None:
        """Store a step's drawn tokens, i64[num_logits], as the last tokens of their seats."""
        places = self.places(step)
        if places is not None:
            self.last_tokens.index_copy_(0, places.seats, tokens)

    def static(self, num_rows: int, num_tokens: int) -> StepTensors:
        """Return views of the tensors at fixed addresses: their first rows and tokens."""
        sizes = num_rows, num_tokens
        found = self._parts.get(sizes)
        if found is None:
            if len(self._parts) >= MOST_PARTS:
                self._parts.clear()
            all_tokens, tables, seq_lens, cu_seqlens_q = self._static
            found = self._parts[sizes] = StepTensors(
                all_tokens[:, :num_tokens],
                tables[:, :num_rows],
                seq_lens[:num_rows],
                cu_seqlens_q[: num_rows + 1],
            )
        return found

    def _new_tensors(self, num_rows: int, num_tokens: int, num_more: int = 0) -> StepTensors:
        device = self._device
        return StepTensors(
            torch.empty(self._num_columns, num_tokens, dtype=torch.int64, device=device),
            torch.empty(self._num_groups, num_rows + num_more, self._width, dtype=torch.int32, device=device),
            torch.empty(num_rows, dtype=torch.int32, device=device),
            torch.empty(num_rows + 1, dtype=torch.int32, device=device),
        )

    def padded_shape(self, num_rows: int, max_seqlen_q: int) -> tuple[int, int] | None:
        """Return the padded numbers of rows and tokens of a step; None if the step is not padded.

        Only steps that sample after each of their tokens are padded. The number of tokens is padded as if all
        rows had the longest run.
        """
        sizes = self.padded_sizes
        if not sizes or num_rows > sizes[-1] or max_seqlen_q > self.max_run:
            return None
        padded_rows = sizes[bisect_left(sizes, num_rows)]
        if max_seqlen_q > 1 and padded_rows * self.max_run > self.capacity:
            return None
        return padded_rows, padded_rows * max_seqlen_q

    def clear(self, num_rows: int, num_tokens: int) -> None:
        """Fill the fixed tensors with padding for this many rows and tokens. Padding computes nothing."""
        by_token, tables, seq_lens, cu_seqlens_q = self.static(num_rows, num_tokens)
        for tensor in (by_token, tables, seq_lens, cu_seqlens_q):
            tensor.zero_()
        by_token[SEAT_OF_TOKEN].fill_(len(self.last_tokens) - 1)
        by_token[NUM_TOKEN_COLUMNS : NUM_TOKEN_COLUMNS + self._num_groups].fill_(NO_SLOT)
        if self._num_columns > NUM_TOKEN_COLUMNS + self._num_groups:
            by_token[-1].fill_(1)
        if self._adapters is not None:
            self._adapters[:num_tokens].fill_(WITHOUT_ADAPTER)
        if self._rope_offsets is not None:
            self._write_rope_offsets(None)

    def padded_batch(
        self, num_rows: int, num_tokens: int, *, is_short: bool, has_adapters: bool = False
    ) -> Batch:
        """Return the batch of a step that is padded to `num_rows` rows and `num_tokens` tokens.

        is_short: whether attention splits no context.
        has_adapters: whether any token has a LoRA adapter.
        """
        out = self.static(num_rows, num_tokens)
        queries = Queries(
            block_tables=out.tables.unbind(),
            seq_lens=out.seq_lens,
            cu_seqlens_q=out.cu_seqlens_q,
            max_seqlen_q=num_tokens // num_rows,
            min_seqlen_q=1,
            max_decode_q=1 if num_tokens == num_rows else self.max_run,
            max_seq_len=self._split_keys if is_short else None,
        )
        rows = self._all_rows[:num_tokens]
        batch = self._batch(out.by_token.unbind(), queries, rows, queries, num_tokens)
        batch.real_count = out.cu_seqlens_q[num_rows:]
        if self._rope_offsets is not None:
            batch.positions = batch.positions + self._rope_offsets[:num_tokens]
        if self.with_seats:  # rows without tokens read and write no state
            seats = out.by_token[SEAT_OF_TOKEN]
            if num_tokens > num_rows:
                seats = seats.index_select(0, out.cu_seqlens_q[:-1].clamp(max=num_tokens - 1))
            batch.seats = seats.int()
            batch.runs = None if self._runs is None else self._runs[:num_rows]
        if has_adapters and self._adapters is not None:
            batch.adapters = batch.output_adapters = self._adapters[:num_tokens]
        return batch

    @property
    def adapter_choices(self) -> Sequence[bool]:
        """Whether a step has LoRA adapters: both values are possible, or False alone."""
        return (False,) if self._adapters is None else (False, True)

    def _batch(
        self,
        columns: Sequence[Tensor],
        queries: Queries,
        output_rows: Tensor,
        output_queries: Queries | None,
        num_logits: int,
    ) -> Batch:
        positions = columns[POSITION]
        if self.long_context is not None:
            positions = positions + self.long_context.offset * (columns[-1] >= self.long_context.num_tokens)
        return Batch(
            token_ids=columns[TOKEN],
            positions=positions,
            rope_lens=columns[-1] if self.with_rope_lens else None,
            slot_mapping=tuple(columns[NUM_TOKEN_COLUMNS : NUM_TOKEN_COLUMNS + self._num_groups]),
            queries=queries,
            output_rows=output_rows,
            output_queries=output_queries,
            num_logits=num_logits,
            is_decode=output_queries is queries,
        )

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


def places_in(out: StepTensors, num_tokens: int) -> SampledPlaces:
    """Return the seats and positions of a step's first num_tokens tokens, if all of them are sampled."""
    by_token = out.by_token
    return SampledPlaces(by_token[SEAT_OF_TOKEN, :num_tokens], by_token[DRAWN_AT, :num_tokens])


def _put_rope_offsets(plan: ComputedPart, upload: Upload, num_tokens: int) -> Sent | None:
    """Add the offset of each token to an upload, padded to so many tokens; see `ComputedPart`."""
    if not plan.rope_offsets:
        return None
    offsets = np.zeros(num_tokens, np.int64)
    own = np.repeat(plan.rope_offsets, plan.counts)
    offsets[: len(own)] = own
    return upload.put(offsets, torch.int64)


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
