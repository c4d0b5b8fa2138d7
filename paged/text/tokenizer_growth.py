"""How many times as long a tokenizer's description makes text, by arithmetic: nothing of it is run.

Each step multiplies characters: a Replace those of its pattern, a Prepend the first of each piece. Steps are
read backwards: of each character is known how many bytes the later steps may make of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .tokenizer_source import MOST_OF_TOKEN

Part = Mapping[str, Any]

MOST_DECODED = 64  # bytes of text for each byte of a token's name
MOST_GROWTH = 4096  # bytes of what is tokenized for each byte of a text; a worker is for what is less
MOST_ADDED = 1024  # tokens that post-processors add to a text
MOST_STEPS = 64
# The forms of Unicode: together, one after the other, they make at most so many bytes of one.
_UNICODE = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 3, "Nmt": 3, "BertNormalizer": 15}
_UNICODE |= {"Precompiled": 18, "StripAccents": 1}
_MOST_OF_UNICODE = 33
_BYTES = {"ByteLevel": 2, "ByteFallback": 3, "WordPiece": 2}  # others whose characters may become any
_LONG = 32  # characters of a text of the description that are not looked at one by one
_SEQUENCES = ("normalizers", "pretokenizers", "decoders", "processors")


class _TooLongError(Exception):
    """Text grows beyond what is allowed. The message says where."""


class _Factors(NamedTuple):
    """Bytes that the later steps may make of each byte, by character. usual: of others."""

    usual: float
    own: Mapping[str, float]

    @property
    def most(self) -> float:
        """The largest factor."""
        return max(self.usual, *self.own.values()) if self.own else self.usual

    def bytes_of(self, text: str) -> float:
        """Return what the later steps may make of a text."""
        if len(text) > _LONG or not self.own:
            return self.most * _size(text)
        return sum(self.own.get(c, self.usual) * _size(c) for c in text)

    def any(self, factor: float) -> _Factors:
        """Return the factors before a step in which each byte becomes so many bytes of any characters."""
        return _Factors(factor * self.most, {})

    def more(self, num_bytes: float) -> _Factors:
        """Return the factors before a step that adds so many bytes to each piece of text."""
        return _Factors(self.usual + num_bytes, {c: each + num_bytes for c, each in self.own.items()})

    def replaced(self, part: Part) -> _Factors:
        """Return the factors before a Replace."""
        ((form, pattern),) = part["pattern"].items()
        made = self.bytes_of(part["content"])
        if form != "String" or len(pattern) > _LONG:  # a match has a byte at least
            least = made / (1 if form != "String" else _size(pattern))
            return _Factors(max(self.usual, least), {c: max(each, least) for c, each in self.own.items()})
        least = made / max(1, _size(pattern))
        changed = {c: max(self.own.get(c, self.usual), least) for c in pattern}
        return _Factors(self.usual, {**self.own, **changed})


def why_growing(description: Part) -> str | None:
    """Return the part of a tokenizer that lengthens text too much; None if no known part does.

    description: the tokenizer as JSON of the tokenizers library.
    """
    try:
        decoder = growth("decoder", [description.get("decoder")], MOST_DECODED)
        growth(
            "normalizer and pre-tokenizer",
            [description.get("normalizer"), description.get("pre_tokenizer")],
            MOST_GROWTH,
        )
        _check_templates(description.get("post_processor"))
        longest = _longest(description)
        if longest * decoder > MOST_OF_TOKEN:
            return (
                f"it has a token of {longest:,} characters, which its decoder may make {decoder:,.0f} times "
                f"as long; at most {MOST_OF_TOKEN:,} bytes of a token are supported"
            )
    except _TooLongError as error:
        return str(error)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None  # the checks that follow refuse what is not understood
    return None


def growth(name: str, parts: Sequence[Part | None], most: int) -> float:
    """Return the factor by which consecutive parts may lengthen a text."""
    steps = [step for part in parts for step in _steps_of(part, name)]
    factors = _Factors(1.0, {})
    of_unicode = 1.0  # of the forms of Unicode since another step
    for step in reversed(steps):
        kind = step["type"]
        if kind in _UNICODE:
            more = min(_MOST_OF_UNICODE / of_unicode, _UNICODE[kind])
            of_unicode *= more
            factors = factors.any(more)
        else:
            of_unicode = 1.0
            factors = _before(step, factors, is_decoder=name == "decoder")
        if factors.most > most:
            raise _TooLongError(
                f"its {name} may make text {factors.most:,.0f} times as long; at most {most:,} times are "
                "supported"
            )
    return factors.most


def _before(step: Part, factors: _Factors, *, is_decoder: bool) -> _Factors:
    """Return the factors before a step."""
    kind = step["type"]
    if kind == "Replace":
        return factors.replaced(step)
    if kind == "Prepend":
        return factors.more(factors.bytes_of(step["prepend"]))
    if kind == "Metaspace" and not is_decoder:  # which makes a blank of it again
        space = str(step.get("replacement", "▁"))
        prepended = factors.more(factors.bytes_of(space))
        return prepended.replaced({"pattern": {"String": " "}, "content": space})
    if kind == "CTC":
        return factors.replaced({"pattern": {"Regex": "."}, "content": " "})
    return factors.any(_BYTES.get(kind, 1))


def _steps_of(part: Part | None, name: str) -> list[Part]:
    """Return the steps of a part, whose sequences may hold others."""
    found: list[Part] = []
    left = [] if part is None else [part]
    num_sequences = 0
    while left:
        part = left.pop()
        if part["type"] == "Sequence":
            num_sequences += 1
            (steps,) = (part[key] for key in _SEQUENCES if key in part)
            left += reversed(steps)
        else:
            found.append(part)
        if len(found) + num_sequences > MOST_STEPS:
            raise _TooLongError(f"its {name} has more than {MOST_STEPS} steps")
    return found


def _check_templates(processor: Part | None) -> None:
    """Raise if post-processors repeat a text, or add very many tokens to it."""
    repeated = 1
    added = 0
    for step in _steps_of(processor, "post-processor"):
        if step["type"] != "TemplateProcessing":
            continue
        for name in ("single", "pair"):
            pieces = step.get(name) or []
            known = step["special_tokens"]
            num_ids = sum(
                len(known[piece["SpecialToken"]["id"]]["ids"])
                for piece in pieces
                if "SpecialToken" in piece and piece["SpecialToken"]["id"] in known
            )
            if name == "single":
                repeated *= max(1, sum("Sequence" in piece for piece in pieces))
            added = max(added, num_ids) if name == "pair" else added + num_ids
            if added * repeated > MOST_ADDED or repeated > MOST_DECODED:
                raise _TooLongError(
                    f"its post-processor repeats a text {repeated:,} times and adds {added:,} tokens; at "
                    f"most {MOST_DECODED} times and {MOST_ADDED:,} tokens are supported"
                )


def _longest(description: Part) -> int:
    """Return the characters of the longest name of a token, from which the decoder makes text."""
    vocab = (description.get("model") or {}).get("vocab") or {}
    names = vocab if isinstance(vocab, dict) else [token for token, _ in vocab]
    added = [token["content"] for token in description.get("added_tokens") or []]
    return max(max(map(len, names), default=0), max(map(len, added), default=0))


def _size(text: str) -> int:
    return len(text.encode())
