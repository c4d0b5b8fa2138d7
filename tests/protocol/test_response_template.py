"""Answers are read as the checkpoint's own response_template says, through transformers."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paged import CheckpointError, ConfigError, RequestError
from paged.protocol.chat_output.chat_format import ChatFormat
from paged.protocol.chat_output.parts import ChatOutput
from paged.protocol.chat_output.plan import ToolPlan
from paged.protocol.chat_output.response_template import ResponseTemplate

WRAPPED = {"type": "function", "function": "{content}"}
# Of two families: JSON in tags after reasoning, and parameters in tags of their own.
JSON_IN_TAGS = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": WRAPPED,
        },
        "content": {"content": "text"},
    },
}
PARAMETERS_IN_TAGS = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<function=(?P<name>[^>\n]+)>",
            "close": "</function>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>(?P<value>.*?)</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"content": "text"},
    },
}
PROMPT = "<|im_start|>user\nHi <think><|im_end|>\n<|im_start|>assistant\n"
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]


def chat_format(directory: Path, template: Any) -> ChatFormat:
    (directory / "tokenizer_config.json").write_text(json.dumps({"response_template": template}))
    return ChatFormat.of(
        tool_call_parser="response_template", enable_auto_tool_choice=True, directory=directory
    )


def read(plan: ToolPlan, text: str, prompt: str) -> tuple[str, str, list[tuple[str, Any]]]:
    def joined(pieces: list[str]) -> ChatOutput:
        parser = plan.new_parser(prompt)
        parts = [*itertools.chain.from_iterable(map(parser.feed, pieces)), *parser.finish()]
        assert parser.has_whole_calls == any(ChatOutput.of(parts).tool_calls)
        return ChatOutput.of(parts)

    whole, by_character = joined([text]), joined([*text])
    calls = [(call.name, json.loads(call.arguments)) for call in whole.tool_calls]
    assert calls == [(call.name, json.loads(call.arguments)) for call in by_character.tool_calls]
    assert (whole.content, whole.reasoning) == (by_character.content, by_character.reasoning)
    return whole.content, whole.reasoning, calls


CALL = '<tool_call>\n{"name": "f", "arguments": {"n": 1, "s": "ü"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Yes. \n", ("Yes.", "", [])),
        (f"<think>\nHm.\n</think>\n\nSo: \n{CALL}\n{CALL}", ("So:", "Hm.", [("f", {"n": 1, "s": "ü"})] * 2)),
        ('<tool_call>{"name": "f"}</tool_call>', ("", "", [("f", {})])),
        ('a<tool_call>{"name": "g"}</tool_call>', ('a{"name": "g"}</tool_call>', "", [])),
        ('a<tool_call>{"name" "f"}</tool_call>b', ('a{"name" "f"}</tool_call>b', "", [])),
        ('<tool_call>{"name": "f", "arguments": {"n": NaN}}</tool_call>', None),
        (f'<tool_call>{{"name": "f", </tool_call>{CALL}', None),
        ('<tool_call>{"name": "f", "argu', ('{"name": "f", "argu', "", [])),
    ],
)
def test_json_in_tags(tmp_path, text, expected):
    plan = ToolPlan.of(chat_format(tmp_path, JSON_IN_TAGS), tools=TOOLS)
    content, reasoning, calls = read(plan, text, PROMPT)
    if expected is not None:
        assert (content, reasoning, calls) == expected
    else:
        assert content.startswith('{"name": "f", ')
        assert len(calls) == text.count(CALL)


def test_parameters_in_tags_get_the_types_of_the_schema(tmp_path):
    plan = ToolPlan.of(chat_format(tmp_path, PARAMETERS_IN_TAGS), tools=TOOLS)
    text = "Sure.<function=f><parameter=n>3</parameter><parameter=s>3</parameter></function>"
    assert read(plan, text, PROMPT) == ("Sure.", "", [("f", {"n": 3, "s": "3"})])


def test_reasoning_that_the_prompt_began_is_read_without_tools(tmp_path):
    plan = ToolPlan.of(chat_format(tmp_path, JSON_IN_TAGS))
    assert plan.parses
    assert not plan.skip_special_tokens
    assert read(plan, "Hm.</think> Yes.", PROMPT + "<think>\n") == ("Yes.", "Hm.", [])


def test_what_the_template_cannot_do_is_said(tmp_path):
    chat = chat_format(tmp_path, JSON_IN_TAGS)
    plan = ToolPlan.of(chat, tools=TOOLS, parallel_tool_calls=False)
    with pytest.raises(RequestError, match="how to read tool calls, not how to constrain them"):
        plan.structured_outputs(PROMPT)
    required = ToolPlan.of(chat, tools=TOOLS, tool_choice="required")  # written as a JSON list
    assert required.structured_outputs(PROMPT) is not None
    assert read(required, '[{"name": "f", "arguments": {"n": 1}}]', PROMPT) == ("", "", [("f", {"n": 1})])
    with pytest.raises(ConfigError, match="finds reasoning itself"):
        ChatFormat.of(tool_call_parser="response_template", reasoning_parser="qwen3", directory=tmp_path)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no response_template"),
        ({**JSON_IN_TAGS, "fields": {}}, "response_template is wrong: .*non-empty dict"),
        ({**JSON_IN_TAGS, "fields": {"content": {"open_pattern": "("}}}, "response_template is wrong"),
        ({**JSON_IN_TAGS, "fields": {"score": {"content": "int"}}}, "a field 'score'; content, reasoning_"),
    ],
)
def test_a_wrong_template_is_an_error_at_the_start(tmp_path, template, message):
    with pytest.raises(CheckpointError, match=message):
        chat_format(tmp_path, template)


def test_the_front_end_does_without_torch(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"response_template": JSON_IN_TAGS}))
    code = (
        "import sys; from pathlib import Path; from paged.protocol.chat_output import chat_format, plan; "
        "options = {'tool_call_parser': 'response_template', 'directory': Path(sys.argv[1])}; "
        "chat_format.ChatFormat.of(**options); sys.exit('torch' in sys.modules)"
    )
    assert ResponseTemplate.of(tmp_path)
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_stop_strings_know_the_reasoning(tmp_path):
    plan = ToolPlan.of(chat_format(tmp_path, JSON_IN_TAGS))
    assert plan.reasoning_tags(PROMPT) == ("<think>", "</think>")
    assert plan.reasoning_tags(PROMPT + "<think>\n") == ("", "</think>")
    assert plan.reasoning_tags(PROMPT + "<think>\n</think>") == ("<think>", "</think>")
    plan = ToolPlan.of(chat_format(tmp_path, PARAMETERS_IN_TAGS))
    assert plan.reasoning_tags(PROMPT) is None
