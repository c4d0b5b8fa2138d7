"""Texts of grammars: bounds on the memory that they may take, and llguidance's variant of Lark's syntax.

A grammar comes with a request and may be hostile. The library's own limits allow 300 MiB for a regular
expression of 30 characters, and no limit of it applies to multiples: a JSON schema of 40 characters took 2
GiB.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from ..base.errors import RequestError

MAX_CHARACTERS = 2**18  # of a grammar's text
# Fuel is for the regular expressions that are built at once, at about 250 bytes a unit. Large enumerations
# need some for each character.
BASE_FUEL = 50_000
FUEL_PER_CHARACTER = 4
MAX_FUEL = 1_000_000
MAX_LEXER_STATES = 50_000  # built as tokens are matched, at about 600 bytes each
MAX_MULTIPLE = 10_000  # an automaton for multiples of n has n states
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*([-+.0-9eE]+)')
_ESCAPE = re.compile(r"\\u00([0-7][0-9a-fA-F])")


def check_grammar(kind: str, text: str) -> None:
    """Raise RequestError for a grammar that is too long or has too large numbers in "multiple of"."""
    if len(text) > MAX_CHARACTERS:
        raise RequestError(
            f"structured_outputs {kind} has {len(text):,} characters; {MAX_CHARACTERS:,} are allowed",
            param="structured_outputs",
        )
    # JSON may escape any letter of a key. A Lark grammar may hold JSON schemas too.
    plain = _ESCAPE.sub(lambda found: chr(int(found[1], 16)), text)
    multiple = 1
    for number in _MULTIPLE.findall(plain):
        # Powers of ten cost nothing, and schemas that are combined cost as much as their common multiple.
        digits = re.split("[eE]", number)[0].replace(".", "").strip("+-0")
        multiple = math.lcm(multiple, int(digits[:9] or 1))
        if multiple > MAX_MULTIPLE:
            raise RequestError(
                f"structured_outputs {kind} has multiples of too large numbers (multipleOf): without powers "
                f"of ten, their least common multiple may be at most {MAX_MULTIPLE:,}",
                param="structured_outputs",
            )


def library_limits(text: str) -> Any:
    """Return the library's limits for a grammar of this text.

    The library's defaults apply to other limits: 500,000 symbols per grammar, and about 20 ms of work for
    each mask after the first.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=min(BASE_FUEL + FUEL_PER_CHARACTER * len(text), MAX_FUEL),
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,  # a verbose message would repeat the grammar
    )


# A line of GBNF begins a rule with it, and none of Lark's can: strings and comments do not span lines.
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
# Modifiers and priorities choose among parse trees, so the language is the same without them. The library
# refuses priorities, and modifiers in this order.
_PRIORITY = re.compile(r"^([ \t]*[!?]{0,2}\w[\w-]*)\.-?\d+(?=[ \t]*[:{\[])", re.MULTILINE)
_MODIFIERS = re.compile(r"^([ \t]*)\?!", re.MULTILINE)


def lark_of(text: str) -> str:
    """Convert a grammar from llama.cpp's GBNF or Lark's EBNF to the library's dialect. Raises ValueError."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if _GBNF_RULE.search(text) is None:
        return _MODIFIERS.sub(r"\1!?", _PRIORITY.sub(r"\1", text))
    try:
        lark: str = gbnf_to_lark(text)
    except Exception as error:  # the library raises Exception itself, and its own classes
        raise ValueError(f"it is not GBNF: {error}") from error
    return lark


def quoted(text: str) -> str:
    """Return a text as a string literal of Lark. DEL is escaped, since a literal may not contain it."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")
