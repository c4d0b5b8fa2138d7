"""GrammarDrafter: the tokens that a request's grammar forces, and another drafter's guesses elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from ..requests.request import Request
from .drafter import CERTAIN, Draft, Drafter


class GrammarDrafter:
    """Guesses the tokens that structured_outputs force: those are right.

    others: guesses where nothing is forced. A guess of its that begins with the forced tokens goes further
        than they do, and is taken.
    """

    def __init__(self, others: Drafter | None = None) -> None:
        self._others = others

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        """Return a guess for each request."""
        others = [Draft([])] * len(requests)
        if self._others is not None:
            others = self._others.propose(requests, limits)
        return [
            guess if request.sampling.grammar is None else self._forced(request, limit, guess)
            for request, limit, guess in zip(requests, limits, others, strict=True)
        ]

    def _forced(self, request: Request, limit: int, guess: Draft) -> Draft:
        assert request.sampling.grammar is not None, "nothing forces tokens"
        forced = request.sampling.grammar.forced(request)[:limit]
        if guess.tokens[: len(forced)] == forced:
            return guess
        return Draft(forced, CERTAIN)
