"""Coding agents and clients for JavaScript: what they send is answered, and their loops come to an end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.coding_agents import AGENTS, ANSWER, COMMANDS, RECORDED, RESULTS
from tests.support.scripted_server import scripted_server

LAST = {"/v1/responses": "response.completed", "/v1/messages": "message_stop"}


def result_texts(value: Any) -> list[str]:
    """Return the results of calls in a body."""
    if isinstance(value, list):
        return [text for part in value for text in result_texts(part)]
    if not isinstance(value, dict):
        return []
    if value.get("type") in ("function_call_output", "tool_result"):
        return [json.dumps(value)]
    return [text for part in value.values() for text in result_texts(part)]


def text_of(event: dict[str, Any]) -> str:
    """Return the text, or the part of arguments, that an event brings."""
    delta = event.get("delta", "")
    return delta if isinstance(delta, str) else delta.get("text", delta.get("partial_json", ""))


def test_recorded_bodies_are_answered(engine):
    """A body of each turn of each agent, with the calls that its answer had when it was recorded."""
    bodies = json.loads(RECORDED.read_text())
    assert bodies.keys() == {name for name, each in AGENTS.items() if each.is_recorded}
    agent = None
    with scripted_server(
        engine, lambda prompt: agent.answer(prompt), served_model_name="demo", ignore_builtin_tools=True
    ) as (served, _):
        for name, recorded in bodies.items():
            agent = AGENTS[name]
            answers = []
            for body in recorded["bodies"]:
                path = body["path"]
                url = f"{path}?beta=true" if path == "/v1/messages" else path
                headers = {"anthropic-beta": "prompt-caching-scope-2026-01-05,some-other-2026-01-01"}
                status, _, data = served.request("POST", url, body["body"], headers)
                text = data.decode()
                if "thread" in body["body"]:  # the client goes on without it
                    assert json.loads(text)["error"]["details"]["error_code"] == "thread_unsupported_request"
                    continue
                assert status == 200, (name, text)
                events = [json.loads(event.partition("data: ")[2]) for event in text.strip().split("\n\n")]
                assert events[-1]["type"] == LAST[path], (name, text)
                answers.append("".join(map(text_of, events)))
            assert sum("echo" in answer for answer in answers) == len(COMMANDS), (name, answers)
            assert ANSWER in answers, (name, answers)


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_calls_two_tools_and_ends(engine, name):
    agent = AGENTS[name]
    if not agent.is_installed:
        pytest.skip(f"{agent.package} needs Node.js, and its package: make clients")
    said, recorded = agent.run(engine)
    assert said.strip().endswith(ANSWER)
    threads = sum("thread" in body for _, body in recorded.bodies)
    statuses = [status for _, _, status in recorded.responses]
    assert statuses == [400] * threads + [200] * (len(statuses) - threads)
    *_, (_, last) = recorded.bodies
    results = result_texts(last)
    assert [any(result in text for text in results) for result in RESULTS] == [True, True]
