"""Grammars of llguidance for each kind of constraint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .lark_text import lark_of, quoted
from .structural_grammar import StructuralGrammar

# One space, or a line break and indentation. Without a bound, a model may write blanks forever.
WHITESPACE = r"[ ]|\n[ ]{0,32}"


def library_grammar(kind: str, text: str, special: Mapping[str, int]) -> Any:
    """Return the library's grammar of a constraint. Raises ValueError or RequestError.

    special: the special tokens of the vocabulary and their ids.
    """
    from llguidance import LLMatcher

    if kind == "json":
        return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": WHITESPACE})
    if kind == "structural_tag":
        return StructuralGrammar(special, WHITESPACE).grammar(json.loads(text)["format"])
    if kind == "choice":
        # As one terminal, so that thousands of strings are as fast as a few.
        strings = " | ".join(quoted(s) for s in json.loads(text))
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {strings}")
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    return LLMatcher.grammar_from_lark(lark_of(text))
