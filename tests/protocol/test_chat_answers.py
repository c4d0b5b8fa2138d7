"""Answers in each chat format through the APIs: forced, streamed as whole, cut, and from recorded bodies."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from llguidance import LLMatcher

from paged.architectures.hf_config import read_config
from paged.base.errors import PagedError, RequestError
from paged.chat.answer_reader import AnswerReader, TokenText
from paged.chat.chat_format import ChatFormat
from paged.chat.formats import BY_NAME
from paged.chat.harmony import TOKENS
from paged.chat.parts import ChatOutput
from paged.chat.plan import ToolPlan
from paged.chat.writing import written_call
from paged.checkpoints.model_directory import resolve
from paged.engine.model_text import ModelText
from paged.grammars.library_grammar import StructuralGrammar
from paged.options.config import EngineConfig
from paged.options.sampling_params import StructuredOutputsParams
from paged.protocol.answers.chunks import Chunks
from paged.protocol.endpoints import parse_call
from paged.protocol.limits import Limits
from paged.requests.request import CompletionOutput, RequestMetrics, RequestOutput
from paged.text.tokenizer import Tokenizer
from tests.protocol.test_chat_formats import CASES, named
from tests.support.chat_corpus import SCHEMA, TOOLS, examples, joined, plan_of
from tests.support.chat_templates import PUBLISHED
from tests.support.coding_agents import RECORDED
from tests.support.forced_calls import try_one
from tests.support.random_schemas import TOKENIZER, accepts

FUNCTIONS = [tool["function"] for tool in TOOLS]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS},
    "/v1/responses": {"input": "Hi", "tools": [{"type": "function", **tool} for tool in FUNCTIONS]},
    "/v1/messages": {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 999,
        "tools": [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in FUNCTIONS],
    },
}


def output_of(text: str, reason: str | None, stop: str | None = None) -> RequestOutput:
    completion = CompletionOutput(0, text, [5], reason, stop)  # type: ignore[arg-type]
    return RequestOutput("r", "Hi", [1, 2], [completion], reason is not None, 0, RequestMetrics(0.0))


def limits_of(entry: Any, template: str) -> Limits:
    chat = plan_of(entry, template).chat
    return Limits(chat_format=chat, chat_template="plain")


def whole_and_streamed(
    text: Any, path: str, limits: Limits, answer: str, reason: str, stop: str | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the body of an answer, and the events of it character by character."""
    call = parse_call(path, BODIES[path], limits)
    call.prompts(text)
    call.params(text)
    body = call.body([output_of(answer, reason, stop)], "i", 7, "m")
    chunks: Chunks = call.chunks("i", 7, "m")
    first = output_of("", None)
    events = [*chunks.start(0, first)]
    for character in answer:
        events += chunks.add(0, output_of(character, None))
    events += chunks.add(0, output_of("", reason, stop))
    return body, [*events, *chunks.finish()]


def parts_of(path: str, body: dict[str, Any]) -> tuple[str, str, list[tuple[str, str]], Any]:
    """Return content, reasoning, calls and the end of a whole body."""
    if path.endswith("completions"):
        (choice,) = body["choices"]
        message = choice["message"]
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
        return message["content"] or "", message.get("reasoning", ""), calls, choice["finish_reason"]
    if path.endswith("responses"):
        items = body["output"]
        texts = {
            kind: "".join(part["text"] for item in items if item["type"] == kind for part in item["content"])
            for kind in ("message", "reasoning")
        }
        called = [(i["name"], i["arguments"]) for i in items if i["type"] == "function_call"]
        ends = [i["status"] for i in items if i["type"] == "function_call"]
        return texts["message"], texts["reasoning"], called, (body["status"], ends)
    blocks = body["content"]
    said = "".join(block["text"] for block in blocks if block["type"] == "text")
    thought = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    used = [(block["name"], json.dumps(block["input"])) for block in blocks if block["type"] == "tool_use"]
    return said, thought, used, body["stop_reason"]


def streamed_parts(path: str, events: list[dict[str, Any]]) -> tuple[str, str, list[tuple[str, str]], Any]:
    """Return what the events of a stream say."""
    if path.endswith("responses"):
        last = events[-1]["response"]
        deltas = Counter[str]()
        for event in events:
            if event["type"].endswith(".delta"):
                deltas[event["type"]] += 1
        return parts_of(path, last)
    content = reasoning = ""
    calls: list[list[str]] = []
    end = None
    for event in events:
        if path.endswith("messages"):
            delta = event.get("delta", {})
            block = event.get("content_block", {})
            content += delta.get("text", "")
            reasoning += delta.get("thinking", "")
            if block.get("type") == "tool_use":
                calls.append([block["name"], ""])
            if "partial_json" in delta:
                calls[-1][1] += delta["partial_json"]
            end = delta.get("stop_reason") or end
            continue
        for choice in event["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning", "")
            for part in delta.get("tool_calls", []):
                if "id" in part:
                    calls.append([part["function"]["name"], ""])
                calls[-1][1] += part["function"]["arguments"]
            end = choice["finish_reason"] or end
    return content, reasoning, [(name, text) for name, text in calls], end


@pytest.mark.parametrize("case", CASES[::2], ids=named)
@pytest.mark.parametrize("path", BODIES)
def test_a_stream_is_the_whole_answer(text, path, case):
    entry, template = case
    limits = limits_of(entry, template)
    chosen = [*examples(entry, template)]
    for example in [*chosen[1::9], *chosen[-4:]]:
        for answer, reason in (
            (example.text, "stop"),
            (example.text[: len(example.text) * 2 // 3], "length"),
        ):
            body, events = whole_and_streamed(text, path, limits, answer, reason)
            content, reasoning, calls, end = parts_of(path, body)
            found = streamed_parts(path, events)
            assert found[:2] == (content, reasoning)
            assert found[3] == end
            if path.endswith("messages"):  # a block has the members that are whole
                assert [name for name, _ in found[2]] == [name for name, _ in calls]
            else:
                assert found[2] == calls


@pytest.mark.parametrize("name", ["harmony", "hermes", "qwen3_coder", "gemma4", "olmo3", "glm45"])
def test_a_cut_call_is_never_complete(text, name):
    entry = BY_NAME[name]
    limits = limits_of(entry, "")
    example = next(e for e in examples(entry, "") if e.calls and e.calls[0][1] == {"s": "a", "n": 1})
    plan = plan_of(entry)
    cuts = (example.text[:end] for end in range(len(example.text)))
    begun = [cut for cut in cuts if joined(plan.new_parser("Hi"), [cut]).calls]
    answer = begun[len(begun) // 4]
    assert not joined(plan.new_parser("Hi"), [answer]).is_whole
    for reason, stop in (("length", None), ("stop", None), ("stop", "END")):
        ends = {}
        for path in BODIES:
            body, events = whole_and_streamed(text, path, limits, answer, reason, stop)
            ends[path] = parts_of(path, body)
            assert streamed_parts(path, events)[3] == ends[path][3]
            assert ends[path][2], "the call has begun"
            if path.endswith("responses"):
                assert body["incomplete_details"] is not None
        assert ends["/v1/chat/completions"][3] == reason
        assert ends["/v1/responses"][3] == ("incomplete", ["incomplete"])
        expected = "max_tokens" if reason == "length" else ("end_turn" if stop is None else "stop_sequence")
        found = ends["/v1/messages"][3]
        assert found in (expected, "model_context_window_exceeded")
        assert json.loads(ends["/v1/messages"][2][0][1]).keys() <= SCHEMA["properties"].keys()


@pytest.mark.parametrize("case", CASES, ids=named)
def test_forced_calls_match_their_schemas(case):
    found = Counter(try_one(*case, seed) for seed in range(12))
    assert found["called"] > 2, found


def test_a_pattern_within_plain_text_is_refused_by_its_place(text):
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^x+$"}}}
    body = {**BODIES["/v1/responses"], "tool_choice": "required"}
    body["tools"] = [{"type": "function", "name": "f", "parameters": schema}]
    call = parse_call("/v1/responses", body, limits_of(BY_NAME["qwen3_coder"], ""))
    call.prompts(text)
    with pytest.raises(PagedError, match="plain text, of which only the length") as refused:
        call.params(text)
    assert call.param_of(refused.value) == "tools[0].parameters.properties.a.pattern"


@pytest.mark.parametrize("case", CASES, ids=named)
def test_nothing_of_a_forced_call_that_is_cut_is_content(case):
    entry, template = case
    chat = plan_of(entry, template).chat
    plan = ToolPlan.of(chat, tools=TOOLS, tool_choice="required")
    syntax = plan.format.syntax
    called = [("f", '{"s": "a", "n": 1}'), ("get_time", '{"zone": "CET"}')][: 1 if entry.has_channels else 2]
    texts = [written_call(syntax, *call) for call in called]
    text = f"{syntax.section[0]}{syntax.separator.join(texts)}{syntax.section[1]}"
    most = 0
    for end in range(1, len(text) + 1):
        found = joined(plan.new_parser("Hi"), [text[:end]])
        assert joined(plan.new_parser("Hi"), [*text[:end]]) == found
        assert not found.content, text[:end]
        assert [name for name, _ in found.calls] == [name for name, _ in called][: len(found.calls)]
        assert len(found.calls) >= most
        most = len(found.calls)
    assert [(name, json.loads(given)) for name, given in called] == found.calls
    assert found.is_whole


HOSTILE: list[Any] = [
    {"properties": {"a": {"$ref": "#"}}},
    {"properties": {f"p{i}": {"$ref": "#"} for i in range(40)}},
    {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}]}}},
    {"allOf": [{"$ref": "#"}] * 50, "properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}] * 50}}},
    *({"properties": {"a": part}} for part in ({"enum": 5}, {"type": []}, 5, {"anyOf": 5}, {"enum": []})),
    *({"properties": 5}, {"required": 5}, {"minProperties": "x"}, {"properties": {"a>b": {}, "": {}}}),
    {"properties": {"a": {"type": "array", "minItems": "x"}, "b": {"type": "string", "maxLength": -1}}},
]


@pytest.mark.parametrize("name", ["qwen3_coder", "olmo3", "gemma4"])
def test_hostile_schemas_are_written_out_or_refused(name):
    for schema in HOSTILE:
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", **schema}}}]
        plan = ToolPlan.of(plan_of(BY_NAME[name]).chat, tools=tools, tool_choice="required")
        with suppress(RequestError):
            plan.structured_outputs("Hi")
        syntax = plan.format.syntax
        text = syntax.section[0] + written_call(syntax, "f", '{"a": "x", "other": 5}') + syntax.section[1]
        assert joined(plan.new_parser("Hi"), [*text]).is_whole


@pytest.mark.parametrize("name", PUBLISHED)
def test_recorded_bodies_of_agents_are_taken(text, name):
    """A body of each turn of each agent, rendered by the template of each checkpoint."""
    template = PUBLISHED[name].text
    chat = ChatFormat.of(
        tool_call_parser="auto",
        reasoning_parser="auto",
        template=template,
        shows_tools=name != "SmolLM2-135M-Instruct",
    )
    limits = Limits(chat_format=chat, chat_template=template, ignore_builtin_tools=True)
    for recorded in json.loads(RECORDED.read_text()).values():
        for body in recorded["bodies"]:
            if "thread" in body["body"]:  # which the server refuses
                continue
            call = parse_call(body["path"], body["body"], limits)
            (prompt,) = call.prompts(text)
            assert prompt["prompt"]
            call.params(text)


def test_special_tokens_are_told_from_the_same_text(tmp_path):
    """Of Harmony's marks those are read that are tokens; others are text, and stay as they are."""
    tokenizer = tokenizer_with(tmp_path, ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|other|>"])
    ids = tokenizer.special_ids
    plan = plan_of(BY_NAME["harmony"], special_tokens=[*ids])
    spelled = [i for c in "Say <|end|> <|start|>." for i in tokenizer.encode_bare(c)]
    head = [ids["<|channel|>"], *tokenizer.encode_bare("final"), ids["<|message|>"]]
    token_ids = [*head, *spelled, ids["<|other|>"], *tokenizer.encode_bare(" ok"), ids["<|end|>"]]
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in token_ids]
    for size in (1, 2, 5, len(token_ids)):
        tokens = TokenText(tokenizer, plan.markers, is_skipping=True)
        reader = AnswerReader(plan.new_parser("Hi"), tokens)
        parts = []
        for at in range(0, len(token_ids), size):
            end = "stop" if at + size >= len(token_ids) else None
            piece = "".join(texts[at : at + size])
            parts += reader.read(CompletionOutput(0, piece, token_ids[at : at + size], end))
        assert ChatOutput.of(parts).content == "Say <|end|> <|start|>. ok"


def test_structured_output_of_harmony_is_of_the_final_channel_alone():
    chat = plan_of(BY_NAME["harmony"]).chat
    wanted = StructuredOutputsParams(json={"const": "yes"})
    language = ToolPlan.of(chat).structured_outputs("Hi", wanted)
    assert language is not None
    grammar = StructuralGrammar({}).grammar(json.loads(language.structural_tag)["format"])
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    thought = "<|channel|>analysis<|message|>free {text}<|end|><|start|>assistant"
    final = '<|channel|>final<|message|>"yes"'
    assert accepts(matcher, thought + final)
    assert accepts(matcher, final)
    for text in (thought, '"yes"', final.replace("yes", "no"), final.replace("final", "commentary")):
        assert not accepts(matcher, text)


def test_end_tokens_of_a_format_end_an_answer(tmp_path):
    """Also where generation_config.json does not have them."""
    ends = tokenizer_with(tmp_path, [*TOKENS]).special_ids
    directory = resolve("demo")
    text = ModelText(EngineConfig("demo", tokenizer=str(tmp_path)), directory, read_config(directory))
    limits = Limits(
        chat_format=plan_of(BY_NAME["harmony"], special_tokens=TOKENS).chat, chat_template="plain"
    )
    wanted = {ends["<|call|>"], ends["<|return|>"]}
    for given, expected in (
        ({}, wanted),
        ({"stop_token_ids": [7]}, wanted | {7}),
        ({"ignore_eos": True}, set()),
    ):
        call = parse_call("/v1/chat/completions", {**BODIES["/v1/chat/completions"], **given}, limits)
        call.prompts(text)
        params = call.params(text)
        assert {*(params.stop_token_ids or ())} == expected
        assert not params.skip_special_tokens


def tokenizer_with(directory: Any, special: list[str]) -> Tokenizer:
    """Return the demo's tokenizer with more special tokens."""
    import transformers

    from paged.architectures.config import DEMO

    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.save_pretrained(directory)
    return Tokenizer(directory)
