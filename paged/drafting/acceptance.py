"""Acceptance: how often guessed tokens turn out right, by the drafter's confidence and their place."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from ..requests.request import Request
from .drafter import CERTAIN, Draft

# Between them confidences count as equal: shares below 1, and tokens of a match above.
CONFIDENCES = (0.25, 0.5, 0.75, 0.9, 1.5, 2.5, 3.5, 5.5, 11.5, 23.5, CERTAIN)
PRIOR = 0.0  # of a first token: nothing is verified before drafts were seen to be right
STRENGTH = 2.0  # how many observations a prior counts as
MOST_SEEN = 64  # drafts, then all observations count half
REFRESH = 8  # chances are computed anew when as many drafts have come as a part 1 / REFRESH of those before


class _Places:
    """The observations of drafts of about one confidence: by place, how many were right and seen."""

    def __init__(self, most: int) -> None:
        self._right = [0.0] * most
        self._seen = [0.0] * most
        self.num_new = 0  # drafts since `chances` was computed
        self.chances: list[float] = []

    @property
    def is_stale(self) -> bool:
        """Whether `chances` is to be computed."""
        return not self.chances or REFRESH * self.num_new > self._seen[0]

    def add(self, num_known: int, num_right: int) -> None:
        """Add a draft. Its first num_known tokens can be compared, and the first num_right are right."""
        seen = self._seen
        right = self._right
        for place in range(num_right):
            seen[place] += 1.0
            right[place] += 1.0
        if num_right < num_known:
            seen[num_right] += 1.0
        self.num_new += 1
        if seen[0] >= MOST_SEEN:
            self._seen = [num / 2 for num in seen]
            self._right = [num / 2 for num in right]

    def shares(self, prior: float) -> list[float]:
        """Return how many of each place were right, if those before were.

        A place is taken to be as its predecessor until it is seen itself.
        """
        shares = []
        for right, seen in zip(self._right, self._seen, strict=True):
            prior = (right + STRENGTH * prior) / (seen + STRENGTH)
            shares.append(prior)
        return shares


class Acceptance:
    """Learns how often draft tokens are right. Every watched draft counts, whether a step verified it or not.

    most: maximum number of tokens in a draft.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._places: dict[int, _Places] = {}
        self._first = _Places(1)  # the first tokens of all drafts that may be wrong
        self._watched: list[tuple[Request, int, Draft]] = []

    def chances(self, draft: Draft) -> list[float]:
        """Return, for each k, the probability that the draft's first k tokens are all right."""
        return self.longest_chances(draft)[: len(draft.tokens)]

    def longest_chances(self, draft: Draft) -> list[float]:
        """Return the probabilities of `chances` for a draft of maximum length."""
        places = self._of(draft)
        if places.is_stale:
            prior = 1.0 if draft.confidence == CERTAIN else self._first.shares(PRIOR)[0]
            places.chances = [*accumulate(places.shares(prior), mul)]
            places.num_new = 0
        return places.chances

    def watch(self, requests: Sequence[Request], drafts: Sequence[Draft]) -> None:
        """Remember drafts, so that `learn` can compare them with the tokens that follow."""
        self._watched = [
            (request, len(request.token_ids), draft)
            for request, draft in zip(requests, drafts, strict=True)
            if draft.tokens
        ]

    def learn(self) -> None:
        """Compare the watched drafts with the tokens generated since then, and forget the drafts."""
        for request, start, draft in self._watched:
            tokens = draft.tokens
            came = request.token_ids[start : start + len(tokens)]
            if came:
                num_right = 0
                for token, guess in zip(came, tokens, strict=False):
                    if token != guess:
                        break
                    num_right += 1
                self._of(draft).add(len(came), num_right)
                if draft.confidence != CERTAIN:
                    self._first.add(1, min(num_right, 1))
        self._watched = []

    def _of(self, draft: Draft) -> _Places:
        place = bisect_right(CONFIDENCES, draft.confidence)
        places = self._places.get(place)
        if places is None:
            places = self._places[place] = _Places(self._most)
        return places
