"""gpt-oss's format through the real server, which finds it out: channels, calls, and how answers end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paged import AsyncLLMEngine
from paged.chat.harmony import TOKENS
from tests.support.scripted_model import scripted_model
from tests.support.served import serving

CALL = "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
SCRIPTS = [
    "<|channel|>analysis<|message|>2+2.<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>",
    f'<|channel|>analysis<|message|>Ask.<|end|>{CALL}{{"city": "Ulm"}}<|call|>',
    f'<|channel|>analysis<|message|>Ask.<|end|>{CALL}{{"city": "Ul',
    "<|channel|>final<|message|>It ends with {<|end|>} or {<|return|>}.<|return|>",
]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "parameters": SCHEMA}
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


def body_of(path: str, number: int, **more: Any) -> dict[str, Any]:
    said = f"#{number} Hi"
    if path.endswith("responses"):
        tools: Any = [{"type": "function", **TOOL}]
        return {"input": said, "max_output_tokens": 200, "temperature": 0, "tools": tools, **more}
    messages = [{"role": "user", "content": said}]
    tools = [{"type": "function", "function": TOOL}]
    if path.endswith("messages"):
        tools = [{"name": "weather", "input_schema": SCHEMA}]
    return {"messages": messages, "max_tokens": 200, "temperature": 0, "tools": tools, **more}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    directory = tmp_path_factory.mktemp("harmony")
    scripted_model(directory, SCRIPTS, TOKENS, comment=" ".join(TOKENS))
    engine = AsyncLLMEngine(str(directory), num_blocks=256, device="cpu", dtype="float32")
    with serving(engine) as served:
        yield served


def answer(served, path: str, number: int, **more: Any) -> dict[str, Any]:
    status, _, data = served.request("POST", path, body_of(path, number, **more))
    assert status == 200, data
    return json.loads(data)


def test_channels_and_calls_are_parts_of_an_answer(served):
    chat, response, message = (answer(served, path, 0) for path in PATHS)
    (choice,) = chat["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("Four.", "2+2.")
    assert choice["finish_reason"] == "stop"
    assert chat["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    chat, response, message = (answer(served, path, 1) for path in PATHS)
    (choice,) = chat["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Ulm"}'}
    assert choice["finish_reason"] == "tool_calls"
    assert response["output"][-1]["status"] == response["status"] == "completed"
    assert (message["stop_reason"], message["content"][-1]["input"]) == ("tool_use", {"city": "Ulm"})


def test_a_call_that_an_eos_token_cuts_is_not_complete(served):
    chat, response, message = (answer(served, path, 2) for path in PATHS)
    assert chat["choices"][0]["finish_reason"] == "stop"
    assert response["status"] == response["output"][-1]["status"] == "incomplete"
    assert response["incomplete_details"] is not None
    assert (message["stop_reason"], message["content"][-1]["input"]) == ("end_turn", {})


def test_marks_that_are_spelled_are_text(served):
    for path in PATHS:
        found = json.dumps(answer(served, path, 3))
        assert "It ends with <|end|> or <|return|>." in found
    status, _, data = served.request("POST", PATHS[0], body_of(PATHS[0], 3, stream=True))
    assert status == 200
    chunks = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert text == "It ends with <|end|> or <|return|>."


def test_log_probabilities_belong_to_the_items_of_their_tokens(served):
    response = answer(served, "/v1/responses", 0, tools=[], top_logprobs=1)
    reasoning, message = response["output"]
    for item, text in ((reasoning, "2+2."), (message, "Four.")):
        (part,) = item["content"]
        assert "".join(place["token"] for place in part["logprobs"]).startswith(text)
    assert len(reasoning["content"][0]["logprobs"]) == len("2+2.")


def test_reasoning_is_left_out_and_counted(served):
    for path in PATHS:
        found = answer(served, path, 0, include_reasoning=False)
        assert "2+2." not in json.dumps(found)
        counts = json.dumps(found["usage"])
        assert '_tokens": 4' in counts
