"""The table of chat formats: what models write is read at any split, rendered history is read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paged.chat.chat_format import ChatFormat
from paged.chat.formats import BY_NAME, CHAT_FORMATS, MARKERS, formats_of, reasoning_of
from paged.chat.plan import ToolPlan
from paged.chat.tool_format import ToolFormat
from paged.text.chat_template import ChatTemplates
from tests.support.chat_corpus import TOOLS, all_cases, examples, joined, plan_of
from tests.support.chat_templates import PUBLISHED

CASES = all_cases()


def named(case) -> str:
    entry, template = case
    return f"{entry.name} {template}".strip()


@pytest.mark.parametrize("case", CASES, ids=named)
def test_answers_are_read_at_every_split(case):
    entry, template = case
    plan = plan_of(entry, template)
    count = 0
    for example in examples(entry, template):
        text = example.text
        whole = joined(plan.new_parser("Hi"), [text])
        assert whole == example
        assert joined(plan.new_parser("Hi"), [*text]) == whole
        marks = [
            at for word in MARKERS for at in (text.find(word), text.find(word) + len(word) // 2) if at > 0
        ]
        for at in {*marks, len(text) // 3, len(text) - 1}:
            assert joined(plan.new_parser("Hi"), [text[:at], text[at:]]) == whole
        count += 1
    assert count >= 30


@pytest.mark.parametrize("case", CASES, ids=named)
def test_an_answer_that_is_cut_anywhere(case):
    """Streamed as whole; a call that is cut is never whole, and what was passed on stays as it was."""
    entry, template = case
    plan = plan_of(entry, template)
    for example in [*examples(entry, template)][1:9:3]:
        text = example.text
        for end in range(len(text)):
            cut = joined(plan.new_parser("Hi"), [text[:end]])
            assert joined(plan.new_parser("Hi"), [*text[:end]]) == cut
            for (name, arguments), whole in zip(cut.calls, example.calls, strict=False):
                assert name == whole[0]
                assert not cut.is_whole or arguments == whole[1]


def test_the_files_examples():
    """Forms that a family also writes, or writes wrongly."""
    for entry in CHAT_FORMATS:
        file = Path(__file__).parent / "chat_formats" / f"{entry.name}.json"
        for example in json.loads(file.read_text()):
            plan = plan_of(entry)
            expected = (example.get("content", ""), example.get("reasoning", ""), example.get("calls", []))
            for pieces in ([example["text"]], [*example["text"]]):
                found = joined(plan.new_parser(example.get("prompt", "Hi")), pieces)
                assert (found.content, found.reasoning, [[*call] for call in found.calls]) == expected, (
                    example
                )
                assert found.is_whole == example.get("is_whole", bool(found.calls)), example


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_format_is_told_by_the_template(name):
    published = PUBLISHED[name]
    found = formats_of(published.text)
    shows_tools = name != "SmolLM2-135M-Instruct"
    chat = ChatFormat.of(
        tool_call_parser="auto", reasoning_parser="auto", template=published.text, shows_tools=shows_tools
    )
    assert chat.tools is not None
    assert chat.tools.name == published.calls
    reasoning = reasoning_of(published.text, found[0] if found else None)
    assert (None if reasoning is None else reasoning.name) == published.reasoning


CALLS = [("f", {"s": 'a "b"\nc', "n": 2}), ("get_time", {"zone": "CET"})]


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_the_template_renders_is_read_back(name):
    """Calls and reasoning of a history; of gpt-oss one call, as an answer has one."""
    published = PUBLISHED[name]
    if name == "SmolLM2-135M-Instruct":
        pytest.skip("it shows neither tools nor calls")
    entry = BY_NAME[published.calls or ""]
    calls = CALLS[:1] if entry.has_channels else CALLS
    templates = ChatTemplates({"default": published.text}, {})
    reads = published.keeps and published.reasoning is not None
    reasoning = {"reasoning_content": "Why not?"} if reads else {}
    for num, content in ((len(calls), ""), (1, ""), (0, "Four.")):
        functions = [
            {"type": "function", "function": {"name": tool, "arguments": given}}
            for tool, given in calls[:num]
        ]
        answer = {"role": "assistant", "content": content, **(reasoning if num else {})}
        answer |= {"tool_calls": functions} if num else {}
        talk = [{"role": "user", "content": "Hi"}, answer]
        options = {"tools": TOOLS, "chat_template_kwargs": {"enable_thinking": True}}
        prompt = templates.render(talk[:1], add_generation_prompt=True, **options)
        before = templates.render(talk[:1], add_generation_prompt=False, **options)
        rendered = templates.render(talk, add_generation_prompt=False, **options)
        assert rendered.startswith(before)
        written = rendered[len(before) :]
        head = prompt[len(before) :]
        # A prompt may begin reasoning that the history does not have.
        begun = [head, head.removesuffix("<think>\n"), head.removesuffix("<think>")]
        head = next(text for text in begun if written.startswith(text))
        written = written.removeprefix(head)
        end = next(text for text in published.ends if written.endswith(text))
        written = written.removesuffix(end) if end else written
        chat = ChatFormat.of(tool_call_parser="auto", reasoning_parser="auto", template=published.text)
        plan = ToolPlan.of(chat, tools=TOOLS)
        found = joined(plan.new_parser(before + head), [*written])
        assert found.content.strip() == content
        assert found.calls == calls[:num]
        assert found.is_whole == (num > 0)
        assert found.reasoning == ("Why not?" if reasoning and num else "")


def test_names_of_vllm_are_known():
    aliases = {"openai": "harmony", "openai_gptoss": "harmony", "qwen3_xml": "qwen3_coder"}
    aliases |= {"phi4_mini_json": "phi4_mini", "pythonic": "llama_pythonic", "glm45_moe": "glm45"}
    for alias, name in aliases.items():
        assert BY_NAME[alias].name == name
        tools = ChatFormat.of(tool_call_parser=alias).tools
        assert isinstance(tools, ToolFormat)
        assert tools.name == name
    for name in (
        "qwen3",
        "deepseek_r1",
        "glm45",
        "granite",
        "mistral",
        "openai_gptoss",
        "minimax_m2",
        "olmo3",
    ):
        assert ChatFormat.of(reasoning_parser=name).reasoning is not None
    assert ChatFormat.of(tool_call_parser="none", reasoning_parser="none") == ChatFormat()
