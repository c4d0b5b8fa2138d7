"""The drafters: prompt lookup, suffixes and grammars, and the one that a speculative_config names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..options.speculative_config import SpeculativeConfig
from ..requests.request import Request
from .drafter import CERTAIN, Draft, Drafter
from .token_index import TokenIndex


class NgramDrafter:
    """Prompt lookup: finds the longest earlier occurrence of a request's last tokens, and guesses its
    continuation.

    Of equally long occurrences the newest is taken.  shortest, longest: minimum and maximum length of a
    match, in tokens.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._indices: dict[Request, TokenIndex] = {}

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        """Return a guess for each request. It is empty if the last tokens have not occurred before."""
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


LONGEST = 32  # tokens of a match
MOST_SIBLINGS = 3  # that are looked at
MOST_KEPT = 2**16  # of the ended outputs of a tenant that are kept: the newest, at least the half
MOST_SHELVES = 8
SEPARATOR = -1  # between two outputs: no token
NUM_BEFORE = 8  # tokens of the prompt that an output is kept with

NO_DRAFT = Draft([])

Scope = tuple[str | None, str]  # cache_salt and tenant: what one has generated, no other gets to see


class SuffixDrafter:
    """Guesses the continuation of the longest match of a request's last tokens.

    Matches are searched in the request, in its other samples, and in finished outputs of the same tenant and
    cache_salt.

    shortest: minimum length of a match, in tokens.
    """

    def __init__(self, shortest: int) -> None:
        self._shortest = shortest
        self._indices: dict[Request, TokenIndex] = {}
        self._shelves: dict[Scope, TokenIndex] = {}  # the last used ones last

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        """Return a guess for each request. It is empty if the last tokens have not occurred before."""
        if len(self._indices) != len(requests):
            self._shelve_ended()
        indices = []
        for request in requests:
            index = self._indices.get(request)
            if index is None:
                index = self._indices[request] = TokenIndex(request.token_ids, self._shortest)
            index.update()
            indices.append(index)
        siblings = _siblings(requests, indices)
        if not siblings and not self._shelves:
            return [
                self._propose(request, limit, index)
                for request, limit, index in zip(requests, limits, indices, strict=True)
            ]
        return [
            self._propose(request, limit, index, self._others(request, index, siblings))
            for request, limit, index in zip(requests, limits, indices, strict=True)
        ]

    def _propose(
        self, request: Request, limit: int, own: TokenIndex, others: Sequence[TokenIndex] = ()
    ) -> Draft:
        """Return the continuation of the longest match in a request's own text, or in one of the others."""
        token_ids = request.token_ids
        found = own
        end, length = own.find(token_ids, LONGEST)
        for index in others:
            if length >= LONGEST:
                break
            other_end, other_length = index.find(token_ids, LONGEST)
            if other_length > length:
                end = other_end
                length = other_length
                found = index
        if not length:
            return NO_DRAFT
        tokens = found.following(end, limit)
        if SEPARATOR in tokens:
            tokens = tokens[: tokens.index(SEPARATOR)]
        return Draft(tokens, length)

    def _others(
        self, request: Request, own: TokenIndex, siblings: Mapping[int, list[TokenIndex]]
    ) -> Sequence[TokenIndex]:
        """Return where to look besides the request itself."""
        shelf = self._shelves.get(_scope(request))
        others = [] if shelf is None else [shelf]
        if siblings:
            others[:0] = [i for i in siblings[id(request.inputs)][: MOST_SIBLINGS + 1] if i is not own]
        return others

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


def _siblings(requests: Sequence[Request], indices: Iterable[TokenIndex]) -> dict[int, list[TokenIndex]]:
    """Return the texts of requests by the inputs that they share; nothing if none has a sibling."""
    siblings: dict[int, list[TokenIndex]] = {}
    if len({id(request.inputs) for request in requests}) < len(requests):
        for request, index in zip(requests, indices, strict=True):
            siblings.setdefault(id(request.inputs), []).append(index)
    return siblings


def _scope(request: Request) -> Scope:
    return request.inputs.params.cache_salt, request.inputs.tenant


class GrammarDrafter:
    """Guesses the tokens that structured_outputs force. These guesses are always right.

    others: the drafter that guesses if no token is forced. If its guess begins with the forced tokens, the
        whole guess is taken.
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


def new_drafter(config: SpeculativeConfig, draft_model: Drafter | None = None) -> Drafter:
    """Make the drafter that the config names.

    draft_model: the drafter that runs the draft model, if the config names one.
    """
    if config.method == "draft_model":
        assert draft_model is not None, "a draft model was not loaded"
        return GrammarDrafter(draft_model)
    if config.method == "grammar":
        return GrammarDrafter()
    if config.method == "suffix":
        return GrammarDrafter(SuffixDrafter(config.prompt_lookup_min))
    return GrammarDrafter(NgramDrafter(config.prompt_lookup_min, config.longest_match))
