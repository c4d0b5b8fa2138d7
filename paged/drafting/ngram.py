"""NgramDrafter: what followed the last tokens where they occurred before in the request."""

from __future__ import annotations

from collections.abc import Sequence

from ..requests.request import Request
from .drafter import Draft
from .token_index import TokenIndex


class NgramDrafter:
    """Prompt lookup: the continuation of the newest occurrence that matches in the most tokens.

    shortest, longest: bounds of the match.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._indices: dict[Request, TokenIndex] = {}

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        """Return a guess for each request; none where its last tokens are new."""
        if len(self._indices) > len(requests):
            self._indices = {r: index for r, index in self._indices.items() if r.finish_reason is None}
        return [self._propose(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def _propose(self, request: Request, limit: int) -> Draft:
        index = self._indices.get(request)
        if index is None:
            index = self._indices[request] = TokenIndex(request.token_ids, self._shortest)
        index.update()
        end, length = index.find(request.token_ids, self._longest)
        return Draft(index.following(end, limit), length) if length else Draft([])
