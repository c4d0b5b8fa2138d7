"""Drafter: what guesses the next tokens of requests. Draft: its guess for one of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..requests.request import Request

CERTAIN = math.inf


class Draft(NamedTuple):
    """A guess of a request's next tokens, in order; none is a guess, too.

    confidence: those of the highest are verified first where a step has no room for all; CERTAIN if no other
        token may come.
    """

    tokens: list[int]
    confidence: float = 0.0


class Drafter(Protocol):
    """Guesses the next tokens of requests. Any answer is legal: the model decides which are right.

    It learns of new tokens, preemptions and ends by looking at the requests, and must not change them.
    """

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        """Return a guess for each request, of at most so many tokens."""
