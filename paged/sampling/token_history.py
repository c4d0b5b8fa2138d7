"""TokenHistory: for penalties, which tokens each request contains and how often it generated each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..requests.request import Request

MIN_SLOTS = 4


class TokenHistory:
    """Token counts on the device, with one slot per request of the current batch that uses penalties.

    A request that ended or was preempted has none; if it comes back, its tokens are counted anew.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.output_counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)  # in prompt or output
        self.slots = torch.zeros(0, dtype=torch.int64, device=device)  # of the requests, in their order
        self._slots: dict[Request, int] = {}
        self._known: dict[Request, int] = {}  # how many tokens are counted

    @property
    def num_slots(self) -> int:
        """The number of requests that there is memory for."""
        return self.output_counts.shape[0]

    def keep(self, requests: Sequence[Request]) -> None:
        """Assign slots to these requests, and to no others."""
        if not requests and not self._slots:
            return
        stay = set(requests)
        self._slots = {request: slot for request, slot in self._slots.items() if request in stay}
        self._known = {request: self._known[request] for request in self._slots}
        taken = set(self._slots.values())
        self._grow(len(requests))
        free = (slot for slot in range(self.num_slots) if slot not in taken)
        for request in requests:
            if request not in self._slots:
                self._slots[request] = slot = next(free)
                self._fill(slot, request)
        self._slots = {request: self._slots[request] for request in requests}
        slots = [*self._slots.values()]
        self.slots = torch.tensor(slots, dtype=torch.int64, device=self.slots.device)

    def update(self) -> None:
        """Count the tokens that are new since the last call."""
        vocab_size, known = self.output_counts.shape[1], self._known
        new = [
            slot * vocab_size + token
            for request, slot in self._slots.items()
            for token in request.token_ids[known[request] :]
        ]
        if new:
            self._known = {request: len(request.token_ids) for request in self._slots}
            index = torch.tensor(new, device=self.slots.device)
            ones = torch.ones_like(index, dtype=torch.int32)
            self.output_counts.view(-1).index_add_(0, index, ones)
            self.seen.view(-1).index_fill_(0, index, True)

    def _grow(self, num_slots: int) -> None:
        missing = num_slots - self.num_slots
        if missing > 0:
            # Doubled, so that existing counts are not copied for every new request.
            missing = max(missing, self.num_slots, MIN_SLOTS)
            self.output_counts, self.seen = (
                torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])
                for rows in (self.output_counts, self.seen)
            )

    def _fill(self, slot: int, request: Request) -> None:
        start = request.num_prompt_tokens
        tokens = torch.tensor(request.token_ids, device=self.slots.device)
        self.seen[slot] = False
        self.seen[slot, tokens] = True
        self.output_counts[slot] = tokens[start:].bincount(minlength=self.output_counts.shape[1])
        self._known[request] = len(request.token_ids)

    def check(self) -> None:
        """Check that each request has its own slot, with the right counts."""
        assert len(set(self._slots.values())) == len(self._slots), "two requests share a slot"
        assert self.slots.tolist() == [*self._slots.values()], "the slots are not in the requests' order"
        for request, slot in self._slots.items():
            known = request.token_ids[: self._known[request]]
            output = known[request.num_prompt_tokens :]
            assert self.seen[slot].nonzero()[:, 0].tolist() == sorted(set(known))
            assert self.output_counts[slot].sum() == len(output)
            assert all(self.output_counts[slot, token] == output.count(token) for token in output)
