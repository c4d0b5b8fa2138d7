"""TokenRules: the strings of a request's parameters as token ids, made once when it is added."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Self

from ..errors import RequestError

# Of each breaker, every beginning is looked for in the texts of all tokens.
MAX_BREAKERS = 64
MAX_BREAKER_LENGTH = 40

Encode = Callable[[str], list[int]]  # without special tokens
# By what follows its first token, which ones that may be: under () those that are breakers by themselves.
Breakers = Mapping[tuple[int, ...], Set[int]]


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
        spell = _naming("bad_words", encode)
        spelled = dict.fromkeys(ids for word in bad_words for ids in _spellings(word, spell))
        spell = _naming("dry_sequence_breakers", encode)
        return cls(tuple(spelled), _breakers(breakers, spell, token_texts) if breakers else {})


def _naming(name: str, encode: Encode) -> Encode:
    """`encode`, whose errors say what the text is of."""

    def named(text: str) -> list[int]:
        try:
            return encode(text)
        except RequestError as error:
            raise RequestError(f"{name}: {error}") from error

    return named


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
    found: dict[tuple[int, ...], set[int]] = {}
    texts = token_texts()
    holding, ending = _indices(strings, texts)
    for string in strings:
        for head, *tail in _whole(string, encode):
            found.setdefault(tuple(tail), set()).add(head)
        for token in min((holding[character] for character in string), key=len):
            if string in texts[token]:
                found.setdefault((), set()).add(token)
        for n in range(1, len(string)):
            if beginning := [token for token in ending[string[:n]] if string not in texts[token]]:
                found.setdefault(tuple(encode(string[n:])), set()).update(beginning)
    return found


def _indices(strings: Sequence[str], texts: list[str]) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Which tokens hold each character of the strings, and which end with each beginning of one.

    One pass over the texts, where looking for every beginning in each takes 64 * 40 of them.
    """
    holding: dict[str, list[int]] = {character: [] for string in strings for character in string}
    ending: dict[str, list[int]] = {string[:n]: [] for string in strings for n in range(1, len(string))}
    longest = max(map(len, ending), default=0)
    for token, text in enumerate(texts):
        for character in holding.keys() & set(text):
            holding[character].append(token)
        for n in range(1, 1 + min(longest, len(text))):
            if text[-n:] in ending:
                ending[text[-n:]].append(token)
    return holding, ending


def _whole(string: str, encode: Encode) -> Iterable[list[int]]:
    """The string's own tokens, at the beginning of a text and inside one."""
    if own := encode(string):
        yield own
    before, together = encode("a"), encode(f"a{string}")
    if together[: len(before)] == before and len(together) > len(before):
        yield together[len(before) :]
