"""Structural tags: the parts of an output that a grammar covers match it, and the rest is free."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from paged import LLMEngine, RequestError, SamplingParams, StructuredOutputsParams
from paged.base.errors import PagedError
from paged.base.strict_json import parse_json
from paged.grammars.library_grammar import StructuralGrammar
from tests.support.chat_checkpoints import chat_checkpoint
from tests.support.checkpoints import assert_all_free, new_engine
from tests.support.json_schemas import closed

SCHEMA = closed({"a": {"enum": ["x", "/", "</f>"]}, "b": {"type": "boolean"}})
JSON = {"type": "json_schema", "json_schema": SCHEMA}
TEXT = {"type": "any_text"}


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: Any, end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": [*elements]}


def either(*elements: Any) -> dict[str, Any]:
    return {"type": "or", "elements": [*elements]}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LLMEngine:
    directory: Path = chat_checkpoint(tmp_path_factory.mktemp("tags"))
    return new_engine(directory, skip_tokenizer_init=False, num_blocks=1024, max_model_len=256)


def texts(engine: LLMEngine, language: Any, **more: Any) -> list[tuple[str, bool]]:
    """Return outputs at temperature 1, and whether they ended by themselves."""
    wanted = StructuredOutputsParams(structural_tag=language)
    params = SamplingParams(
        **{"n": 6, "seed": 1, "max_tokens": 160, "skip_special_tokens": False, **more},
        structured_outputs=wanted,
    )
    (output,) = engine.generate("Hi", params, use_tqdm=False)
    assert_all_free(engine)
    return [(c.text, c.finish_reason == "stop") for c in output.outputs]


def is_valid(found: str) -> bool:
    return jsonschema.Draft202012Validator(SCHEMA).is_valid(json.loads(found))


# Each format, a regular expression whose groups are JSON of SCHEMA, and how many outputs there are at least.
FORMATS: list[tuple[Any, str, int]] = [
    (text('a "quoted" \\ é'), 'a "quoted" \\\\ é', 1),
    (JSON, "(.*)", 3),
    ({"type": "regex", "pattern": r"[/\n]\/?x{1,2}|\\/"}, r"[/\n]/?x{1,2}|\\/", 2),
    ({"type": "grammar", "grammar": 'root ::= "yes" | "no"'}, "yes|no", 2),
    (sequence({"type": "grammar", "grammar": 'start: A\nA: "/"{2,4}'}, text(";"), JSON), "/{2,4};(.*)", 3),
    (either(text("a"), text("<|python_tag|>"), tag("(", JSON, ")")), r"a|<\|python_tag\|>|\((.*)\)", 3),
    (sequence({"type": "optional", "content": text("a")}, text("b")), "a?b", 2),
    (sequence({"type": "star", "content": text("a")}, text("b")), "a*b", 2),
    (sequence({"type": "plus", "content": text("[ARGS]a")}, text("b")), r"(?:\[ARGS\] ?a)+b", 1),
    (tag("[TOOL_CALLS]", JSON, "</f>"), r"\[TOOL_CALLS\](.*)</f>", 3),
    (
        {
            "type": "tags_with_separator",
            "tags": [tag("<", JSON, ">")],
            "separator": ";",
            "at_least_one": True,
        },
        "<({.*?})>(?:;<({.*?})>)*",
        3,
    ),
    (
        {
            "type": "tags_with_separator",
            "tags": [tag("<", JSON, ">")],
            "separator": ";",
            "stop_after_first": True,
        },
        "(?:<(.*)>)?",
        2,
    ),
    (
        {
            "type": "triggered_tags",
            "triggers": ["<tool_call>"],
            "tags": [
                tag("<tool_call>", JSON, "</f>"),
                {"begin": "<tool_call>!", "content": JSON, "end": "!"},
            ],
            "at_least_one": True,
            "stop_after_first": True,
        },
        "<tool_call>!?(.*)(?:</f>|!)",
        3,
    ),
]


@pytest.mark.parametrize("case", FORMATS, ids=lambda case: json.dumps(case[0])[:60])
def test_outputs_have_the_format(engine, case):
    language, pattern, least = case
    found = texts(engine, {"type": "structural_tag", "format": language})
    for output, is_whole in found:
        match = re.fullmatch(pattern, output, re.DOTALL)
        assert match or not is_whole, output
        assert not match or all(is_valid(group) for group in match.groups() if group)
    assert len({output for output, is_whole in found if is_whole}) >= least


# A letter, so that free text comes to it soon; a token of its own; a special token.
@pytest.mark.parametrize("trigger", ["e", "<tool_call>", "[TOOL_CALLS]"])
@pytest.mark.parametrize("is_older_form", [True, False])
def test_a_grammar_begins_at_its_trigger(engine, trigger, is_older_form):
    structures = [{"begin": f"{trigger}=", "schema": SCHEMA, "end": "</f>"}]
    triggered = {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": [tag(f"{trigger}=", JSON, "</f>")],
    }
    language: dict[str, Any] = {"type": "structural_tag", "format": triggered}
    if is_older_form:
        language = {"type": "structural_tag", "structures": structures, "triggers": [trigger]}
    token = engine.get_tokenizer().convert_tokens_to_ids(trigger)
    found = texts(engine, json.dumps(language), logit_bias={token: 6.0})
    num_tags = 0
    for output, is_whole in found:
        _, *tagged = re.split(re.escape(trigger) + " ?=", output)
        for i, rest in enumerate(tagged):
            inside, end, after = rest.partition("}</f>")
            assert end or (not is_whole and i == len(tagged) - 1)
            assert not end or is_valid(inside + "}")
            assert trigger not in after.removesuffix(trigger)
            num_tags += bool(end)
    assert num_tags > 5


def test_free_text_ends_where_its_tag_ends(engine):
    (end,) = engine.get_tokenizer().convert_tokens_to_ids(["</think>"])
    found = texts(engine, {"format": sequence(tag("<think>", TEXT, "</think>"), JSON)}, logit_bias={end: 8.0})
    for output, is_whole in found:
        thought, _, answer = output.partition("</think>")
        assert is_whole
        assert thought.startswith("<think>")
        assert is_valid(answer)
    assert len({output for output, _ in found}) == 6


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "structural_tag must be JSON"),
        ([], r'structural_tag must be an object \{"type"'),
        ({"type": "json"}, "structural_tag must be an object"),
        (
            {"format": {"type": "xml"}},
            "format must be an object whose type is one of const_string, json_schema",
        ),
        ({"format": text("a"), "formats": 1}, "did you mean 'format'"),
        ({"format": {**text("a"), "valeu": 1}}, "did you mean 'value'"),
        ({"format": {"type": "const_string"}}, r"format\.value is missing"),
        ({"format": {"type": "regex", "pattern": 1}}, r"format\.pattern must be a string, got 1"),
        (
            {"format": {**JSON, "style": "qwen_xml"}},
            r"format\.style is not supported: the style is always json",
        ),
        ({"format": {"type": "json_schema", "json_schema": 1}}, "must be a JSON schema"),
        ({"format": sequence()}, r"format\.elements must have at least 1 entry"),
        ({"format": sequence(TEXT, text("a"))}, r"format\.elements\[0\] of type any_text must be the last"),
        ({"format": {"type": "star", "content": TEXT}}, r"format\.content of type any_text must be the last"),
        ({"structures": [], "triggers": ["a"]}, "structures must have at least 1 entry"),
        (
            {"structures": [{"begin": "b", "schema": {}, "end": ""}], "triggers": ["a"]},
            "exactly one of the tr",
        ),
        (
            {"structures": [{"begin": "b", "schema": {}, "end": ""}], "triggers": [""]},
            r"triggers\[0\] must be a non-empty string",
        ),
        ({"structures": [{"begin": "b", "schema": {}, "end": ""}]}, "triggers is missing"),
        ({"format": text("a"), "triggers": ["a"]}, "triggers belongs to the older form"),
        ({"format": text("\ud800")}, r"format\.value is not valid Unicode"),
        ({"format": {"type": "tags_with_separator", "tags": [JSON], "separator": ""}}, "must be of type tag"),
    ],
)
def test_a_wrong_tag_is_refused(given, message):
    with pytest.raises(PagedError, match=message):
        StructuredOutputsParams(structural_tag=given)


def test_nesting_is_bounded():
    nested: Any = TEXT
    for _ in range(40):
        nested = either(nested)
    with pytest.raises(RequestError, match="nested deeper than 32"):
        StructuredOutputsParams(structural_tag={"format": nested})


def test_both_forms_are_stored_alike():
    older = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<"]}
    newer = {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": ["<"], "tags": [tag("<a>", JSON, "</a>")]},
    }
    stored = StructuredOutputsParams(structural_tag=older)
    assert stored == StructuredOutputsParams(structural_tag=json.dumps(newer))
    # As when parameters cross to the engine's process.
    assert stored == StructuredOutputsParams(structural_tag=stored.structural_tag)


@pytest.mark.parametrize(
    ("language", "expected"),
    [
        ({"structural_tag": {"format": text("a\x7f")}}, "a\x7f"),
        ({"choice": ["a\x7f"]}, "a\x7f"),
        ({"structural_tag": {"format": {"type": "regex", "pattern": "a\\\n/"}}}, "a\n/"),
    ],
    ids=str,
)
def test_characters_that_grammars_must_escape(engine, language, expected):
    state = engine.core.factory.grammars.start(StructuredOutputsParams(**language))
    tokenizer = engine.get_tokenizer()
    tokens = [i for c in expected for i in tokenizer.encode(c, add_special_tokens=False)]
    assert state.matcher.try_consume_tokens(tokens) == len(tokens)
    assert state.matcher.is_accepting()


@pytest.mark.parametrize(
    "language",
    [
        {"type": "json_schema", "json_schema": {"not": {}}},
        {"type": "regex", "pattern": "("},
        {"type": "grammar", "grammar": "root ::= missing"},
        {"type": "grammar", "grammar": 'start: %json {"type": "integer", "multipleOf": 10007}'},
    ],
    ids=str,
)
def test_a_wrong_grammar_is_an_error_of_its_request(engine, language):
    with pytest.raises(RequestError, match="structured_outputs structural_tag"):
        texts(engine, {"format": language})


def test_texts_of_special_tokens_are_tokens():
    grammar = StructuralGrammar({"<a>": 7, "<a>b": 8}).grammar(text('<a>"<a>b</a>'))
    assert grammar.splitlines()[1] == r'start: <[7]> "\"" <[8]> "</a>"'


def test_numbers_that_were_rounded_are_refused_with_their_key():
    """The body of a request is parsed before a schema is known to be in it."""
    schema = parse_json('{"properties": {"a": {"const": 0.1000000000000000055}}}')
    exact = parse_json(
        '{"properties": {"a": {"const": 0.30000000000000004, "maximum": 1.50000000000000000}}}'
    )
    tagged = {"type": "json_schema", "json_schema": schema}
    for language, param in (
        ({"json": schema}, "json.properties.a.const"),
        ({"structural_tag": {"format": tagged}}, "json_schema.properties.a.const"),
        ({"structural_tag": {"format": {**tagged, "name": "tools[0]"}}}, r"^tools\[0\].properties.a.const"),
    ):
        with pytest.raises(RequestError, match=rf"{param}: 0.1000000000000000055 is not exact"):
            StructuredOutputsParams(**language)
    assert json.loads(StructuredOutputsParams(json=exact).json) == exact
    with pytest.raises(RequestError, match=r"0\.1000000000000000055 is not exact in float64"):
        StructuredOutputsParams(
            structural_tag='{"format":{"type":"json_schema","json_schema":{"const":0.1000000000000000055}}}'
        )
