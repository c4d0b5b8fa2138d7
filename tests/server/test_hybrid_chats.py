"""Chats with models whose layers keep states, each with its family's own template, reasoning and calls."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from paged import AsyncLLMEngine
from tests.support.answering_model import answering_model
from tests.support.chat_templates import PUBLISHED
from tests.support.served import Served, serving

QUESTION = {"role": "user", "content": "How is the weather in Ulm?"}
RESULT = {"role": "tool", "tool_call_id": "0", "content": '{"sky": "grey"}'}
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}}
TOOLS = [{"type": "function", "function": WEATHER}]
ARGUMENTS = {"city": "Ulm", "days": 3}
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "days": 3}}\n</tool_call>'
CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n</parameter>\n<parameter=days>\n3\n</parameter>"
    "\n</function>\n</tool_call>"
)
PYTHON = "<|tool_call_start|>[weather(city='Ulm', days=3)]<|tool_call_end|>"
ANSWER = "Grey, take a coat."
WHY = "The tool knows."


class Family(NamedTuple):
    """A config of tests.support.checkpoints, the template of a model, and how that writes a call."""

    config: str
    template: str
    call: str
    thinks: bool = False


FAMILIES = [
    Family("qwen3_5", "Qwen3.5-35B-A3B", CODER, True),
    Family("qwen3_next", "Qwen3-Next-80B-A3B-Thinking", HERMES, True),
    Family("nemotron_h_moe", "NVIDIA-Nemotron-3-Nano-30B-A3B", CODER, True),
    Family("granitemoehybrid", "granite-4.0-micro", HERMES),
    Family("falcon_h1", "Falcon-H1-7B-Instruct", HERMES),
    Family("lfm2", "LFM2-1.2B", PYTHON),
    Family("lfm2_moe", "LFM2.5-8B-A1B", PYTHON, True),
]


def answers(family: Family) -> list[str]:
    """Return what the model says to the question, and to the tool's result."""
    template = PUBLISHED[family.template].text
    begins = "" if template.rstrip().endswith("<think>\n' }}{%- endif %}") else "<think>\n"
    thought = f"{begins}{WHY}\n</think>\n\n" if family.thinks else ""
    return [thought + family.call, thought + ANSWER]


def turns(family: Family) -> list[dict[str, Any]]:
    """Return the dialogues of a model, as a template takes them."""
    call = {"type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    said: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    if family.thinks:
        said |= {"reasoning_content": WHY, "thinking": WHY}
    talks = [QUESTION], [QUESTION, said, RESULT]
    return [
        {"conversation": talk, "tools": TOOLS, "answer": answer}
        for talk, answer in zip(talks, answers(family), strict=True)
    ]


def chat(served: Served, messages: list[Any], **more: Any) -> Any:
    body = {"messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 120, **more}
    return served.post("/v1/chat/completions", **body)


def streamed(served: Served, messages: list[Any]) -> dict[str, str]:
    """Return the joined parts of a streamed answer."""
    body = {"messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 120}
    found = {"content": "", "reasoning": "", "name": "", "arguments": ""}
    for event in served.events("/v1/chat/completions", **body)[:-1]:
        for choice in json.loads(event)["choices"]:
            delta = choice["delta"]
            parts = [delta, *(call["function"] for call in delta.get("tool_calls") or [])]
            for part in parts:
                for key in found:
                    found[key] += part.get(key) or ""
    return found


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.template)
def test_a_question_a_call_and_an_answer(family, tmp_path):
    """The format is found out; whole and streamed, each turn computes only what is new."""
    published = PUBLISHED[family.template]
    answering_model(tmp_path, family.config, published.text, published.ends[0].strip(), turns(family))
    engine = AsyncLLMEngine(str(tmp_path), device="cpu", dtype="float32", num_threads=1, num_blocks=128)
    thought = WHY if family.thinks else ""
    with serving(engine, enable_prompt_tokens_details=True) as served:
        first = chat(served, [QUESTION])["choices"][0]
        message = first["message"]
        assert first["finish_reason"] == "tool_calls", message
        (call,) = message["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", ARGUMENTS)
        assert (message["content"] or "", message.get("reasoning") or "") == ("", thought)
        again = streamed(served, [QUESTION])
        assert (again["content"], again["reasoning"], again["name"]) == ("", thought, "weather")
        assert again["arguments"] == call["function"]["arguments"]
        talk = [QUESTION, message, RESULT | {"tool_call_id": call["id"]}]
        second = chat(served, talk)
        answer = second["choices"][0]["message"]
        assert (answer["content"], answer.get("reasoning") or "") == (ANSWER, thought)
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert streamed(served, talk)["content"] == ANSWER
    engine.shutdown()
