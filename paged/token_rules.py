"""TokenRules: the strings of a request's parameters as token ids, made once when it is added."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from .errors import RequestError

# Each breaker is looked for in the text of every token of the vocabulary.
MAX_BREAKERS = 64
MAX_BREAKER_LENGTH = 40

Encode = Callable[[str], list[int]]  # without special tokens
# By the first token, what follows it: () where the token is a breaker by itself.
Breakers = Mapping[int, Sequence[tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What bad_words and dry_sequence_breakers mean for one tokenizer.

    bad_words: token sequences that are never completed.
    breakers: token sequences that no repetition reaches across.
    """

    bad_words: tuple[tuple[int, ...], ...] = ()
    breakers: Breakers = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        bad_words: Sequence[str],
        breakers: Sequence[str],
        encode: Encode | None,
        token_texts: Callable[[], list[str]],
    ) -> Self:
        """Those of these strings; encode is None where there is no tokenizer.

        token_texts: gives the text of every token of the vocabulary.

        Raises RequestError naming what cannot be tokenised.
        """
        if encode is None:
            if bad_words:
                raise RequestError("bad_words need the tokenizer, which skip_tokenizer_init=True left out")
            if breakers:
                raise RequestError(
                    "dry_sequence_breakers need the tokenizer, which skip_tokenizer_init=True left out; "
                    "pass dry_sequence_breakers=() to use DRY without them"
                )
            return cls()
        spelled = dict.fromkeys(ids for word in bad_words for ids in _spellings(word, encode))
        return cls(tuple(spelled), _breakers(breakers, encode, token_texts) if breakers else {})


def _spellings(word: str, encode: Encode) -> list[tuple[int, ...]]:
    """A bad word at the beginning of a text and, behind a space, inside one."""
    bare = word.lstrip() or word  # of nothing but spaces, these
    spellings = [tuple(encode(text)) for text in (bare, f" {bare}")]
    if not all(spellings):
        raise RequestError(f"bad_words has {word!r}, of which the tokenizer makes no token")
    return spellings


def _breakers(strings: Sequence[str], encode: Encode, token_texts: Callable[[], list[str]]) -> Breakers:
    """Every way in which tokens may hold one of these strings, as llama.cpp looks for them.

    A token may hold it, or begin it and others end it; or it is made of tokens that are no text alone.
    """
    if len(strings) > MAX_BREAKERS or max(map(len, strings)) > MAX_BREAKER_LENGTH:
        raise RequestError(
            f"dry_sequence_breakers must be at most {MAX_BREAKERS} strings of at most "
            f"{MAX_BREAKER_LENGTH} characters, got {len(strings)}, the longest of {max(map(len, strings))}"
        )
    found: dict[int, dict[tuple[int, ...], None]] = {}
    texts = token_texts()
    for string in strings:
        for head, *tail in _whole(string, encode):
            found.setdefault(head, {})[tuple(tail)] = None
        tails = {n: tuple(encode(string[n:])) for n in range(1, len(string))}
        for token, text in enumerate(texts):
            if string in text:
                found.setdefault(token, {})[()] = None
                continue
            for n, rest in tails.items():
                if text.endswith(string[:n]):
                    found.setdefault(token, {})[rest] = None
    return {head: tuple(tails) for head, tails in found.items()}


def _whole(string: str, encode: Encode) -> Iterable[list[int]]:
    """The string's own tokens, at the beginning of a text and inside one."""
    if own := encode(string):
        yield own
    before, together = encode("a"), encode(f"a{string}")
    if together[: len(before)] == before and len(together) > len(before):
        yield together[len(before) :]
