"""Texts of grammars in llguidance's variant of Lark's syntax."""

from __future__ import annotations

import json
import re

# A line of GBNF begins a rule with it, and none of Lark's can: strings and comments do not span lines.
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
# Modifiers and priorities choose among parse trees, so the language is the same without them. The library
# refuses priorities, and modifiers in this order.
_PRIORITY = re.compile(r"^([ \t]*[!?]{0,2}\w[\w-]*)\.-?\d+(?=[ \t]*[:{\[])", re.MULTILINE)
_MODIFIERS = re.compile(r"^([ \t]*)\?!", re.MULTILINE)


def lark_of(text: str) -> str:
    """Return a grammar, in llama.cpp's GBNF or Lark's EBNF, as the library's Lark. Raises ValueError."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if _GBNF_RULE.search(text) is None:
        return _MODIFIERS.sub(r"\1!?", _PRIORITY.sub(r"\1", text))
    try:
        lark: str = gbnf_to_lark(text)
    except Exception as error:  # the library raises Exception itself, and its own classes
        raise ValueError(f"it is not GBNF: {error}") from error
    return lark


def quoted(text: str) -> str:
    """Return a text as a string literal of Lark. DEL is escaped, as a literal may not contain it."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")
