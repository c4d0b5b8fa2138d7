"""Random texts of the grammars that force calls, whose arguments are compared with their schemas.

python -m tests.support.forced_calls --requests 200    # for each format; CI tries a few
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from typing import Any

import jsonschema
from llguidance import LLMatcher

from paged.base.errors import RequestError
from paged.chat.chat_format import ChatFormat
from paged.chat.formats import ChatSyntax
from paged.chat.plan import ToolPlan
from paged.grammars.library_grammar import StructuralGrammar
from tests.support.chat_corpus import all_cases, joined
from tests.support.random_schemas import TOKENIZER, possible

MAX_BYTES = 1200
ENDS = b'"]},:)<\n'  # bytes that lead to the end of a value or an element
VALUES = ["a", "b", "null", "5", 5, None, True, "x y", "\n", {"q": 1}]


def random_arguments(choose: random.Random) -> dict[str, Any]:
    """Return a schema of arguments."""
    names = choose.sample(["city", "n_days", "flag", "x", "text", "opts"], choose.randrange(5))
    return {
        "type": "object",
        "properties": {name: _value(choose, 2) for name in names},
        "required": [name for name in names if choose.random() < 0.6],
        "additionalProperties": False,
        "$defs": {"A": _value(choose, 0)},
    }


def _value(choose: random.Random, depth: int) -> Any:
    simple: list[Any] = [
        *({"type": kind} for kind in ("string", "boolean", "number", "null")),
        {"type": "integer", "minimum": -3, "maximum": 90},
        {"enum": choose.sample(VALUES, 3)},
        {"type": ["string", "null"]},
        {"anyOf": [{"type": "integer", "minimum": 4}, {"type": "string"}, {"type": "null"}]},
        {"type": "string", "minLength": 1, "maxLength": 5},
    ]
    if not depth or choose.random() < 0.6:
        return choose.choice(simple)
    inner = _value(choose, depth - 1)
    members = {"p": inner, "q": choose.choice(simple)}
    compound: list[Any] = [
        {"type": "array", "items": inner, "minItems": choose.randrange(2), "maxItems": 3},
        {
            "type": "object",
            "properties": members,
            "required": choose.sample(["p", "q"], choose.randrange(3)),
            "additionalProperties": False,
        },
        {"anyOf": [inner, {"type": "null"}]},
        {"$ref": "#/$defs/A"},
        {},
        {"type": "string", "pattern": "^[ab]+$"},
    ]
    return choose.choice(compound)


def random_text(grammar: str, choose: random.Random) -> str | None:
    """Return a random text of a grammar; None if it becomes too long."""
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    found = bytearray()
    while (following := possible(matcher)) and not (matcher.is_accepting() and choose.random() < 0.5):
        if len(found) > MAX_BYTES:
            return None
        ends = [byte for byte in following if byte in ENDS]
        printable = [byte for byte in following if 32 <= byte < 127 or byte == 10]
        if ends and choose.random() < (0.4 if len(found) < 150 else 0.95):
            following = ends
        elif printable and choose.random() < 0.95:
            following = printable
        found.append(choose.choice(following))
        assert matcher.consume_token(found[-1])
    return found.decode()


def try_one(entry: ChatSyntax, template: str, seed: int) -> str:
    """Force calls with random schemas. Return what became of them."""
    choose = random.Random(seed)
    mode = choose.choice(["required", "required", "auto"])
    schemas = {name: random_arguments(choose) for name in ("alpha", "beta_2")}
    functions = ({"name": name, "parameters": schema, "strict": True} for name, schema in schemas.items())
    tools = [{"type": "function", "function": function} for function in functions]
    chat = ChatFormat.of(tool_call_parser=entry.name, template=template)
    is_parallel = choose.random() < 0.5
    plan = ToolPlan.of(chat, tools=tools, tool_choice=mode, parallel_tool_calls=is_parallel)
    try:
        language = plan.structured_outputs("Hi")
    except RequestError as error:
        return "refused" if (error.param or "?") in str(error) else f"refused without a place: {error}"
    assert language is not None
    grammar = StructuralGrammar({}).grammar(json.loads(language.structural_tag)["format"])
    text = random_text(grammar, choose)
    if text is None:
        return "too long"
    found = joined(plan.new_parser("Hi"), [text])
    assert found.calls or mode == "auto", text
    assert not (found.content and mode == "required"), text
    assert found.is_whole or not found.calls, text
    for name, arguments in found.calls:
        jsonschema.validate(arguments, schemas[name])
    return "called" if found.calls else "content"


def main() -> None:
    """Try random schemas in each format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    options = parser.parse_args()
    for entry, template in all_cases():
        counts = Counter(try_one(entry, template, seed) for seed in range(options.requests))
        print(json.dumps({"format": entry.name, "template": template, **counts}))


if __name__ == "__main__":
    main()
