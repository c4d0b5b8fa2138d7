"""Whether the time and memory of a tokenizer are bounded by the text's length, decided by its description.

A description is the JSON of the tokenizers library. What is accepted here runs in the engine's process; what
is not understood runs in a worker: the library panics, aborts or never returns on some descriptions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil, prod
from typing import Any

from ..checkpoints.tokenizer_patterns import PUBLISHED

Part = Mapping[str, Any]

MAX_GROWTH = 64  # bytes that the parts may make of each byte
MAX_STEPS = 16  # of a sequence
MAX_ADDED_CHARACTERS = 2**20  # of all added tokens together: the library makes an automaton of them
MAX_TOKEN_CHARACTERS = 1024  # of a token of a Unigram model, which tries all lengths at each place
MAX_UNIGRAM_CHARACTERS = 2**24  # of all its tokens together: the library makes a trie of them
MAX_WORD = 200  # characters of a word of WordPiece, whose time is cubic in it
MAX_TEMPLATE = 64  # tokens that a post-processor adds

# The largest growth of UTF-8 by each normalizer; forms of Unicode: https://www.unicode.org/faq/normalization.html
_NORMALIZERS = {
    "NFC": 3,
    "NFD": 3,
    "NFKC": 11,
    "NFKD": 11,
    "Lowercase": 3,
    "Strip": 1,
    "StripAccents": 1,
    "Nmt": 3,
    "BertNormalizer": 15,
    "ByteLevel": 2,
}
_REMOVING = ("Strip", "StripAccents", "Nmt", "BertNormalizer")
_PRE_TOKENIZERS = {
    "ByteLevel": 3,
    "Whitespace": 1,
    "WhitespaceSplit": 1,
    "BertPreTokenizer": 1,
    "Digits": 1,
    "Punctuation": 1,
    "UnicodeScripts": 1,
    "CharDelimiterSplit": 1,
}
_DECODERS = {"ByteLevel": 1, "ByteFallback": 3, "Fuse": 1, "BPEDecoder": 1, "WordPiece": 2}


class _UnboundedError(Exception):
    """A part is not known to be bounded. The message says which."""


def why_unbounded(description: Mapping[str, Any], *, has_model: bool = True) -> str | None:
    """Return the part of a tokenizer that may take unbounded time; None if all parts are known to be bounded.

    description: the tokenizer as JSON of the tokenizers library.
    has_model: whether to check the model too, not only the other parts.
    """
    try:
        growth = _growth(description.get("normalizer"), "normalizers", _normalizer)
        growth *= _growth(description.get("pre_tokenizer"), "pretokenizers", _pre_tokenizer)
        if growth > MAX_GROWTH:
            raise _UnboundedError(f"its normalizer may make text {growth} times as long")
        if description.get("decoder") is not None:
            _check_decoder(description["decoder"])
        _growth(description.get("post_processor"), "processors", _post_processor)
        if has_model:
            _check_model(description["model"])
            added = description.get("added_tokens") or []
            _check_added(added)
            # The library looks for such tokens at wrong places then, and panics within characters.
            if any(token["normalized"] for token in added) and _removes(description.get("normalizer")):
                raise _UnboundedError("its normalizer removes text in which added tokens are found")
    except _UnboundedError as error:
        return str(error)
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        # The checks expect the form that the library writes.
        return f"its description is not understood ({type(error).__name__}: {error})"
    return None


def why_undecodable(description: Mapping[str, Any]) -> str | None:
    """Return the part of a tokenizer that may make decoding take unbounded time; None if there is
    none.

    Decoding does not depend on the model: it uses the table of tokens, the added tokens and the decoder.
    """
    table = {"type": "BPE", "vocab": {}}
    return why_unbounded(
        {"model": table, **{name: description[name] for name in ("decoder", "added_tokens")}}
    )


def _growth(part: Part | None, steps: str, growth_of: Callable[[Part], int]) -> int:
    """Return the growth of a part, which may be a sequence of other parts under the key `steps`."""
    if part is None:
        return 1
    if part["type"] != "Sequence":
        return growth_of(part)
    if len(part[steps]) > MAX_STEPS:
        raise _UnboundedError(f"a sequence has {len(part[steps])} steps")
    return prod(growth_of(step) for step in part[steps])


def _normalizer(part: Part) -> int:
    kind = part["type"]
    if kind == "Prepend":  # to each piece between added tokens
        if not part["prepend"]:  # the library panics
            raise _UnboundedError("its normalizer prepends nothing")
        return 1 + _size(part["prepend"])
    if kind == "Replace":
        return _replacement(part)
    return _known("normalizer", kind, _NORMALIZERS)


def _removes(part: Part | None) -> bool:
    """Return whether a normalizer may remove text."""
    if part is None:
        return False
    if part["type"] == "Sequence":
        return any(map(_removes, part["normalizers"]))
    return part["type"] in _REMOVING or (part["type"] == "Replace" and not part["content"])


def _replacement(part: Part) -> int:
    form, pattern = _pattern(part)
    size = _size(part["content"])
    return max(1, size if form == "Regex" else ceil(size / _size(pattern)))


def _pattern(part: Part) -> tuple[str, str]:
    """Return the form of a pattern, "String" or "Regex", and the pattern."""
    ((form, pattern),) = part["pattern"].items()
    if form not in ("String", "Regex") or not isinstance(pattern, str) or not pattern:
        raise _UnboundedError(f"pattern {str(pattern)[:80]!r} is not known to take linear time")
    if form == "Regex" and pattern not in PUBLISHED:
        raise _UnboundedError(f"regular expression {pattern[:80]!r} is not known to take linear time")
    return form, pattern


def _pre_tokenizer(part: Part) -> int:
    kind = part["type"]
    if kind == "Split":
        _pattern(part)
        return 1
    if kind == "Metaspace":
        return 1 + _size(part["replacement"])
    return _known("pre-tokenizer", kind, _PRE_TOKENIZERS)


def _post_processor(part: Part) -> int:
    kind = part["type"]
    if kind in ("BertProcessing", "RobertaProcessing", "ByteLevel"):
        return 1
    if kind != "TemplateProcessing":
        raise _UnboundedError(f"post-processor {str(kind)[:80]!r} is not known")
    single = part["single"]
    known = part["special_tokens"]
    sequences = [piece["Sequence"]["id"] for piece in single if "Sequence" in piece]
    special = [piece["SpecialToken"]["id"] for piece in single if "SpecialToken" in piece]
    special_of_pair = [piece["SpecialToken"]["id"] for piece in part["pair"] if "SpecialToken" in piece]
    for name in (*special, *special_of_pair):
        if name not in known:
            raise _UnboundedError(f"its post-processor has no special token {str(name)[:80]!r}")
    if any(len(token["ids"]) != len(token["tokens"]) for token in known.values()):
        raise _UnboundedError("its post-processor has special tokens of different numbers of ids and texts")
    if sequences != ["A"]:  # the library panics for "B", which a single text does not have
        raise _UnboundedError("its post-processor does not have the text once")
    if sum(len(known[name]["ids"]) for name in special) > MAX_TEMPLATE:
        raise _UnboundedError(f"its post-processor adds more than {MAX_TEMPLATE} tokens")
    return 1


def _check_decoder(part: Part) -> None:
    """Raise unless a decoder is bounded."""
    growth = _growth(part, "decoders", _decoder)
    if growth > MAX_GROWTH:
        raise _UnboundedError(f"its decoder may make text {growth} times as long")


def _decoder(part: Part) -> int:
    kind = part["type"]
    if kind == "Replace":
        return _replacement(part)
    if kind == "Strip":  # the library panics for tokens that are shorter than what is stripped from their end
        if part["stop"] != 0 or not 0 <= part["start"] <= 2**16:
            raise _UnboundedError("its decoder strips the ends of tokens")
        return 1
    if kind == "CTC":
        return max(1, _size(part["word_delimiter_token"]))
    if kind == "Metaspace":
        return 1
    return _known("decoder", kind, _DECODERS)


def _check_model(model: Part) -> None:
    vocab = model["vocab"]
    kind = model.get("type", "BPE" if "merges" in model else None)  # old files do not name it
    if kind == "BPE":
        # The library counts the prefix in bytes of tokens that need not have it.
        if model.get("continuing_subword_prefix"):
            raise _UnboundedError("its BPE model has a continuing_subword_prefix")
        unknown = model.get("unk_token")
        if unknown is not None and unknown not in vocab:
            raise _UnboundedError(f"its unknown token {str(unknown)[:80]!r} is not in the vocabulary")
    elif kind in ("WordPiece", "WordLevel"):
        if model["unk_token"] not in vocab:
            raise _UnboundedError(
                f"its unknown token {str(model['unk_token'])[:80]!r} is not in the vocabulary"
            )
        if kind == "WordPiece" and not 0 <= model["max_input_chars_per_word"] <= MAX_WORD:
            raise _UnboundedError(f"its words may have more than {MAX_WORD} characters")
    elif kind == "Unigram":
        if not isinstance(model["unk_id"], int) or not 0 <= model["unk_id"] < len(vocab):
            raise _UnboundedError("it has no unknown token")
        sizes = [len(token) for token, _ in vocab]
        if max(sizes) > MAX_TOKEN_CHARACTERS or sum(sizes) > MAX_UNIGRAM_CHARACTERS:
            raise _UnboundedError(f"it has tokens of up to {max(sizes)} and {sum(sizes)} characters in all")
    else:
        raise _UnboundedError(f"model {str(kind)[:80]!r} is not known")


def _check_added(tokens: list[Part]) -> None:
    if not all(isinstance(token["content"], str) and token["content"] for token in tokens):
        raise _UnboundedError("it has an empty added token")
    num_characters = sum(len(token["content"]) for token in tokens)
    if num_characters > MAX_ADDED_CHARACTERS:
        raise _UnboundedError(f"its added tokens have {num_characters} characters")


def _size(text: str) -> int:
    return len(text.encode())


def _known(part: str, kind: Any, growths: Mapping[str, int]) -> int:
    if kind not in growths:
        raise _UnboundedError(f"{part} {str(kind)[:80]!r} is not known")
    return growths[kind]
