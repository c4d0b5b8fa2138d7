"""Grammars of llguidance for each kind of constraint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .json_grammar import JsonGrammar
from .lark_text import lark_of, quoted
from .structural_grammar import StructuralGrammar


def library_grammar(kind: str, value: Any, special: Mapping[str, int]) -> str:
    """Return the library's grammar of a constraint. Raises ValueError or RequestError.

    value: a text of the kinds regex and grammar; of the others JSON, parsed by `structural_tag.exact_json`.
    special: the special tokens of the vocabulary and their ids.
    """
    from llguidance import LLMatcher

    if kind == "structural_tag":
        return StructuralGrammar(special).grammar(value["format"])
    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(value))
    if kind == "json":
        lark = JsonGrammar(value).lark
    elif kind == "choice":
        # As one terminal, so that thousands of strings are as fast as a few.
        lark = f"start: CHOICE\nCHOICE: {' | '.join(map(quoted, value))}"
    else:
        lark = lark_of(value)
    return str(LLMatcher.grammar_from_lark(lark))
