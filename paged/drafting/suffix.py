"""SuffixDrafter: what followed the last tokens in the request, its siblings, or outputs that have ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..requests.request import Request
from .drafter import Draft
from .token_index import TokenIndex

LONGEST = 32  # tokens of a match
MOST_SIBLINGS = 3  # that are looked at
MOST_KEPT = 2**16  # of the ended outputs of a tenant that are kept: the newest, at least the half
MOST_SHELVES = 8
SEPARATOR = -1  # between two outputs: no token
NUM_BEFORE = 8  # tokens of the prompt that an output is kept with

NO_DRAFT = Draft([])

Scope = tuple[str | None, str]  # cache_salt and tenant: what one has generated, no other gets to see


class SuffixDrafter:
    """The continuation of the longest match: in the request, its siblings, and ended outputs of its scope.

    shortest: the tokens of the shortest match.
    """

    def __init__(self, shortest: int) -> None:
        self._shortest = shortest
        self._indices: dict[Request, TokenIndex] = {}
        self._shelves: dict[Scope, TokenIndex] = {}  # the last used ones last

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        """Return a guess for each request; none where its last tokens are new."""
        if len(self._indices) != len(requests):
            self._shelve_ended()
        siblings: dict[int, list[TokenIndex]] = {}  # by their inputs, which they share
        indices = []
        for request in requests:
            index = self._indices.get(request)
            if index is None:
                index = self._indices[request] = TokenIndex(request.token_ids, self._shortest)
            index.update()
            indices.append(index)
            siblings.setdefault(id(request.inputs), []).append(index)
        return [
            self._propose(request, limit, index, siblings[id(request.inputs)])
            for request, limit, index in zip(requests, limits, indices, strict=True)
        ]

    def _propose(self, request: Request, limit: int, own: TokenIndex, siblings: list[TokenIndex]) -> Draft:
        token_ids = request.token_ids
        found = own
        best = own.find(token_ids, LONGEST)
        if best.length < LONGEST and (len(siblings) > 1 or self._shelves):
            for index in self._others(request, own, siblings):
                occurrence = index.find(token_ids, LONGEST)
                if occurrence.length > best.length:
                    best = occurrence
                    found = index
                    if best.length >= LONGEST:
                        break
        if not best.length:
            return NO_DRAFT
        tokens = found.following(best.end, limit)
        if SEPARATOR in tokens:
            tokens = tokens[: tokens.index(SEPARATOR)]
        return Draft(tokens, best.length)

    def _others(self, request: Request, own: TokenIndex, siblings: list[TokenIndex]) -> Iterator[TokenIndex]:
        """Yield where to look besides the request itself."""
        if len(siblings) > 1:
            yield from [index for index in siblings[: MOST_SIBLINGS + 1] if index is not own]
        shelf = self._shelves.get(_scope(request))
        if shelf is not None:
            yield shelf

    def _shelve_ended(self) -> None:
        """Keep the outputs that have ended, and forget their requests."""
        ended = [request for request in self._indices if request.finish_reason is not None]
        for request in ended:
            del self._indices[request]
            if request.finish_reason in ("stop", "length"):
                self._shelve(request)

    def _shelve(self, request: Request) -> None:
        scope = _scope(request)
        shelf = self._shelves.pop(scope, None) or TokenIndex([], self._shortest)
        first = max(0, request.num_prompt_tokens - NUM_BEFORE)
        shelf.tokens += [*request.token_ids[first:], SEPARATOR]
        if len(shelf.tokens) > MOST_KEPT:
            shelf = TokenIndex(shelf.tokens[-MOST_KEPT // 2 :], self._shortest)
        shelf.update()
        self._shelves[scope] = shelf
        if len(self._shelves) > MOST_SHELVES:
            del self._shelves[next(iter(self._shelves))]


def _scope(request: Request) -> Scope:
    return request.inputs.params.cache_salt, request.inputs.tenant
