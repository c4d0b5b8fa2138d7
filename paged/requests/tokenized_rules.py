"""Tokenize bad_words and dry_sequence_breakers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..base.errors import RequestError
from ..base.validation import shown
from .token_rules import Breakers, TokenRules

# Every prefix of every breaker is looked for in the texts of all tokens.
MAX_BREAKERS = 64
MAX_BREAKER_LENGTH = 40

Encode = Callable[[str], list[int]]  # without special tokens


def tokenized(
    bad_words: Sequence[str],
    breakers: Sequence[str],
    encode: Encode | None,
    token_texts: Callable[[], list[str]],
) -> TokenRules:
    """Tokenize the bad words and the sequence breakers.

    encode: tokenizes a text; None if there is no tokenizer.
    token_texts: returns the text of every token of the vocabulary.

    Raises RequestError naming a string that cannot be tokenized.
    """
    if encode is None:
        if bad_words:
            raise RequestError(
                "bad_words need the tokenizer, which skip_tokenizer_init=True left out", param="bad_words"
            )
        if breakers:
            raise RequestError(
                "dry_sequence_breakers need the tokenizer, which skip_tokenizer_init=True left out; "
                "pass dry_sequence_breakers=() to use DRY without them",
                param="dry_sequence_breakers",
            )
        return TokenRules()
    spell = _with_error_prefix("bad_words", encode)
    spelled = dict.fromkeys(ids for word in bad_words for ids in _spellings(word, spell))
    spell = _with_error_prefix("dry_sequence_breakers", encode)
    return TokenRules(tuple(spelled), _breakers(breakers, spell, token_texts) if breakers else {})


def _with_error_prefix(name: str, encode: Encode) -> Encode:
    """Return `encode` with the parameter's name in its errors."""

    def encode_named(text: str) -> list[int]:
        try:
            return encode(text)
        except RequestError as error:
            raise RequestError(f"{name}: {error}", param=name) from error

    return encode_named


def _spellings(word: str, encode: Encode) -> list[tuple[int, ...]]:
    """Return the tokens of a bad word at the beginning of a text and after a space."""
    bare = word.lstrip() or word  # a word of spaces only
    spellings = [tuple(encode(text)) for text in (bare, f" {bare}")]
    if not all(spellings):
        raise RequestError(
            f"bad_words has {shown(word)}, of which the tokenizer makes no token", param="bad_words"
        )
    return spellings


def _breakers(strings: Sequence[str], encode: Encode, token_texts: Callable[[], list[str]]) -> Breakers:
    """Find every way in which tokens can contain one of these strings, as llama.cpp does.

    One token may contain the string, or end with a prefix of it that later tokens complete. The tokens of
    the string itself are added because each may be only a part of a character, which no text shows.
    """
    if len(strings) > MAX_BREAKERS or max(map(len, strings)) > MAX_BREAKER_LENGTH:
        raise RequestError(
            f"dry_sequence_breakers must be at most {MAX_BREAKERS} strings of at most "
            f"{MAX_BREAKER_LENGTH} characters, got {len(strings)}, the longest of {max(map(len, strings))}",
            param="dry_sequence_breakers",
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
    """Return the tokens that contain each character of the strings, and those that end with each prefix.

    One pass over the texts instead of one for each of up to 64 * 40 prefixes.
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
    """Yield the tokens of the string at the beginning of a text and inside one."""
    if own := encode(string):
        yield own
    before = encode("a")
    together = encode(f"a{string}")
    if together[: len(before)] == before and len(together) > len(before):
        yield together[len(before) :]
