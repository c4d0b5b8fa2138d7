"""Drafter: what guesses the next tokens of requests. Draft: its guess for one of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..requests.request import Request

CERTAIN = math.inf


class Draft(NamedTuple):
    """A guess of a request's next tokens, in order; it may be empty.

    confidence: if a step lacks room for all drafts, the most confident ones are verified; CERTAIN if
        no other tokens may follow.
    """

    tokens: list[int]
    confidence: float = 0.0


class Drafter(Protocol):
    """Guesses the next tokens of requests. Any guess is allowed: the model decides which tokens are right.

    A drafter sees new tokens, preemptions and ends in the requests themselves. It must not change them.
    """

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        """Return a guess for each request. The guess for requests[i] has at most limits[i] tokens."""
