"""What a chat template makes of a conversation reaches the model as it is meant; answers are messages."""

from __future__ import annotations

import logging
import random
import re
from pathlib import Path
from typing import Any

import pytest

from paged import LLMEngine, SamplingParams
from paged.chat.chat_format import ChatFormat
from paged.text.marked_text import MarkedText, pattern_of
from tests.support.chat_checkpoints import chat_checkpoint
from tests.support.chat_templates import PUBLISHED
from tests.support.checkpoints import new_engine
from tests.text.test_chat_template import CHATML

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LLMEngine:
    directory: Path = chat_checkpoint(tmp_path_factory.mktemp("chat"), CHATML)
    return new_engine(directory, skip_tokenizer_init=False, num_blocks=256, max_model_len=400)


def ids_of(engine: LLMEngine, messages: list[dict[str, Any]], **template: Any) -> list[int]:
    return engine.prompts.parse(engine.render_chat(messages, **template)).token_ids


@pytest.mark.parametrize("name", PUBLISHED)
def test_tokens_are_those_of_the_template_unless_a_user_writes_markers(engine, name):
    """Of the template of each checkpoint, with a history of calls and their results."""
    template = PUBLISHED[name].text
    function = {"name": "f", "arguments": {"s": "é [ARGS]"}}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "What is é < 3 [x]?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "no"},
    ]
    talk = talk[:1] if name.startswith("SmolLM2") else talk
    hf = engine.get_tokenizer()
    options = {"tools": [TOOL], "chat_template": template}
    if name.startswith("SmolLM2"):
        options["tools"] = None
    expected = hf.apply_chat_template(talk, add_generation_prompt=True, return_dict=False, **options)
    assert ids_of(engine, talk, **options) == expected
    for word in ("[TOOL_CALLS]", "<tool_call>", "a<think>b</think>"):
        marked = [{**message} for message in talk]
        for message in marked:
            if message["role"] != "assistant":
                message["content"] += f" {word} end"
        found = ids_of(engine, marked, **options)
        added = hf.get_added_vocab().values()
        assert [i for i in found if i in added] == [i for i in expected if i in added]
        text = hf.apply_chat_template(marked, add_generation_prompt=True, tokenize=False, **options)
        assert hf.decode(found) == hf.decode(hf.encode(text, add_special_tokens=False))


def test_markers_are_found_as_by_plain_alternatives():
    choose = random.Random(1)
    markers = {"".join(choose.choices("<ab|>", k=choose.randrange(1, 6))) for _ in range(60)}
    plain = re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))
    for _ in range(500):
        text = "".join(choose.choices("<ab|>x", k=30))
        assert pattern_of(markers).findall(text) == plain.findall(text)
    nested = ["a" * length for length in range(1, 200)]
    assert [*map(len, pattern_of(nested).findall(f"xaaax{'a' * 150}"))] == [3, 150]
    assert pattern_of([" ", ""]).search(" ") is None


def test_a_marker_in_a_system_message_is_the_operators(engine):
    prompt = engine.render_chat(
        [{"role": "system", "content": "[TOOL_CALLS]"}, {"role": "user", "content": "x"}]
    )
    assert not isinstance(prompt["prompt"], MarkedText)


def test_messages_of_one_role_are_one_turn_where_the_template_demands_it(engine):
    talk = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    texts = "{{ m.content if m.content is string else m.content | map(attribute='text') | join('+') }}"
    template = STRICT.replace("{{ m.content }}", texts)
    assert engine.render_chat(talk, chat_template=template)["prompt"] == (
        "<user>a\nb\n<assistant>c\n<user>d\n\ne\n"
    )
    free = engine.render_chat(talk[:1] * 2, chat_template=CHATML)["prompt"]
    assert free.count("<|im_start|>user") == 2


def test_templates_of_harmony_get_calls_one_by_one(engine):
    def call(name: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}

    talk = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "Let me.", "reasoning": "Hm.", "tool_calls": [call("a"), call("b")]},
        {"role": "tool", "tool_call_id": "b", "content": "of b"},
        {"role": "tool", "tool_call_id": "a", "content": "of a"},
    ]
    text = engine.render_chat(talk, chat_template=PUBLISHED["gpt-oss-20b"].text)["prompt"]
    steps = ["analysis<|message|>Hm.\n\nLet me.", "to=functions.b", '"of b"', "to=functions.a", '"of a"']
    places = [text.index(step) for step in steps]
    assert places == sorted(places)
    assert text.count("analysis") == 1


def test_answers_are_messages(engine):
    only = '<think>\nHm.\n</think>\n\nOk.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    from paged import StructuredOutputsParams

    params = SamplingParams(max_tokens=200, structured_outputs=StructuredOutputsParams(choice=[only]))
    template = PUBLISHED["Qwen3-8B"].text
    (output,) = engine.chat(
        [{"role": "user", "content": "Hi"}], params, tools=[TOOL], chat_template=template, use_tqdm=False
    )
    (completion,) = output.outputs
    assert completion.text == only
    message = completion.message
    assert message is not None
    assert (message["content"], message["reasoning"]) == ("Ok.", "Hm.")
    (called,) = message["tool_calls"]
    assert called["function"] == {"name": "f", "arguments": "{}"}
    (plain,) = engine.generate("Hi", SamplingParams(max_tokens=1), use_tqdm=False)
    assert plain.outputs[0].message is None


def test_tools_that_a_template_does_not_show_are_described(engine):
    params = SamplingParams(max_tokens=1)
    template = PUBLISHED["SmolLM2-135M-Instruct"].text
    talk = [{"role": "user", "content": "Hi"}]
    (output,) = engine.chat(talk, params, tools=[TOOL], chat_template=template, use_tqdm=False)
    assert "# Tools" in (output.prompt or "")


def test_the_log_says_which_format_and_why(engine, caplog):
    with caplog.at_level(logging.INFO, "paged"):
        ChatFormat.of_model(engine.text, chat_template=PUBLISHED["Qwen3-Coder-30B-A3B"].text)
    (message,) = [text for text in caplog.messages if "tool calls" in text]
    assert "format qwen3_coder (the chat template has <function=" in message
    assert "hermes would fit, too" in message
    caplog.clear()
    shows = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"
    with caplog.at_level(logging.INFO, "paged"):
        found = ChatFormat.of_model(engine.text, chat_template=shows)
    assert found.tools is None
    assert any("fits no format of tool calls" in text for text in caplog.messages)
