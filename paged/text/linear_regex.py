"""Which regular expressions of a tokenizer take time linear in the text, whatever the text is.

The tokenizers library matches by backtracking: in a run of a's, `(a+)+$` takes exponential time, and `a+b`
quadratic time. A pattern is accepted if each of its alternatives is known to be harmless, or has this form:

    items of bounded length, then perhaps an unbounded one such as [a-z]+, then optional ones

Such an alternative matches as soon as its bounded items do, so no time is spent on text that is not matched.
"""

from __future__ import annotations

import re
from itertools import pairwise

# Alternatives that may fail after a long run, each with an alternative behind it that matches the run.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"
_END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KNOWN_ALTERNATIVES = {
    r"\s+(?!\S)": r"\s+",  # GPT-2, Llama 3, Qwen, DeepSeek
    r"\s*[\r\n]+": r"\s+",  # Llama 3, Qwen, DeepSeek
    r"\s*[\r\n]": r"\s+",
    f"{_START}{_UPPER}*{_LOWER}+{_END}": f"{_START}{_UPPER}+{_LOWER}*{_END}",  # o200k: GPT-4o, gpt-oss
    f"{_START}{_UPPER}*{_LOWER}+": f"{_START}{_UPPER}+{_LOWER}*",  # Mistral's Tekken
}
MAX_PATTERN = 4096  # characters; the longest known pattern has 1,200
MAX_REPEAT = 64  # of an item of bounded length
MAX_WAYS = 64  # to match the bounded items of an alternative: all may be tried at each place

_RUNS = (["item"], ["item", "quantifier"])
_TOKEN = re.compile(
    r"""
    (?P<open>\((?:\?:|\?i:)?(?!\?)) | (?P<close>\)) | (?P<bar>\|)
  | (?P<quantifier>[?*+]|\{(?=,?\d)(?P<least>\d{1,3})?(?P<comma>,)?(?P<most>\d{1,3})?\})
  | (?P<item>
        \[\^?\]?(?:\\[pP]\{\^?\w+\}|\\[^&]|\[:\^?\w+:\]|&(?!&)|[^\]\\\[&])*\]
      | \\[pP]\{\^?\w+\}
      | \\[^\dkgGKRXbBAzZuxocCMpPQE]
      | [^\\\[\](){}?*+|^$]
    )
    """,
    re.VERBOSE | re.DOTALL,
)


def is_linear(pattern: str) -> bool:
    """Return whether matching a pattern everywhere in a text is known to take linear time."""
    if len(pattern) > MAX_PATTERN:
        return False
    alternatives = _alternatives(pattern)
    if alternatives is None:
        return False
    for i, alternative in enumerate(alternatives):
        follower = KNOWN_ALTERNATIVES.get(alternative)
        if follower is None:
            if not _is_simple(alternative):
                return False
        elif follower not in alternatives[i + 1 :]:
            return False
    return True


def _tokens(pattern: str) -> list[re.Match[str]] | None:
    """Split a pattern into its tokens, or return None if one is not understood."""
    tokens = list[re.Match[str]]()
    place = 0
    while place < len(pattern):
        token = _TOKEN.match(pattern, place)
        if token is None:
            return None
        tokens.append(token)
        place = token.end()
    return tokens


def _alternatives(pattern: str) -> list[str] | None:
    """Split a pattern at the bars outside its groups. Return None if it is not understood."""
    bars = [-1]
    depth = 0
    place = 0
    while place < len(pattern):
        # A lookahead is understood only within a known alternative.
        if pattern.startswith(r"(?!\S)", place):
            place += len(r"(?!\S)")
            continue
        token = _TOKEN.match(pattern, place)
        if token is None:
            return None
        depth += (token.lastgroup == "open") - (token.lastgroup == "close")
        if token.lastgroup == "bar" and depth == 0:
            bars.append(place)
        place = token.end()
    return None if depth else [pattern[i + 1 : j] for i, j in pairwise([*bars, len(pattern)])]


def _is_simple(alternative: str) -> bool:
    """Return whether an alternative has the form of the module's docstring, with groups of fixed length."""
    tokens = _tokens(alternative)
    if not tokens or tokens[0]["quantifier"]:
        return False
    depth = 0
    ways = 1
    bars = 0
    has_unbounded = False
    for token, following in pairwise([*tokens, None]):
        assert token is not None
        kind = token.lastgroup
        quantifier = following if following is not None and following["quantifier"] else None
        if kind not in ("open", "close", "bar", "item"):
            if quantifier is not None:  # lazy or possessive
                return False
            continue
        depth += (kind == "open") - (kind == "close")
        bars += kind == "bar"
        if depth:
            if quantifier is not None:
                return False
            continue
        least, most = (1, 1) if quantifier is None else _range_of(quantifier)
        is_group = kind == "close"
        if (is_group and quantifier is not None and quantifier[0] != "?") or (has_unbounded and least):
            return False
        if max(least, most or 0) > MAX_REPEAT:
            return False
        has_unbounded |= most is None
        ways *= (bars + 1 if is_group else 1) * (1 if most is None else most - least + 1)
        bars = 0
    return ways <= MAX_WAYS and depth == 0


def matches_runs(pattern: str) -> bool:
    """Return whether each match is a run of one item, such as ` {2,}`.

    Cutting a text then changes the matches at the cut alone.
    """
    alternatives = [_tokens(each) or [] for each in _alternatives(pattern) or [""]]
    return all([token.lastgroup for token in each] in _RUNS for each in alternatives)


def matches_nothing(pattern: str) -> bool:
    """Return whether a linear pattern may match the empty text."""
    return any(_may_be_empty(alternative) for alternative in _alternatives(pattern) or [""])


def _may_be_empty(alternative: str) -> bool:
    """Return whether all items of an alternative are optional; a group counts as one, which may be empty."""
    depth = 0
    for token, following in pairwise([*(_tokens(alternative) or []), None]):
        assert token is not None
        depth += (token.lastgroup == "open") - (token.lastgroup == "close")
        is_optional = following is not None and following["quantifier"] and _range_of(following)[0] == 0
        if token.lastgroup == "item" and depth == 0 and not is_optional:
            return False
    return True


def _range_of(quantifier: re.Match[str]) -> tuple[int, int | None]:
    """Return the least and the most repetitions; None for no limit."""
    if quantifier[0] in "?*+":
        return {"?": (0, 1), "*": (0, None), "+": (1, None)}[quantifier[0]]
    least = int(quantifier["least"] or 0)
    if quantifier["most"]:
        return least, int(quantifier["most"])
    return least, None if quantifier["comma"] else least
