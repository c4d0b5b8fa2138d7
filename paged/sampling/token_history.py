"""TokenHistory: for penalties, which tokens each request contains and how often it generated each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..device.transfers import Sent, Upload
from .seats import DraftRow, Sampled

MIN_SLOTS = 4
SCRATCH_SLOT = 0  # of rows without penalties, where a CUDA graph counts the tokens of all rows
NOT_A_DRAFT = -1  # no token equals it
UNKNOWN = -1


class DraftCounts(NamedTuple):
    """The rows of a step that follow drafts. Such a row counts the tokens of its request's first row, plus
    its drafts.

    places: indices of the drafts in the flat counts, row by row.
    firsts: for each row, the number of its request's first row.
    next_drafts: for each row, the draft that the drawn token must equal; NOT_A_DRAFT after the last draft.
    """

    slots: Sent  # of these rows
    own_slots: Sent  # of their requests' own rows
    places: Sent
    firsts: Sent
    next_drafts: Sent


class Recount(NamedTuple):
    """The requests of a step, and the tokens of requests that the device has not counted yet.

    seen, generated: indices in the flat counts, request by request.
    """

    requests: list[Sampled]
    positions: list[int]  # of all requests: how many tokens each has
    slots: Sent | None  # of those that are counted; None: there are none
    seen: Sent | None
    generated: Sent | None
    drafts: DraftCounts | None


class TokenHistory:
    """Token counts on the device, with one slot per row of the current batch whose request uses penalties.

    A request that ended or was preempted has no slot; if it resumes, its tokens are counted again. Drawn
    tokens are counted on the device, so the host need not wait for them. A row that follows drafts has its
    own slot for one step. Of the tokens that a request draws, only those that follow right drafts count.

    num_slots: the number of rows for which memory is allocated when the first row uses penalties. It grows
        when needed.
    """

    def __init__(self, vocab_size: int, device: torch.device, num_slots: int = MIN_SLOTS) -> None:
        self.output_counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)  # in prompt or output
        self.slots: Sent | None = None  # i64[num_rows], in their order
        self._least_slots = num_slots
        self._slots: dict[Sampled, int] = {}
        self._known: dict[Sampled, int] = {}  # how many tokens of each request are counted
        # By request: how many tokens were counted when it drew behind drafts, and these drafts.
        self._runs: dict[Sampled, tuple[int, list[int]]] = {}

    @property
    def num_slots(self) -> int:
        """The number of rows for which memory is allocated."""
        return self.output_counts.shape[0]

    def keep(self, rows: Sequence[Sampled], upload: Upload) -> None:
        """Assign slots to these rows only. A row that follows drafts comes after its request's first row."""
        if not rows and not self._slots:
            return
        stay = set(rows)
        before = {row: slot for row, slot in self._slots.items() if row in stay}
        self._known = {request: known for request, known in self._known.items() if request in before}
        self._runs = {request: run for request, run in self._runs.items() if request in before}
        taken = set(before.values())
        self._grow(SCRATCH_SLOT + 1 + len(rows))
        free = (slot for slot in range(SCRATCH_SLOT + 1, self.num_slots) if slot not in taken)
        self._slots = {row: before[row] if row in before else next(free) for row in rows}
        self.slots = upload.put([*self._slots.values()], torch.int64)

    def prepare(self, positions: Sequence[int], upload: Upload) -> Recount:
        """Send the drafts, and the tokens that the device has not counted yet.

        positions: the positions of the token that each row draws.
        """
        vocab_size = self.output_counts.shape[1]
        slots = self._slots
        self._settle_runs()
        of_requests = {
            row: at for row, at in zip(slots, positions, strict=True) if not isinstance(row, DraftRow)
        }
        drafts = self._put_drafts(upload) if len(of_requests) < len(slots) else None
        requests = [*of_requests]
        known = [*of_requests.values()]
        new = [request for request, at in of_requests.items() if self._known.get(request) != at]
        if not new:
            return Recount(requests, known, None, None, None, drafts)
        for request in new:
            assert len(request.token_ids) == of_requests[request], (
                "a token is not known that would be counted"
            )
        seen = [np.array(r.token_ids, np.int64) + slots[r] * vocab_size for r in new]
        generated = [places[r.num_prompt_tokens :] for r, places in zip(new, seen, strict=True)]
        slots_of_new, all_seen, all_generated = (
            upload.put(numbers, torch.int64)
            for numbers in ([slots[r] for r in new], np.concatenate(seen), np.concatenate(generated))
        )
        return Recount(requests, known, slots_of_new, all_seen, all_generated, drafts)

    def _settle_runs(self) -> None:
        """Note how many tokens the device has counted of what requests have drawn behind drafts.

        It has counted all up to the first that was no draft. A run that ended before, as a row had an error,
        is another: its request is counted anew.
        """
        for request, (num_known, drafts) in self._runs.items():
            run = request.token_ids[num_known:]
            num_right = len(run) - 1
            is_whole = run[:-1] == drafts[:num_right] and run[-1:] != drafts[num_right : num_right + 1]
            self._known[request] = len(request.token_ids) if run and is_whole else UNKNOWN
        self._runs = {}

    def _put_drafts(self, upload: Upload) -> DraftCounts:
        vocab_size = self.output_counts.shape[1]
        slots = self._slots
        behind = [(row, slot) for row, slot in slots.items() if isinstance(row, DraftRow)]
        places = [
            slot * vocab_size + token for row, slot in behind for token in row.seat.drafts[: row.num_drafts]
        ]
        firsts = list[int]()
        next_drafts = list[int]()
        for i, row in enumerate(slots):
            if isinstance(row, DraftRow):
                firsts.append(firsts[-1])
                next_drafts[-1] = row.seat.drafts[row.num_drafts - 1]
            else:
                firsts.append(i)
            next_drafts.append(NOT_A_DRAFT)
        numbers = ([slot for _, slot in behind], [slots[row.seat] for row, _ in behind], places, firsts)
        return DraftCounts(*(upload.put(each, torch.int64) for each in (*numbers, next_drafts)))

    def count(self, recount: Recount) -> None:
        """Count the tokens of a step's new requests."""
        self._known = {}  # until all is done
        if recount.slots and recount.seen and recount.generated:
            counts = self.output_counts
            seen = self.seen
            slots = recount.slots.tensor
            seen.index_fill_(0, slots, False)
            counts.index_fill_(0, slots, 0)
            seen.view(-1).index_fill_(0, recount.seen.tensor, True)
            _count(counts, recount.generated.tensor)
        if recount.drafts is not None:
            self._count_drafts(recount.drafts)
        self._known = dict(zip(recount.requests, recount.positions, strict=True))

    def _count_drafts(self, drafts: DraftCounts) -> None:
        slots = drafts.slots.tensor
        own_slots = drafts.own_slots.tensor
        for counts in (self.output_counts, self.seen):
            counts.index_copy_(0, slots, counts.index_select(0, own_slots))
        _count(self.output_counts, drafts.places.tensor)
        self.seen.view(-1).index_fill_(0, drafts.places.tensor, True)

    def record(
        self,
        tokens: Tensor,  # i64[num_logits], those that were drawn
        rows: Tensor,  # i64[num_rows], where each row's token is among them
        drafts: DraftCounts | None = None,
    ) -> None:
        """Count the drawn tokens. A token that follows drafts counts only if the drafts are right."""
        assert self.slots is not None, "no row has a slot"
        known = self._known
        self._known = {}
        drawn = tokens.index_select(0, rows)
        if drafts is None:
            self.add(self.slots.tensor, drawn)
        else:
            starts = self.slots.tensor * self.output_counts.shape[1]
            firsts = drafts.firsts.tensor
            is_wrong = (drawn != drafts.next_drafts.tensor).long()
            num_wrong = is_wrong.cumsum(0).sub_(is_wrong)  # among the rows before
            is_counted = num_wrong == num_wrong.index_select(0, firsts)
            places = starts.index_select(0, firsts) + drawn
            # What is not counted takes the place of the request's first token, which always is.
            places = places.where(is_counted, places.index_select(0, firsts))
            self.output_counts.view(-1).index_add_(0, places, is_counted.int())
            self.seen.view(-1).index_fill_(0, places, True)
        drafting = {row.seat for row in self._slots if isinstance(row, DraftRow)}
        self._runs = {seat: (known[seat], seat.drafts) for seat in drafting}
        self._known = {request: num + 1 for request, num in known.items() if request not in self._runs}

    def add(self, slots: Tensor, tokens: Tensor) -> None:
        """Count one token in each of these slots; both are i64[num_rows]."""
        places = slots * self.output_counts.shape[1] + tokens
        _count(self.output_counts, places)
        self.seen.view(-1).index_fill_(0, places, True)

    def note_drawn(self) -> None:
        """Record that a replayed graph has counted one drawn token per request. The step has no drafts."""
        self._known = {request: num + 1 for request, num in self._known.items()}

    def _grow(self, num_slots: int) -> None:
        missing = num_slots - self.num_slots
        if missing > 0:
            # Doubled, so that existing counts are not copied for every new request.
            missing = max(missing, self.num_slots, self._least_slots - self.num_slots)
            self.output_counts, self.seen = (
                torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])
                for rows in (self.output_counts, self.seen)
            )

    def check(self) -> None:
        """Check that each request has its own slot with the right counts, including its drawn token."""
        assert len(set(self._slots.values())) == len(self._slots), "two requests share a slot"
        slots = [] if self.slots is None else self.slots.tensor.tolist()
        assert slots == [*self._slots.values()], "the slots are not in the requests' order"
        for request, num_known in self._known.items():
            slot = self._slots[request]
            known = request.token_ids[:num_known]
            output = known[request.num_prompt_tokens :]
            num_drawn = num_known - len(known)
            counts = self.output_counts[slot].clone()
            for token in output:
                counts[token] -= 1
            assert counts.sum() == num_drawn
            assert (counts >= 0).all()
            seen = {*known, *counts.nonzero()[:, 0].tolist()}
            assert self.seen[slot].nonzero()[:, 0].tolist() == sorted(seen)


def _count(counts: Tensor, places: Tensor) -> None:
    """Add 1 to the flat counts at each place, as often as the place occurs."""
    counts.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))
