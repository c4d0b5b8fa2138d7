"""Grammars of llguidance for each kind of constraint, and of a structural tag's parts."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .grammar_text import check_grammar, lark_of, quoted
from .json_grammar import JsonGrammar

_SLASH = re.compile(r"(\\.)|[/\n]", re.DOTALL)


class StructuralGrammar:
    """Writes the grammar of one structural tag.

    special: the special tokens of the vocabulary and their ids. A special token's text in the tag stands for
        the token; free text never contains special tokens.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        self._any_special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._rules = ["TEXT: /(.|\\n)*/"]
        self._grammars = list[dict[str, str]]()  # those that a tag brings along
        self._names = (f"r{number}" for number in itertools.count())
        self._schemas = dict[str, str]()  # rules of JSON
        self._bodies = dict[str, str]()  # rules by what they stand for
        self._triggers = dict[str, str]()  # rules of text that ends with a trigger
        self._texts = dict[tuple[str, ...], str]()  # terminals of text without some strings

    def grammar(self, tag: Mapping[str, Any]) -> str:
        """Return the grammar of a validated format. Raises RequestError or ValueError."""
        start = self._expression(tag)
        lark = "\n".join(["%llguidance {}", f"start: {start}", *self._rules])
        if not self._grammars:
            return lark
        return json.dumps({"grammars": [{"name": NAME_OF_MAIN, "lark_grammar": lark}, *self._grammars]})

    def _expression(self, tag: Mapping[str, Any]) -> str:
        """Return an expression, in parentheses where it must be."""
        match tag["type"]:
            case "const_string":
                return self._literal(tag["value"])
            case "json_schema":
                return self._json(tag["json_schema"])
            case "regex":
                return self._rule(f"/{_SLASH.sub(_escaped, tag['pattern'])}/")
            case "grammar":
                lark = lark_of(tag["grammar"])
                check_grammar("structural_tag", lark)  # as JSON in JSON, its own text was not recognized
                return self._subgrammar(lark)
            case "any_text":
                return "TEXT"
            case "sequence":
                return f"({' '.join(map(self._expression, tag['elements']))})"
            case "or":
                return f"({' | '.join(map(self._expression, tag['elements']))})"
            case "optional":
                return f"({self._expression(tag['content'])})?"
            case "star":
                return f"({self._expression(tag['content'])})*"
            case "plus":
                return f"({self._expression(tag['content'])})+"
            case "tag":
                return self._tag(tag, tag["begin"])
            case "triggered_tags":
                return self._triggered(tag)
            case "tags_with_separator":
                return self._separated(tag)
        raise AssertionError(tag["type"])

    def _tag(self, tag: Mapping[str, Any], begin: str) -> str:
        end = tag["end"]
        if tag["content"]["type"] == "any_text" and end:
            inside = self._text_before(end)
        else:
            inside = f"{self._expression(tag['content'])} {self._literal(end)}"
        return self._rule(f"{self._literal(begin)} {inside}")

    def _triggered(self, tag: Mapping[str, Any]) -> str:
        """Return text with tags. With at_least_one, a tag begins the text."""
        pairs = [(t, next(s for s in tag["triggers"] if t["begin"].startswith(s))) for t in tag["tags"]]
        rests = {(i, s): self._tag(t, t["begin"][len(s) :]) for i, (t, s) in enumerate(pairs)}
        after_text = self._either([f"{self._text_before(s)} {rest}" for (_, s), rest in rests.items()])
        first = after_text
        more = _times(after_text, tag.get("max_tags"))
        text = self._text_without(tag["triggers"], is_last=tag.get("max_tags") is not None)
        if tag.get("at_least_one"):
            first = self._either([f"{self._literal(s)} {rest}" for (_, s), rest in rests.items()])
            more = f"{first} {_times(after_text, tag.get('max_tags'), used=1)}"
            return first if tag.get("stop_after_first") else f"({more} {text})"
        return f"({first} | {text})" if tag.get("stop_after_first") else f"({more} {text})"

    def _separated(self, tag: Mapping[str, Any]) -> str:
        one = self._either([self._expression(t) for t in tag["tags"]])
        more = _times(f"({self._literal(tag['separator'])} {one})", tag.get("max_tags"), used=1)
        many = one if tag.get("stop_after_first") else f"{one} {more}"
        return f"({many})" if tag.get("at_least_one") else f"({many})?"

    def _text_before(self, text: str) -> str:
        """Return free text that ends with the first occurrence of `text`."""
        if (name := self._triggers.get(text)) is None:
            first, *rest = self._pieces(text)
            name = self._triggers[text] = next(self._names)
            if first in self._special:
                self._rules.append(f"{name}: {self._text_without([text])} {self._literal(text)}")
            else:
                lazy = next(self._names)
                self._rules.append(f"{lazy}[lazy]: TEXT {quoted(first)}")
                self._rules.append(f"{name}: {lazy} {self._literal(''.join(rest))}")
        return name

    def _text_without(self, texts: Sequence[str], *, is_last: bool = False) -> str:
        """Return free text in which no special token among the texts is spelled by other tokens.

        The parser of an output cannot tell such a spelling from the token. is_last: whether no tag may
        follow; then the text contains none of the texts, after which a tag would have to begin.
        """
        spelled = tuple(t for t in texts if is_last or self._pieces(t)[0] in self._special)
        if not spelled:
            return "TEXT"
        if (name := self._texts.get(spelled)) is None:
            name = self._texts[spelled] = f"TEXT_{len(self._texts)}"
            without = [rf"~/(.|\n)*{_SLASH.sub(_escaped, re.escape(t))}(.|\n)*/" for t in spelled]
            self._rules.append(f"{name}: {' & '.join(['TEXT', *without])}")
        return name

    def _literal(self, text: str) -> str:
        """Return an expression of exactly this text; an empty one for no text."""
        return " ".join(
            f"<[{self._special[piece]}]>" if piece in self._special else quoted(piece)
            for piece in self._pieces(text)
        )

    def _pieces(self, text: str) -> list[str]:
        """Split a text into special tokens and what is between them."""
        pieces = list[str]()
        end = 0
        for found in self._any_special.finditer(text):
            pieces += [text[end : found.start()], found[0]]
            end = found.end()
        return [piece for piece in (*pieces, text[end:]) if piece]

    def _either(self, expressions: Sequence[str]) -> str:
        return self._rule(" | ".join(expressions))

    def _rule(self, body: str) -> str:
        """Return the name of a rule. Equal ones are one: a library's grammar costs time by its rules."""
        if (name := self._bodies.get(body)) is None:
            name = self._bodies[body] = next(self._names)
            self._rules.append(f"{name}: {body}")
        return name

    def _json(self, schema: Any) -> str:
        """Return an expression of JSON, without blanks before it: a grammar within a grammar allows them."""
        key = repr(schema)
        if (name := self._schemas.get(key)) is None:
            name = self._schemas[key] = self._json_rule(schema)
        return name

    def _json_rule(self, schema: Any) -> str:
        grammar = JsonGrammar(schema)
        values = [self._rule(f"%json {text}") for text in grammar.at_start]
        if grammar.others is not None:
            values.append(self._subgrammar(grammar.others))
        return self._either(values)

    def _subgrammar(self, lark: str) -> str:
        known = (grammar["name"] for grammar in self._grammars if grammar["lark_grammar"] == lark)
        if (name := next(known, None)) is None:
            name = f"g{len(self._grammars)}"
            self._grammars.append({"name": name, "lark_grammar": lark})
        return f"@{name}"


NAME_OF_MAIN = "structural_tag"


def _times(expression: str, most: int | None, *, used: int = 0) -> str:
    """Repeat an expression any number of times or, if there is a `most`, at most `most - used` times."""
    if most is None:
        return f"{expression}*"
    return f"{expression}{{0,{most - used}}}" if most > used else ""


def _escaped(found: re.Match[str]) -> str:
    """Escape a slash or a line break for a regular expression between slashes; leave escaped characters."""
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found[0], found[0])


def library_grammar(kind: str, value: Any, special: Mapping[str, int]) -> str:
    """Return the library's grammar of a constraint. Raises ValueError or RequestError.

    kind: the field of StructuredOutputsParams that is given.
    value: text if the kind is "regex" or "grammar", otherwise JSON parsed by `structural_tag.exact_json`.
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
