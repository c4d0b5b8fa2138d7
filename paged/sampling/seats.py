"""SamplingSeats: what the sampler knows of running requests, for as long as they run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from ..requests.request import NO_SEAT, Request, RequestInputs, SamplingState


class Sampled(Protocol):
    """The attributes of a request that the sampler reads. `Request` and `SamplingSeat` have them."""

    inputs: RequestInputs
    sampling: SamplingState
    stop_ids: frozenset[int]
    num_prompt_tokens: int

    @property
    def token_ids(self) -> list[int]:
        """The prompt followed by the output so far."""

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens generated so far."""

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""


class SamplingSeat:
    """The sampler's state for the request in one seat.

    token_ids: the prompt, followed by the output; empty unless the request edits its logits.
    drafts: the drafts of the newest step; empty unless the request edits its logits.
    """

    __slots__ = ("_rows", "drafts", "inputs", "num_prompt_tokens", "sampling", "stop_ids", "token_ids")

    def __init__(self, request: Request) -> None:
        self.inputs = request.inputs
        self.sampling = request.sampling
        self.stop_ids = request.stop_ids
        self.num_prompt_tokens = request.num_prompt_tokens
        self.token_ids = request.token_ids.copy() if request.inputs.params.edits_logits else []
        self.drafts: list[int] = []
        self._rows: list[DraftRow] = []

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    def row(self, num_drafts: int) -> SamplingSeat | DraftRow:
        """Return the state of the request after its first num_drafts drafts.

        Every step gets the same object, so that the sampler need not gather the parameters again.
        """
        if not num_drafts:
            return self
        while len(self._rows) < num_drafts:
            self._rows.append(DraftRow(self, len(self._rows) + 1))
        row = self._rows[num_drafts - 1]
        row.follow_grammar()
        return row


class DraftRow:
    """The state of a request after its first num_drafts drafts, as if they were accepted."""

    __slots__ = ("inputs", "num_drafts", "num_prompt_tokens", "sampling", "seat", "stop_ids")

    def __init__(self, seat: SamplingSeat, num_drafts: int) -> None:
        self.seat = seat
        self.num_drafts = num_drafts
        self.inputs = seat.inputs
        self.sampling = SamplingState(seat.sampling.seed, seat.sampling.parameters)
        self.stop_ids = seat.stop_ids
        self.num_prompt_tokens = seat.num_prompt_tokens

    @property
    def token_ids(self) -> list[int]:
        """The prompt, the output and the drafts."""
        return self.seat.token_ids + self.seat.drafts[: self.num_drafts]

    @property
    def num_output_tokens(self) -> int:
        """The number of tokens generated so far, drafts included."""
        return self.seat.num_output_tokens + self.num_drafts

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far, followed by the drafts."""
        return self.token_ids[self.num_prompt_tokens :]

    def follow_grammar(self) -> None:
        """Copy the state of the request's grammar, and advance the copy by the drafts."""
        if self.seat.sampling.grammar is not None:
            self.sampling.grammar = self.seat.sampling.grammar.copy()


class SamplingSeats:
    """The sampler's state for all seats. A seat gets its request's parameters once, and then only tokens.

    Parameters are not part of a step's plan, because they do not change and may contain functions.
    """

    def __init__(self) -> None:
        self._seats: dict[int, SamplingSeat] = {}

    def change(self, vacated: Iterable[int], newcomers: Iterable[Request]) -> None:
        """Clear the seats that requests have left, and fill the seats of newcomers.

        newcomers: the requests that took a seat, or changed in theirs.
        """
        for seat in vacated:
            self._seats.pop(seat, None)
        for request in newcomers:
            self._seats[request.seat] = SamplingSeat(request)

    def add_tokens(self, seat: int, start: int, tokens: Sequence[int], drafts: Sequence[int]) -> None:
        """Add the tokens of a request from position `start` on to its seat, and the drafts that follow them.

        The tokens before `start` are known: the accepted ones of the last step's drafts stay.
        """
        found = self._seats[seat]
        found.token_ids += found.drafts
        found.token_ids[start:] = tokens
        found.drafts = [*drafts]

    def at(self, seats: Sequence[int]) -> list[SamplingSeat]:
        """Return the states of these seats."""
        return [*map(self._seats.__getitem__, seats)]

    def with_drafts(self, seats: Sequence[int]) -> list[SamplingSeat | DraftRow]:
        """Return a state for each row. Where a seat repeats, each further row follows one more draft."""
        rows = list[SamplingSeat | DraftRow]()
        before = NO_SEAT
        num_drafts = 0
        for seat in seats:
            num_drafts = num_drafts + 1 if seat == before else 0
            rows.append(self._seats[seat].row(num_drafts))
            before = seat
        return rows
