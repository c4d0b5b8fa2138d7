"""Lark's EBNF and llama.cpp's GBNF are told apart by what only one of them can show."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher, LLTokenizer

from paged.grammars.grammar_text import lark_of

TOKENIZER = LLTokenizer("byte", eos_token=0)
SQL = """
// The example of vLLM's documentation.
    ?start: select_statement

    ?select_statement: "SELECT " column " FROM " table
    column.2: "c::=" | "d"   // root ::= x
    table: "t"
"""
# A grammar, and a text of it.
GRAMMARS = {
    '?start: "a"': "a",
    '!start: "a"': "a",
    '?!start: "a"': "a",
    'start.2: "a"': "a",
    "?start.-1: A\nA.3: /a/": "a",
    '// root ::= "b"\n\n\r\n start : "a"': "a",
    '# root\nstart: "root ::= a"': "root ::= a",
    '%import common.INT\n%ignore " "\nn: INT\nstart: n "," n': "1, 2",
    '%llguidance {}\nstart: %json {"const":\n "a.2:"}': '"a.2:"',
    SQL: "SELECT c::= FROM t",
    'root ::= "a"': "a",
    '# start: "b"\n\n  root  ::= x [^":=]\nx ::= "start: " # more': "start: a",
    'x-y ::= "a" | "?start: "\nroot ::= (\n x-y\n)': "?start: ",
}


@pytest.mark.parametrize("text", GRAMMARS, ids=repr)
def test_grammars_are_read_as_what_they_are(text):
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(lark_of(text)), log_level=0)
    expected = list(GRAMMARS[text].encode())
    assert matcher.try_consume_tokens(expected) == len(expected), matcher.get_error()
    assert matcher.is_accepting()


def test_errors_are_those_of_the_syntax():
    with pytest.raises(ValueError, match="it is not GBNF: Rule 'missing' not found"):
        lark_of("root ::= missing")
    assert "no start rule" in LLMatcher.validate_grammar(lark_of('begin: "a"'))
