"""Parsers of tool calls and reasoning: their parts do not depend on how the text arrives."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paged.chat.call_parser import CallParser
from paged.chat.formats import BY_NAME, THINK
from paged.chat.json_scanner import JsonScanner
from paged.chat.parts import ChatOutput, Part, ToolArgumentsDelta, delta_of
from paged.chat.reasoning import ReasoningMachine, ends_in_reasoning
from paged.chat.tools import ANY_OBJECT, Tool

NAMES = ["get_time", "f"]
# The same examples in every run, however slowly a busy machine draws them.
STEADY = settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
TOOLS = [Tool(name, ANY_OBJECT) for name in NAMES]
HermesCalls, Llama3Calls, MistralCalls, JsonCalls = MACHINES = ["hermes", "llama3_json", "mistral", "json"]
Joined = tuple[str, str, list[tuple[str, str]], bool]  # content, reasoning, names and arguments, whole calls


def fed(parser: Any, pieces: list[str]) -> list[Part]:
    return [*itertools.chain.from_iterable(map(parser.feed, pieces)), *parser.finish()]


def parser_of(name: str, new_id: Any) -> CallParser:
    return CallParser(BY_NAME[name].variants[0][1], TOOLS, new_id)


def joined(machine: str, pieces: list[str], *, reasons: bool = False) -> Joined:
    ids = map("call_{}".format, itertools.count())
    parser: Any = parser_of(machine, lambda: next(ids))
    if reasons:
        parser = ReasoningMachine(THINK, parser, is_inside=False)
    output = ChatOutput.of(fed(parser, pieces))
    assert [call.call_id for call in output.tool_calls] == [
        f"call_{i}" for i in range(len(output.tool_calls))
    ]
    calls = [(call.name, call.arguments) for call in output.tool_calls]
    return output.content, output.reasoning, calls, parser.has_whole_calls


WORLD = '{"city": "W\\u00fc \\"<tool_call>\\" [TOOL_CALLS]", "n": [-1.5e3, {"x": {}}, null, true]}'
CASES: list[tuple[str, str, str, list[tuple[str, str]], bool]] = [
    # Content, and calls in every form
    (HermesCalls, "Just text with a <tool_cal", "Just text with a <tool_cal", [], False),
    (HermesCalls, '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "", [("f", "{}")], True),
    (
        HermesCalls,
        f'Let me see.\n\n<tool_call>\n{{"name": "f", "arguments": {WORLD}}}\n</tool_call>\n'
        '<tool_call>{"arguments":{"a":1},"name":"get_time"}</tool_call>\n Done. ',
        "Let me see.Done.",
        [("f", WORLD), ("get_time", '{"a":1}')],
        True,
    ),
    (Llama3Calls, f'{{"name": "f", "parameters": {WORLD}}}', "", [("f", WORLD)], True),
    (
        Llama3Calls,
        'I ask.<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "get_time", "parameters": {}}',
        "I ask.",
        [("f", '{"a": 1}'), ("get_time", "{}")],
        True,
    ),
    (
        MistralCalls,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}, {"name": "get_time"}]',
        "",
        [("f", '{"a": 1}'), ("get_time", "{}")],
        True,
    ),
    (
        MistralCalls,
        f"Yes. [TOOL_CALLS]f[ARGS]{WORLD}[TOOL_CALLS]get_time[CALL_ID]abcdefghi[ARGS]{{}}[TOOL_CALLS]f[ARGS]",
        "Yes.",
        [("f", WORLD), ("get_time", "{}"), ("f", "")],
        False,
    ),
    (JsonCalls, '[{"name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')], True),
    # Arguments that are missing, empty, or JSON in a string
    (HermesCalls, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")], True),
    (HermesCalls, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")], True),
    (HermesCalls, '<tool_call>{"name": "f", "arguments": ""}', "", [("f", "{}")], True),
    (
        HermesCalls,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("f", '{"a": 1}')],
        True,
    ),
    # What is no call is content, without loss
    *(
        (machine, text, text, [], False)
        for machine, text in [
            (HermesCalls, '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
            (HermesCalls, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
            (HermesCalls, '<tool_call>{"name": "f", "arguments": "\\ud800{}"}</tool_call>'),
            (HermesCalls, '<tool_call>\n{"name": "f"'),
            (HermesCalls, "<tool_call> {} </tool_call>"),
            (Llama3Calls, ' {"answer": {"name": "f"}}'),
            (Llama3Calls, '<|python_tag|>brave_search.call(query="x")'),
            (Llama3Calls, 'Text {"name": "f", "parameters": {}}'),
            (MistralCalls, "[TOOL_CALLS] other[ARGS]{}"),
            (MistralCalls, "[TOOL_CALLS]f says"),
            (JsonCalls, "[1, 2]"),
        ]
    ),
    # A call after text that looked like one
    (
        HermesCalls,
        '<tool_call> is a tag: <tool_call>{"name": "f"}</tool_call>',
        "<tool_call> is a tag:",
        [("f", "{}")],
        True,
    ),
    # Arguments that were passed on stay; the text from the wrong character on is content
    (
        HermesCalls,
        '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>',
        "}}</tool_call>",
        [("f", '{"a": 1,')],
        False,
    ),
    (HermesCalls, '<tool_call>{"name": "f", "arguments": {"a": "cut', "", [("f", '{"a": "cut')], False),
    (
        HermesCalls,
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "why": 2}</tool_call>',
        ', "why": 2}</tool_call>',
        [("f", '{"a": 1}')],
        True,
    ),
    (
        MistralCalls,
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "other"}]',
        ', {"name": "other"}]',
        [("f", "{}")],
        True,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}: {case[1][:40]}")
def test_parts_of_text_as_a_whole_and_by_character(case):
    machine, text, *expected = case
    whole = joined(machine, [text])
    assert [whole[0], *whole[2:]] == expected
    assert joined(machine, [*text]) == whole
    reasoned = joined(machine, [*f"<think>\nHm. \n</think>\n\n{text}"], reasons=True)
    assert reasoned == (whole[0].lstrip(), "Hm.", *whole[2:])


FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>"),
        *('{"name": "f", "arguments": {"a": "b"}}', '{"parameters": {}, "name": "get_time"}', '{"name": "f"'),
        *('{"name": "f", "arguments": {"a": [1, ', *'[]{};,"\\f1 \né', "x y"),
    ]
)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(), VALUES, max_size=3)


@settings(STEADY, max_examples=200)
@given(st.data())
def test_parts_do_not_depend_on_how_the_text_is_split(data):
    text = "".join(data.draw(st.lists(FRAGMENTS, max_size=14)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    for machine in MACHINES:
        for reasons in (False, True):
            content, _, calls, are_whole = whole = joined(machine, [text], reasons=reasons)
            assert joined(machine, pieces, reasons=reasons) == whole
            assert calls or reasons or content == text
            if are_whole:
                assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


@STEADY
@given(st.lists(st.tuples(st.sampled_from(["", "Text <tool", "[1] ; {"]), st.sampled_from(NAMES), OBJECTS)))
def test_calls_are_those_that_were_written(answers):
    """The same calls, written out in each format, are read back."""
    texts = [(content, name, json.dumps(arguments)) for content, name, arguments in answers]
    expected = [(name, arguments) for _, name, arguments in texts]
    hermes = "".join(
        f'{content}\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for content, name, arguments in texts
    )
    assert joined(HermesCalls, [hermes])[2] == expected
    assert "".join(joined(HermesCalls, [hermes])[0].split()) == "".join(c for c, *_ in texts).replace(" ", "")
    named = "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for _, name, arguments in texts)
    assert joined(MistralCalls, [named])[2] == expected
    objects = [f'{{"name": "{name}", "parameters": {arguments}}}' for _, name, arguments in texts]
    assert joined(Llama3Calls, ["; ".join(objects)])[2] == expected
    assert joined(MistralCalls, [f"[TOOL_CALLS][{', '.join(objects)}]"])[2] == expected


@settings(STEADY, max_examples=200)
@given(VALUES, st.text(), st.sampled_from([None, 1]), st.integers(0, 40))
def test_scanner_agrees_with_json(value, rest, indent, cut):
    text = json.dumps(value, indent=indent, ensure_ascii=bool(cut % 2))
    scanner = JsonScanner()
    split = min(cut, len(text))
    assert scanner.scan(text[:split]) == split
    scanner.scan(text[split:])
    scanner.finish()
    assert scanner.done
    damaged = text[:split] + rest[:1] + text[split + 1 :]
    scanner = JsonScanner()
    end = scanner.scan(damaged)
    scanner.finish()
    try:
        json.loads(damaged, parse_constant=float.fromhex)
    except ValueError:
        assert not scanner.done or damaged[end:].strip(" \n\r\t")
    else:
        assert scanner.done


def test_arguments_are_passed_on_as_they_arrive():
    parser = parser_of(HermesCalls, lambda: "id")
    parts = parser.feed('<tool_call>{"name": "f", "arguments": ')
    assert parts == []
    for piece in ('{"text": "a', " long", ' one"}'):
        (*_, part) = parser.feed(piece)
        assert part == ToolArgumentsDelta(0, piece)
    assert parser.feed("}\n</tool_call>") == []
    assert parser.has_whole_calls


def test_a_marker_is_held_no_longer_than_it_may_become_one():
    parser = parser_of(HermesCalls, lambda: "id")
    assert fed(parser, []) == []
    parser = parser_of(HermesCalls, lambda: "id")
    assert [[delta_of(part) for part in parser.feed(piece)] for piece in ("a <to", "ol_", "box>", " b")] == [
        [{"content": "a"}],
        [],
        [{"content": " <tool_box>"}],
        [{"content": " b"}],
    ]


def test_an_answer_may_begin_inside_of_reasoning():
    parts = fed(ReasoningMachine(THINK, None, is_inside=True), ["So", ".</th", "ink>\n\nYes. "])
    message = ChatOutput.of(parts).message()
    assert message == {
        "role": "assistant",
        "content": "Yes. ",
        "reasoning": "So.",
        "reasoning_content": "So.",
    }
    assert ends_in_reasoning(THINK, "<|im_start|>assistant\n<think>\n")
    assert not ends_in_reasoning(THINK, "What is <think>?<|im_start|>assistant\n")
    assert not ends_in_reasoning(THINK, "<think>\n\n</think>\n\n")
    assert ends_in_reasoning(THINK, "assistant\n<think>\nI was", continues_answer=True)


def test_depth_of_arguments_is_bounded():
    deep = '{"a":' * 70 + "1" + "}" * 70
    content, _, calls, is_whole = joined(HermesCalls, [f'<tool_call>{{"name": "f", "arguments": {deep}}}'])
    assert calls == [("f", '{"a":' * 64)]
    assert content.startswith('{"a":')
    assert not is_whole
