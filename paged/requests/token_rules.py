"""TokenRules: bad_words and dry_sequence_breakers as token ids, computed once per request."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

# The tokens of breakers after the first -> the possible first tokens; () -> those that are breakers alone.
Breakers = Mapping[tuple[int, ...], Set[int]]


@dataclass(frozen=True, slots=True)
class TokenRules:
    """The bad_words and dry_sequence_breakers of a request, as token ids.

    bad_words: token sequences that the output never contains.
    breakers: token sequences that end a repetition.
    """

    bad_words: tuple[tuple[int, ...], ...] = ()
    breakers: Breakers = field(default_factory=dict)
