"""StopStrings: finds the first of many strings in a growing text."""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import NamedTuple


class Match(NamedTuple):
    """A stop string that was found: where it ends in the piece just read, and its length.

    It may have begun in an earlier piece.
    """

    end: int
    length: int


class StopStrings:
    """An automaton that finds any of several strings in one pass over a text (Aho and Corasick, 1975).

    A state represents the longest suffix of the text that is a prefix of one of the strings; state 0
    represents the empty suffix.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]  # length of the suffix that a state stands for
        self._match = [0]  # length of the longest stop string that ends in a state, 0 for none
        for string in strings:
            self._add(string)
        self._shorter = self._linked()

    def read(self, state: int, text: str) -> tuple[int, Match | None]:
        """Read text up to the first match. Return the new state, and the longest match that ends there."""
        step = self._next
        shorter = self._shorter
        match = self._match
        for i, character in enumerate(text):
            while state and character not in step[state]:
                state = shorter[state]
            state = step[state].get(character, 0)
            if match[state]:
                return state, Match(i + 1, match[state])
        return state, None

    def skip(self, state: int, text: str) -> int:
        """Read a text without looking for matches. Return the new state."""
        while text:
            state, found = self.read(state, text)
            text = "" if found is None else text[found.end :]
        return state

    def num_open(self, state: int) -> int:
        """Return how many of the last characters may begin a stop string that is not complete."""
        while state and not self._next[state]:
            state = self._shorter[state]
        return self._depth[state]

    def _add(self, string: str) -> None:
        state = 0
        for depth, character in enumerate(string, start=1):
            following = self._next[state].get(character)
            if following is None:
                following = self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(depth)
                self._match.append(0)
            state = following
        self._match[state] = len(string)

    def _linked(self) -> list[int]:
        """Return the failure link of each state: its longest shorter suffix, whose match it inherits."""
        step = self._next
        shorter = [0] * len(self._next)
        states = deque(step[0].values())
        while states:
            state = states.popleft()
            self._match[state] = self._match[state] or self._match[shorter[state]]
            for character, following in step[state].items():
                link = shorter[state]
                while link and character not in step[link]:
                    link = shorter[link]
                shorter[following] = step[link].get(character, 0)
                states.append(following)
        return shorter


@lru_cache(maxsize=4)
def stop_strings(strings: tuple[str, ...]) -> StopStrings:
    """Return an automaton for these strings. Requests with equal strings share it."""
    return StopStrings(strings)
