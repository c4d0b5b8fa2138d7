"""ToolPlan: what a request says about tools, and that forced calls always match their schemas."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from paged import ConfigError, LLMEngine, RequestError, SamplingParams, StructuredOutputsParams
from paged.base.errors import PagedError
from paged.chat.chat_format import ChatFormat
from paged.chat.formats import THINK
from paged.chat.parts import ChatOutput, delta_of
from paged.chat.plan import ToolPlan
from paged.chat.tools import MAX_CALLS
from paged.protocol.calls.chat import CHAT_TABLE, ChatCall
from paged.protocol.endpoints import parse_call
from paged.protocol.limits import Limits
from tests.support.chat_checkpoints import SPECIAL_TAGS, chat_checkpoint
from tests.support.checkpoints import new_engine
from tests.support.json_schemas import closed

PLACE = closed({"city": {"enum": ["Rome", "Ulm"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}})
POINT = closed({"at": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}})
SCHEMAS = {"weather": PLACE, "draw": POINT, "stop": {"type": "object", "properties": {}}}


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    function = {"name": name, "description": "Do it.", "parameters": parameters, **more}
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


TOOLS = [tool("weather", PLACE), tool("draw", POINT), tool("stop")]
CHAT, HELLO = "/v1/chat/completions", [{"role": "user", "content": "Hi"}]
STRICT = [tool("weather", PLACE, strict=True), tool("draw", POINT, strict=True), tool("stop", strict=True)]
WEATHER = named("weather")
ONLY_DRAW = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("draw")]}}


def chat_format(parser: str | None, reasoning: str | None = None, *, template: str = "") -> ChatFormat:
    return ChatFormat.of(
        tool_call_parser=parser,
        reasoning_parser=reasoning,
        template=template,
        special_tokens=SPECIAL_TAGS,
    )


FORMATS = {
    "hermes": chat_format("hermes"),
    "llama3_json": chat_format("llama3_json"),
    "mistral": chat_format("mistral", template="[TOOL_CALLS]name[ARGS]{}"),
    "mistral list": chat_format("mistral", template="[TOOL_CALLS] [{}]"),
    "none": chat_format(None),
}


def chat_call(**fields: Any) -> ChatCall:
    call = parse_call(CHAT, {"messages": HELLO, **fields}, Limits(chat_format=FORMATS["hermes"]))
    assert isinstance(call, ChatCall)
    return call


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LLMEngine:
    directory: Path = chat_checkpoint(tmp_path_factory.mktemp("chat"))
    return new_engine(directory, skip_tokenizer_init=False, num_blocks=2048, max_model_len=400)


def answers(
    engine: LLMEngine,
    plan: ToolPlan,
    prompt: str = "Hi",
    wanted: StructuredOutputsParams | None = None,
    **more: Any,
) -> list[tuple[ChatOutput, str, bool]]:
    """Generate at temperature 1. Return the outputs, their texts, and whether they ended by themselves."""
    language = plan.structured_outputs(prompt, wanted)
    params = SamplingParams(
        n=8,
        seed=1,
        structured_outputs=language,
        skip_special_tokens=plan.skip_special_tokens,
        **{"max_tokens": 300, **more},
    )
    (output,) = engine.generate(prompt, params, use_tqdm=False)
    found = []
    for completion in output.outputs:
        parser = plan.new_parser(prompt)
        parts = [*parser.feed(completion.text), *parser.finish()]
        is_whole = completion.finish_reason == "stop"
        assert not is_whole or parser.has_whole_calls or not plan.tools or plan.choice.mode == "auto"
        found.append((ChatOutput.of(parts), completion.text, is_whole))
    return found


def check_calls(output: ChatOutput, *, is_whole: bool = True) -> list[str]:
    """Assert that the arguments of all calls match their schemas, but of the last if it is cut."""
    calls = output.tool_calls if is_whole else output.tool_calls[:-1]
    for call in calls:
        jsonschema.Draft202012Validator(SCHEMAS[call.name]).validate(json.loads(call.arguments))
    return [call.name for call in calls]


@pytest.mark.parametrize("name", FORMATS)
def test_required_calls_match_their_schemas(engine, name):
    plan = ToolPlan.of(FORMATS[name], tools=TOOLS, tool_choice="required")
    found = answers(engine, plan)
    names = []
    for output, _, is_whole in found:
        assert not output.content
        called = check_calls(output, is_whole=is_whole)
        assert called or not is_whole
        names += called
    assert len(set(names)) > 1
    assert sum(is_whole for *_, is_whole in found) > 4
    single = ToolPlan.of(FORMATS[name], tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert [len(check_calls(output)) for output, *_ in answers(engine, single)] == [1] * 8
    for choice, expected in ((WEATHER, ["weather"]), (ONLY_DRAW, ["draw"])):
        plan = ToolPlan.of(FORMATS[name], tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
        assert all(check_calls(output) == expected for output, *_ in answers(engine, plan))


BEGUN = {  # after these texts a model that may call goes on as it likes
    "hermes": "<tool_call>",
    "llama3_json": "{",
    "mistral": "[TOOL_CALLS]",
    "mistral list": "[TOOL_CALLS]",
}


@pytest.mark.parametrize("name", BEGUN)
def test_strict_calls_match_their_schemas_and_text_is_free(engine, name):
    plan = ToolPlan.of(FORMATS[name], tools=STRICT)
    tokenizer = engine.get_tokenizer()
    start = tokenizer.encode(BEGUN[name], add_special_tokens=False)
    # So likely that the model soon calls, and may call in any format that the grammar allows.
    (first,) = start if len(start) == 1 else tokenizer.encode("{", add_special_tokens=False)
    found = answers(engine, plan, logit_bias={first: 12.0}, max_tokens=90)
    names = [called for output, _, is_whole in found for called in check_calls(output, is_whole=is_whole)]
    assert len(names) > 4
    assert any(
        not output.tool_calls
        for output, *_ in answers(engine, plan, logit_bias={first: -100.0}, max_tokens=60)
    )
    single = ToolPlan.of(FORMATS[name], tools=TOOLS, parallel_tool_calls=False)
    counts = {
        len(output.tool_calls)
        for output, *_ in answers(engine, single, logit_bias={first: 12.0}, max_tokens=90)
    }
    assert counts <= {0, 1}
    assert 1 in counts


def test_without_need_an_answer_is_not_constrained():
    plan = ToolPlan.of(FORMATS["hermes"], tools=TOOLS)
    assert plan.structured_outputs("Hi") is None
    assert plan.template_tools == TOOLS
    plan = ToolPlan.of(FORMATS["hermes"], tools=STRICT, tool_choice="none")
    assert plan.structured_outputs("Hi") is None
    assert plan.template_tools is None
    assert not plan.parses
    assert ChatOutput.of(plan.new_parser("Hi").feed(" <tool_call>")).content == " <tool_call>"


def test_content_of_a_response_format_or_calls(engine):
    wanted = StructuredOutputsParams(json=closed({"answer": {"type": "boolean"}}))
    plan = ToolPlan.of(FORMATS["hermes"], tools=TOOLS, parallel_tool_calls=False)
    kinds = set()
    for output, _, is_whole in answers(engine, plan, "Hi", wanted):
        assert is_whole
        kinds.add(bool(check_calls(output)))
        assert output.tool_calls or json.loads(output.content).keys() == {"answer"}
    assert kinds == {False, True}
    with pytest.raises(RequestError, match="tool_choice demands a tool call"):
        ToolPlan.of(FORMATS["hermes"], tools=TOOLS, tool_choice="required").structured_outputs("Hi", wanted)


@pytest.mark.parametrize(
    ("prompt", "reasons"),
    [("Hi <think>\n", {True}), ("Hi", {True, False}), ("<think>\n\n</think>\n", {False})],
)
def test_a_grammar_applies_after_reasoning(engine, prompt, reasons):
    plan = ToolPlan.of(chat_format("hermes", "qwen3"), tools=TOOLS, tool_choice=WEATHER)
    (end, start) = (engine.get_tokenizer().convert_tokens_to_ids(tag) for tag in ("</think>", "<think>"))
    found = answers(engine, plan, prompt, logit_bias={end: 9.0, start: 0.5})
    for output, text, is_whole in found:
        assert is_whole
        assert not output.content
        assert check_calls(output) == ["weather"]
        assert ("</think>" in text) in reasons
    assert {"</think>" in text for _, text, _ in found} == reasons
    plain = ToolPlan.of(chat_format(None, "qwen3"))
    yes = {"type": "const_string", "value": "yes"}
    for language in (
        {"choice": ["yes", "yes"]},
        {"regex": "yes"},
        {"grammar": 'root ::= "yes"'},
        {"json": {"const": "yes"}},
        {"structural_tag": {"format": yes}},
    ):
        wanted = StructuredOutputsParams(**language)
        for output, *_ in answers(engine, plain, prompt, wanted, logit_bias={end: 9.0}):
            assert output.content.strip('"') == "yes"


def test_deepseek_reasons_unless_the_prompt_says_otherwise():
    chat = chat_format(None, "deepseek_r1")
    assert chat.is_in_reasoning("<｜Assistant｜>")
    assert not chat.is_in_reasoning("<｜Assistant｜></think>")
    assert not chat.is_in_reasoning("<｜Assistant｜>The answer is", continues_answer=True)
    assert chat.is_in_reasoning("<｜Assistant｜><think>Well", continues_answer=True)
    parser = ToolPlan.of(chat).new_parser("<｜Assistant｜>")
    message = ChatOutput.of([*parser.feed("Well.\n</think>\nYes"), *parser.finish()]).message()
    assert message["reasoning"] == message["reasoning_content"] == "Well."
    assert message["content"] == "Yes"


# What each format forces for two calls, one after the other.
FORCED = {
    "hermes": '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>\n'
    '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>',
    "llama3_json": '{{"name": "{}", "parameters": {}}}; {{"name": "{}", "parameters": {}}}',
    "mistral": "[TOOL_CALLS]{}[ARGS]{}[TOOL_CALLS]{}[ARGS]{}",
    "mistral list": '[TOOL_CALLS] [{{"name": "{}", "arguments": {}}}, {{"name": "{}", "arguments": {}}}]',
    "none": '[{{"name": "{}", "arguments": {}}}, {{"name": "{}", "arguments": {}}}]',
}


@pytest.mark.parametrize("reasons", [False, True], ids=["", "after reasoning"])
@pytest.mark.parametrize(
    "names", [["weather", "weather_of", "stop"], ["name"]], ids=["three tools", "one tool"]
)
@pytest.mark.parametrize("name", FORMATS)
def test_a_forced_call_that_is_cut_is_a_call_as_far_as_it_goes(name, names, reasons):
    """Cut anywhere, fed whole and in parts: never content, and a call as soon as its name is certain."""
    plan = ToolPlan.of(
        replace(FORMATS[name], reasoning=THINK if reasons else None),
        tools=[tool(each) for each in names],
        tool_choice="required",
    )
    called = [names[-1], names[0]]
    arguments = ['{"at": "Ås", "name": "stop"}', "{}"]
    before = "<think>\nWhy?\n</think>\n\n" if reasons else ""
    text = before + FORCED[name].format(called[0], arguments[0], called[1], arguments[1])
    # Behind the names, where each is certain; the only tool must come.
    certain = [text.index(arguments[0]), text.rindex(arguments[1])]
    most = 0
    for end in range(len(before) + 1, len(text) + 1):
        found = []
        for size in (end, 1, 7):
            parser = plan.new_parser("Hi")
            pieces = [text[at : min(at + size, end)] for at in range(0, end, size)]
            parts = [part for piece in pieces for part in parser.feed(piece)]
            output = ChatOutput.of([*parts, *parser.finish()])
            found.append([(call.name, call.arguments) for call in output.tool_calls])
            assert (output.content, output.reasoning) == ("", "Why?" if reasons else "")
        assert found == [found[0]] * 3
        calls = found[0]
        for (one, given), known, whole in zip(calls, called, arguments, strict=False):
            assert one == known
            assert whole.startswith(given)
        assert most <= len(calls) <= 2
        most = len(calls)
        assert len(calls) >= sum(at <= end for at in certain)
        assert len(calls) >= 1 or len(names) > 1
        assert len(calls) < 2 or end > text.index(arguments[0]) + len(arguments[0])
        assert parser.has_whole_calls == all(given in arguments for _, given in calls) * bool(calls)
    assert calls == [*zip(called, arguments, strict=True)]


def test_arguments_of_a_forced_call_that_stop_being_json_lose_nothing():
    plan = ToolPlan.of(FORMATS["none"], tools=TOOLS, tool_choice="required")
    deep = "[" * 70
    parser = plan.new_parser("Hi")
    parts = parser.feed(f'[{{"name": "stop", "arguments": {{"a": {deep}') + parser.finish()
    output = ChatOutput.of(parts)
    assert output.tool_calls[0].arguments + output.content == f'{{"a": {deep}'


def test_special_tokens_stay_where_calls_need_them():
    assert not ToolPlan.of(FORMATS["mistral"], tools=TOOLS).skip_special_tokens
    assert ToolPlan.of(FORMATS["mistral"]).skip_special_tokens
    assert ToolPlan.of(FORMATS["hermes"], tools=TOOLS).skip_special_tokens


def test_messages_and_deltas_have_the_form_of_openai():
    plan = ToolPlan.of(FORMATS["mistral"], tools=TOOLS)
    parser = plan.new_parser("Hi")
    parts = [*parser.feed('Sure. [TOOL_CALLS]draw[ARGS]{"at": [true]}'), *parser.finish()]
    message = ChatOutput.of(parts).message()
    (call,) = message["tool_calls"]
    assert len(call["id"]) == 9
    assert call["id"].isalnum()
    assert call == {
        "id": call["id"],
        "type": "function",
        "function": {"name": "draw", "arguments": '{"at": [true]}'},
    }
    assert message["content"] == "Sure."
    content, start, *arguments = map(delta_of, parts)
    assert content == {"content": "Sure."}
    assert start == {"tool_calls": [{**call, "index": 0, "function": {"name": "draw", "arguments": ""}}]}
    assert arguments == [{"tool_calls": [{"index": 0, "function": {"arguments": '{"at": [true]}'}}]}]


FUNCTION = "tools[0].function"
NAMED = "tool_choice.allowed_tools.tools[0].function"
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": {}}, "tools", "tools must be a list"),
    ({"tools": [tool("a")] * 2}, "tools[1].function.name", "is that of another tool, too: 'a'"),
    ({"tools": [tool(f"t{i}") for i in range(129)]}, "tools", "tools has 129 entries; 128 is the most"),
    (
        {"tools": [tool("a"), {"type": "retrieval"}]},
        "tools[1].type",
        "tools[1].type must be one of 'function'",
    ),
    ({"tools": [{"type": "function"}]}, FUNCTION, "tools[0].function is missing"),
    ({"tools": [tool("a b")]}, f"{FUNCTION}.name", "must be 1 to 64 letters"),
    ({"tools": [tool("a" * 65)]}, f"{FUNCTION}.name", "must be 1 to 64 letters"),
    (
        {"tools": [tool("a"), tool("b", {"type": "array"})]},
        "tools[1].function.parameters",
        "tools[1].function.parameters must be a JSON schema of type object",
    ),
    ({"tools": [tool("a", {"a": "\ud800"})]}, f"{FUNCTION}.parameters", "parameters.a is not valid Unicode"),
    ({"tools": [tool("a", strict=1)]}, f"{FUNCTION}.strict", "strict must be True or False"),
    ({"tools": [tool("a", paramters={})]}, f"{FUNCTION}.paramters", "did you mean 'parameters'"),
    ({"tool_choice": "required"}, "tool_choice", "tool_choice 'required' needs tools"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", 'tool_choice must be "none" | "auto"'),
    (
        {"tools": TOOLS, "tool_choice": tool("draw")},
        "tool_choice.function.description",
        "tool_choice.function got an unknown argument 'description'",
    ),
    (
        {
            "tools": TOOLS,
            "tool_choice": {**ONLY_DRAW, "allowed_tools": {"mode": "auto", "tools": [], "x": 1}},
        },
        "tool_choice.allowed_tools.tools",
        "must have at least 1 entry",
    ),
    (
        {"tools": TOOLS, "tool_choice": named("other")},
        "tool_choice.function.name",
        "tool_choice names 'other', which is not one of the tools weather, draw, stop",
    ),
    (
        {
            "tools": TOOLS,
            "tool_choice": {**ONLY_DRAW, "allowed_tools": {"mode": "auto", "tools": [named("x")]}},
        },
        f"{NAMED}.name",
        "allowed_tools.tools[0] names 'x'",
    ),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls", "must be True or False"),
]


@pytest.mark.parametrize(("fields", "param", "message"), WRONG, ids=lambda value: str(value)[:60])
def test_wrong_fields_are_named(fields, param, message):
    with pytest.raises(PagedError) as refused:
        chat_call(**fields)
    assert message in str(refused.value)
    assert refused.value.param == param
    validator = jsonschema.Draft202012Validator(CHAT_TABLE.schema())
    # Names that must agree are no part of a schema.
    is_valid = validator.is_valid({"messages": HELLO, **fields})
    assert is_valid == any(words in message for words in ("needs tools", "names ", "another tool", "Unicode"))


def test_the_template_sees_the_tools_as_they_are_given():
    given = [tool("a", PLACE, strict=True), tool("b")]
    del given[1]["function"]["description"]
    given[1]["function"]["parameters"] = None
    (prompt,) = (plan.template_tools for plan in [chat_call(tools=given)._plan])
    assert prompt == [given[0], {"type": "function", "function": {"name": "b"}}]


@pytest.mark.parametrize("reasoning", [None, "qwen3"])
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_an_impossible_schema_is_named_by_its_path(engine, reasoning, choice):
    """Fewer tools may be called than the request has. Their schemas are parts of one grammar."""
    tools = [
        tool("a", POINT, strict=True),
        tool("b", PLACE, strict=True),
        tool("c", {"type": "object", "properties": {"x": {"not": {}}}}, strict=True),
    ]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": choice, "tools": [named("b"), named("c")]}}
    limits = Limits(chat_format=chat_format("hermes", reasoning), trust_chat_template=True)
    body = {"messages": HELLO, "tools": tools, "tool_choice": allowed, "chat_template": "Hi{{ x }}"}
    call = parse_call(CHAT, body, limits)
    with pytest.raises(
        RequestError, match=r"^tools\[2\]\.function\.parameters\.properties\.x: .*not"
    ) as refused:
        engine.add_request("r", call.prompts(engine.text)[0], call.params(engine.text))
    assert refused.value.param == "tools[2].function.parameters.properties.x"
    assert call.param_of(refused.value) == refused.value.param


def test_an_impossible_schema_is_an_error_of_its_request(engine):
    plan = ToolPlan.of(FORMATS["hermes"], tools=[tool("a", {"not": {}})], tool_choice="required")
    with pytest.raises(RequestError, match=r"tools\[0\]\.function\.parameters: .*not") as refused:
        answers(engine, plan)
    assert "|" not in str(refused.value)  # no excerpt of a grammar that the request did not write


def test_auto_needs_the_options_of_the_server():
    off = ChatFormat.of(tool_call_parser="hermes", enable_auto_tool_choice=False)
    with pytest.raises(RequestError, match="turned off by --no-auto-tool-choice"):
        ToolPlan.of(off, tools=TOOLS)
    with pytest.raises(ConfigError, match=r"reasoning_parser must be one of harmony, .*got 'x'"):
        ChatFormat.of(reasoning_parser="x")
    with pytest.raises(ConfigError, match=r"tool_call_parser must be one of harmony, .*got 'y'"):
        ChatFormat.of(tool_call_parser="y")


def test_tools_of_an_unknown_format_are_shown_and_answers_are_content():
    plan = ToolPlan.of(FORMATS["none"], tools=TOOLS)
    assert plan.template_tools == TOOLS
    assert not plan.parses
    assert plan.structured_outputs("Hi") is None


def allows(engine: LLMEngine, plan: ToolPlan, text: str, prompt: str = "Hi") -> bool:
    """Return whether the grammar of an answer allows a text, written as ordinary tokens."""
    language = plan.structured_outputs(prompt)
    assert language is not None
    state = engine.core.factory.grammars.start(language)
    tokenizer = engine.get_tokenizer()
    tokens = [i for c in text for i in tokenizer.encode(c, add_special_tokens=False)]
    return state.matcher.try_consume_tokens(tokens) == len(tokens) and state.matcher.is_accepting()


@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
def test_a_constrained_answer_may_reason(engine, name):
    chat = chat_format(name, "qwen3")
    plan = ToolPlan.of(chat, tools=STRICT, parallel_tool_calls=False)
    tokenizer = engine.get_tokenizer()
    think, end, call = tokenizer.convert_tokens_to_ids(["<think>", "</think>", "<tool_call>"])
    (brace,) = tokenizer.encode("{", add_special_tokens=False)
    bias = {think: 30.0, end: 16.0, call if name == "hermes" else brace: 12.0}
    found = answers(engine, plan, logit_bias=bias, max_tokens=120)
    assert all(text.startswith("<think>") for _, text, _ in found)
    calls = [called for output, _, whole in found for called in check_calls(output, is_whole=whole)]
    assert calls


def test_no_text_becomes_a_call_that_is_not_strict(engine):
    """Ordinary tokens may spell a tag, and blanks or reasoning may precede a call."""
    call = '{"name": "weather", "parameters": {"no": 1}}'
    llama = ToolPlan.of(chat_format("llama3_json", "qwen3"), tools=STRICT)
    for text in (call, "\n" + call, f"<think>x</think>{call}", f"Well <|python_tag|>{call}", "<think>x"):
        assert not allows(engine, llama, text), text
    # The parser reads only JSON's blanks.
    assert allows(engine, llama, "\x1c" + call)
    assert not ChatOutput.of(llama.new_parser("Hi").feed("\x1c" + call)).tool_calls
    assert allows(engine, llama, "a <b> { call")
    mistral = ToolPlan.of(FORMATS["mistral"], tools=STRICT)
    assert not allows(engine, mistral, 'Well [TOOL_CALLS]weather[ARGS]{"no": 1}')
    assert allows(engine, mistral, "Well [TOOL_CALL] {")


CALL = '{"name": "stop", "arguments": {}}'
CALLS = {  # what is before the calls, a call, what is between them, and what is after
    "hermes": ("", f"<tool_call>\n{CALL}\n</tool_call>", "\n", ""),
    "llama3_json": ("", '{"name": "stop", "parameters": {}}', "; ", ""),
    "mistral": ("", "[TOOL_CALLS]stop[ARGS]{}", "", ""),
    "mistral list": ("[TOOL_CALLS] [", CALL, ", ", "]"),
    "none": ("[", CALL, ", ", "]"),
}


@pytest.mark.parametrize(
    ("name", "choice"), [*((n, "required") for n in FORMATS), *((n, "auto") for n in FORMATS if n != "none")]
)
def test_calls_are_bounded(engine, name, choice):
    page = Path(__file__).parents[2] / "docs" / "tool-calls.md"
    assert f"at most {MAX_CALLS} calls" in page.read_text()
    plan = ToolPlan.of(FORMATS[name], tools=[tool("stop", closed({}), strict=True)], tool_choice=choice)
    before, call, between, after = CALLS[name]
    for num_calls in (1, MAX_CALLS, MAX_CALLS + 1):
        state = engine.core.factory.grammars.start(plan.structured_outputs("Hi"))
        text = before + between.join([call] * num_calls) + after
        tokens = engine.get_tokenizer().encode(text, add_special_tokens=False)
        is_whole = state.matcher.try_consume_tokens(tokens) == len(tokens) and state.matcher.is_accepting()
        assert is_whole == (num_calls <= MAX_CALLS), text
