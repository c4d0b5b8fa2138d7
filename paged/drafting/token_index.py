"""TokenIndex: finds where the last tokens of a text occurred before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

MOST_LOOKS = 4  # earlier occurrences of the shortest match that are compared, the newest first


class TokenIndex:
    """Finds earlier occurrences of token sequences in a list. The list may grow: `update` reads its new
    tokens.

    shortest: minimum length of a match in tokens, at least 1.
    """

    def __init__(self, tokens: list[int], shortest: int) -> None:
        self.tokens = tokens
        self._shortest = shortest
        self._newest: dict[tuple[int, ...], int] = {}  # by the last tokens before it, the last place
        # For each place from `shortest` on, the one before it with the same last tokens; 0 if there is none.
        self._before = array("q")

    def update(self) -> None:
        """Index the new positions that have a next token. The end is left out: it would match itself."""
        n = self._shortest
        tokens = self.tokens
        newest = self._newest
        place = n + len(self._before)
        num = len(tokens) - place
        if num == 1:
            key = tuple(tokens[place - n : place])
            self._before.append(newest.get(key, 0))
            newest[key] = place
        elif num > 1:
            add = self._before.append
            get = newest.get
            first = place - n
            for key in zip(*(tokens[first + i : first + i + num] for i in range(n)), strict=True):
                add(get(key, 0))
                newest[key] = place
                place += 1

    def find(self, tokens: Sequence[int], longest: int) -> tuple[int, int]:
        """Find the longest match for the end of `tokens` among its newest earlier occurrences.

        Return the position after the match, and the length of the match in tokens; (0, 0) if there is no
        match.

        longest: maximum number of tokens to compare.
        """
        n = self._shortest
        size = len(tokens)
        place = self._newest.get(tuple(tokens[size - n :]), 0)
        if not place:
            return 0, 0
        known = self.tokens
        best = 0
        best_length = n - 1
        for _ in range(MOST_LOOKS):
            # Compared from the token on that would make the match longer than the best one. Here and there
            # nothing precedes the first token, and an index of -1 finds the last one: `most` rules that out.
            if known[place - best_length - 1] == tokens[size - best_length - 1]:
                most = min(longest, size, place)
                if known[place - most : place] == tokens[size - most :]:
                    length = most
                else:
                    length = n
                    while known[place - length - 1] == tokens[size - length - 1]:
                        length += 1
                if length > best_length:
                    best = place
                    best_length = length
                    if length >= longest:
                        break
            place = self._before[place - n]
            if not place:
                break
        return best, best_length

    def following(self, place: int, num: int) -> list[int]:
        """Return the `num` tokens from position `place` on; past the end of the list they repeat."""
        found = self.tokens[place : place + num]
        period = len(found)
        while len(found) < num:
            found.append(found[len(found) - period])
        return found
