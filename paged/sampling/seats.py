"""SamplingSeats: what the sampler knows of running requests, which lives on beside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from ..requests.request import Request, RequestInputs, SamplingState


class Sampled(Protocol):
    """What the sampler reads of a request: the request itself has it, and so has a `SamplingSeat`."""

    inputs: RequestInputs
    sampling: SamplingState
    stop_ids: frozenset[int]
    num_prompt_tokens: int
    token_ids: list[int]

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens generated so far."""

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""


class SamplingSeat:
    """What the sampler knows of the request in a seat.

    token_ids: prompt, then output; empty unless the request edits its logits.
    """

    __slots__ = ("inputs", "num_prompt_tokens", "sampling", "stop_ids", "token_ids")

    def __init__(self, request: Request) -> None:
        self.inputs = request.inputs
        self.sampling = request.sampling
        self.stop_ids = request.stop_ids
        self.num_prompt_tokens = request.num_prompt_tokens
        self.token_ids = request.token_ids.copy() if request.inputs.params.edits_logits else []

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]


class SamplingSeats:
    """The seats of running requests. Each gets the parameters of its request once, and then only tokens.

    Parameters are not in a step's plan: they do not change, and may hold functions.
    """

    def __init__(self) -> None:
        self._seats: dict[int, SamplingSeat] = {}

    def change(self, vacated: Iterable[int], newcomers: Iterable[Request]) -> None:
        """Empty the seats that requests have left, and fill those that others have taken.

        newcomers: also those that were changed in their seats.
        """
        for seat in vacated:
            self._seats.pop(seat, None)
        for request in newcomers:
            self._seats[request.seat] = SamplingSeat(request)

    def add_tokens(self, seat: int, start: int, tokens: Sequence[int]) -> None:
        """Give a seat the tokens of its request from a position on."""
        self._seats[seat].token_ids[start:] = tokens

    def at(self, seats: Sequence[int]) -> list[SamplingSeat]:
        """Return these seats."""
        return [*map(self._seats.__getitem__, seats)]
