"""Answers in every chat format, and what they consist of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from paged.chat.chat_format import ChatFormat
from paged.chat.formats import CHAT_FORMATS, REASONING_BY_NAME, ChatSyntax, ReasoningSyntax
from paged.chat.parts import ChatOutput, OutputParser, Part
from paged.chat.plan import ToolPlan
from paged.chat.writing import written_call

TEXT = {"type": "string"}
SCHEMA = {
    "type": "object",
    "properties": {
        "s": TEXT,
        "t": TEXT,
        "n": {"type": "integer"},
        "x": {"type": "number"},
        "b": {"type": "boolean"},
        "l": {"type": "array"},
        "o": {"$ref": "#/$defs/O"},
        "u": {"anyOf": [TEXT, {"type": "null"}]},
        "v": {"type": ["integer", "string"]},
        "e": {"enum": ["a", "5"]},
        "any": {},
    },
    "$defs": {"O": {"type": "object"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {"name": "get_time", "parameters": {"type": "object", "properties": {"zone": TEXT}}},
    },
]
Calls = list[tuple[str, dict[str, Any]]]
# Arguments of single calls: each kind of value, and texts that look like something else.
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"s": "Ulm"},
    {"s": ""},
    {"s": "quotes \"double\", 'single' and a back\\slash"},
    {"s": "two\nlines\n\nand a blank one"},
    {"s": "\n"},
    {"s": "  blanks around  "},
    {"s": "Zürich ✈ 日本語 🦙"},
    {"s": "</p> <b>tags</b> {braces} [brackets]"},
    {"s": "<parameter=x> </parameter> <arg_key> </arg_value> <invoke name="},
    {"s": "<tool_call> [TOOL_CALLS] <think> </think> <function_calls>"},
    {"s": "42", "t": "true"},
    {"s": "null", "t": "None"},
    {"s": '{"a": 1}', "t": "[1, 2]"},
    {"n": 5, "x": -2.5, "b": True},
    {"n": 12345678901234567890, "x": 1e30, "b": False},
    {"l": [1, "two", None, [True, {}], {"k": "v"}]},
    {"o": {"deep": {"deeper": [{"deepest": "x"}]}, "empty": {}, "list": []}},
    {"u": None, "s": "x"},
    {"u": "text"},
    {"u": "nullable"},
    {"v": 7},
    {"v": "seven"},
    {"e": "5"},
    {"any": [1, 2], "s": "last"},
]


class Example(NamedTuple):
    """An answer of a model, and its parts."""

    text: str
    content: str = ""
    reasoning: str = ""
    calls: Calls = []  # noqa: RUF012
    is_whole: bool = False  # whether there are calls, and all are whole


def plan_of(entry: ChatSyntax, template: str = "", special_tokens: Sequence[str] = ()) -> ToolPlan:
    """Return the plan of a request with TOOLS."""
    chat = ChatFormat.of(
        tool_call_parser=entry.name,
        reasoning_parser=entry.reasoning[0] if entry.reasoning else "think",
        template=template,
        special_tokens=special_tokens,
    )
    return ToolPlan.of(chat, tools=TOOLS)


def templates_of(entry: ChatSyntax) -> Iterator[str]:
    """Yield a template for each way in which a format writes calls."""
    for texts, _ in entry.variants:
        yield " ".join(texts)


def examples(entry: ChatSyntax, template: str) -> Iterator[Example]:
    """Yield answers in a format, as its models write them."""
    syntax = entry.calls(template)
    reasons = REASONING_BY_NAME[entry.reasoning[0]] if entry.reasoning else REASONING_BY_NAME["think"]

    def written(*calls: tuple[str, dict[str, Any]]) -> str:
        texts = [written_call(syntax, name, json.dumps(arguments)) for name, arguments in calls]
        return f"{syntax.section[0]}{syntax.separator.join(texts)}{syntax.section[1]}"

    def thought(text: str) -> str:
        return _thought(reasons, text)

    def said(text: str) -> str:
        return f"<|channel|>final<|message|>{text}" if entry.has_channels else text

    for arguments in ARGUMENTS:
        if _can_say(entry, arguments):
            yield Example(written(("f", arguments)), calls=[("f", arguments)], is_whole=True)
    for text in (
        "Four.",
        "",
        "a <b> & [c] {d} (e)",
        "Ends with <tool",
        "日本語 🦙",
        " blank first",
        "x\n\ny",
    ):
        yield Example(said(text), content=text)
    yield Example(thought("Hm. {x} [y]") + said("Four."), "Four.", "Hm. {x} [y]")
    inside = '<tool_call>{"name": "f", "arguments": {}}</tool_call>[TOOL_CALLS]f{}'
    yield Example(thought(inside) + said("No call."), "No call.", inside)
    first: tuple[str, dict[str, Any]] = ("f", {"s": "a", "n": 1})
    second: tuple[str, dict[str, Any]] = ("get_time", {"zone": "CET"})
    yield Example(thought("Why?") + written(first), "", "Why?", [first], True)
    if not entry.has_channels:  # an answer ends with its call
        yield Example(written(first, second), "", "", [first, second], True)
        yield Example(
            written(first, first, second, ("f", {})), "", "", [first, first, second, ("f", {})], True
        )
    if syntax.begin:
        yield Example(f"Let me see.\n\n{written(first)}", "Let me see.", "", [first], True)
        yield Example(f"{written(first)}\n Done. ", "Done.", "", [first], True)
    unknown = written(("other", {"s": "x"}))
    if entry.has_channels:
        unknown = unknown.removesuffix("<|call|>")
    yield Example(unknown, content=unknown)


def _thought(reasons: ReasoningSyntax, text: str) -> str:
    if reasons.has_channels:
        return f"{reasons.begins[0]}{text}{reasons.ends[0]}<|start|>assistant"
    return f"{reasons.begins[0]}\n{text}\n{reasons.ends[0]}\n\n"


def _can_say(entry: ChatSyntax, arguments: dict[str, Any]) -> bool:
    """Return whether a format can say these arguments: Gemma's has no quote within a text."""
    return entry.calls("").quote == "" or '<|"|>' not in json.dumps(arguments)


def joined(parser: OutputParser, pieces: list[str]) -> Example:
    """Feed pieces to a parser. Return the parts."""
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.feed(piece)
    output = ChatOutput.of([*parts, *parser.finish()])
    calls = [(call.name, _value(call.arguments)) for call in output.tool_calls]
    return Example("".join(pieces), output.content, output.reasoning, calls, parser.has_whole_calls)


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def all_cases() -> list[tuple[ChatSyntax, str]]:
    """Return each format with a template of each way in which it writes calls."""
    return [(entry, template) for entry in CHAT_FORMATS for template in templates_of(entry)]
