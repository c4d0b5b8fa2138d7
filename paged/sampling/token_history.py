"""TokenHistory: for penalties, which tokens each request contains and how often it generated each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..device.transfers import Sent, Upload
from .seats import Sampled

MIN_SLOTS = 4


class Recount(NamedTuple):
    """The requests of a step, and the tokens of those that the device has not counted yet.

    seen, generated: places in the flat counts, request by request.
    """

    requests: list[Sampled]
    positions: list[int]  # of all requests: how many tokens each has
    slots: Sent | None  # of those that are counted; None: there are none
    seen: Sent | None
    generated: Sent | None


class TokenHistory:
    """Token counts on the device, with one slot per request of the current batch that uses penalties.

    A request that ended or was preempted has none; if it comes back, its tokens are counted anew. Tokens that
    are drawn are counted on the device, so that nothing waits for them.

    num_slots: how many requests there is memory for when the first uses penalties; there is more when needed.
    """

    def __init__(self, vocab_size: int, device: torch.device, num_slots: int = MIN_SLOTS) -> None:
        self.output_counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)  # in prompt or output
        self.slots: Sent | None = None  # i64[num_requests], in their order
        self._least_slots = num_slots
        self._slots: dict[Sampled, int] = {}
        self._known: dict[Sampled, int] = {}  # how many tokens are counted

    @property
    def num_slots(self) -> int:
        """The number of requests that there is memory for."""
        return self.output_counts.shape[0]

    def keep(self, requests: Sequence[Sampled], upload: Upload) -> None:
        """Assign slots to these requests, and to no others."""
        if not requests and not self._slots:
            return
        stay = set(requests)
        before = {request: slot for request, slot in self._slots.items() if request in stay}
        self._known = {request: known for request, known in self._known.items() if request in before}
        taken = set(before.values())
        self._grow(len(requests))
        free = (slot for slot in range(self.num_slots) if slot not in taken)
        self._slots = {r: before[r] if r in before else next(free) for r in requests}
        self.slots = upload.put([*self._slots.values()], torch.int64)

    def prepare(self, positions: Sequence[int], upload: Upload) -> Recount:
        """Send the tokens of requests that are new, or not counted up to their position."""
        vocab_size = self.output_counts.shape[1]
        slots = self._slots
        new = [r for r, at in zip(slots, positions, strict=True) if self._known.get(r) != at]
        if not new:
            return Recount([*slots], [*positions], None, None, None)
        seen = [np.array(r.token_ids, np.int64) + slots[r] * vocab_size for r in new]
        generated = [places[r.num_prompt_tokens :] for r, places in zip(new, seen, strict=True)]
        put = (
            upload.put(numbers, torch.int64)
            for numbers in ([slots[r] for r in new], np.concatenate(seen), np.concatenate(generated))
        )
        return Recount([*slots], [*positions], *put)

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
        self._known = dict(zip(recount.requests, recount.positions, strict=True))

    def record(
        self,
        tokens: Tensor,  # i64[num_rows], those that were drawn
        rows: Tensor,  # i64[num_requests], the row of each request's token
    ) -> None:
        """Count the tokens that were drawn for the requests."""
        assert self.slots is not None, "no request has a slot"
        known = self._known
        self._known = {}
        places = self.slots.tensor * self.output_counts.shape[1] + tokens.index_select(0, rows)
        _count(self.output_counts, places)
        self.seen.view(-1).index_fill_(0, places, True)
        self._known = {request: num + 1 for request, num in known.items()}

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
        """Check that each request has its own slot, with the right counts, its drawn token among them."""
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
            assert num_drawn <= 1
            assert counts.sum() == num_drawn
            assert (counts >= 0).all()
            seen = {*known, *counts.nonzero()[:, 0].tolist()}
            assert self.seen[slot].nonzero()[:, 0].tolist() == sorted(seen)


def _count(counts: Tensor, places: Tensor) -> None:
    """Add 1 to the flat counts at each place, as often as the place occurs."""
    counts.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))
