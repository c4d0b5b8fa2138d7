"""StopStrings: finds the first of many strings in a text that grows."""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import NamedTuple


class Match(NamedTuple):
    """Where in a piece of text a stop string ends, and how long it is: it may begin before the piece."""

    end: int
    length: int


class StopStrings:
    """An automaton that reads a text once, however many strings there are (Aho and Corasick, 1975).

    A state stands for the longest end of the text so far that begins one of the strings, 0 for none. A string
    that was completed and did not count begins nothing any more, unless a longer one begins with it.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]  # how long that is which a state stands for
        self._match = [0]  # how long the longest stop string is that ends there
        for string in strings:
            self._add(string)
        self._shorter = self._linked()

    def read(self, state: int, text: str) -> tuple[int, Match | None]:
        """Go on from a state. Returns the next one and the match that ends first, of several the longest."""
        step, shorter, match = self._next, self._shorter, self._match
        for i, character in enumerate(text):
            while state and character not in step[state]:
                state = shorter[state]
            state = step[state].get(character, 0)
            if match[state]:
                return state, Match(i + 1, match[state])
        return state, None

    def skip(self, state: int, text: str) -> int:
        """Go on from a state where no match counts."""
        while text:
            state, found = self.read(state, text)
            text = "" if found is None else text[found.end :]
        return state

    def num_open(self, state: int) -> int:
        """How many characters at the end of the text may yet become a stop string."""
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
        """For each state that of the longest shorter end of its text. What ends there ends here too."""
        step, shorter = self._next, [0] * len(self._next)
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


@lru_cache(maxsize=4)  # a thousand requests with the same 10,000 strings read one automaton
def stop_strings(strings: tuple[str, ...]) -> StopStrings:
    """The automaton of these strings."""
    return StopStrings(strings)
