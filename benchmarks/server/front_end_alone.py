"""Section front-end: requests and events of each API, and idle streams; the engine answers at once."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.server.cores import Cores
from benchmarks.server.front_end import FrontEndProcess
from benchmarks.server.load import Load, LoadProcess, Outcome
from benchmarks.server.stub import TEXT, TOOL

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
# A chat format for each way of writing arguments.
FORMATS_OF_ARGUMENTS = {"json": "hermes", "tagged": "qwen3_coder", "python": "olmo3", "gemma": "gemma4"}
NUM_PROMPT_TOKENS, CHAT_BYTES, NUM_TOKENS, NUM_STREAM_TOKENS = 100, 2500, 16, 200


@dataclass(frozen=True)
class Case:
    """A kind of request, how many are sent in a round, and the figure that is wanted."""

    name: str
    path: str
    body: dict[str, Any]
    num_requests: int
    num_connections: int
    wanted_per_s: float
    counts_events: bool = False

    def load(self, port: int) -> Load:
        """Return the requests of a round."""
        return Load(port, self.path, [self.body], self.num_requests, self.num_connections)

    def check(self, outcome: Outcome) -> None:
        """Raise AssertionError unless the responses have what the engine gave."""
        if not self.counts_events:
            text = _text_of(json.loads(outcome.body))
            assert text == TEXT * NUM_TOKENS, text
            return
        # Those of the tokens, and a few around them.
        num_others = outcome.num_events / self.num_requests - NUM_STREAM_TOKENS
        assert 1 <= num_others < 10, outcome.num_events
        lines = [line[6:] for line in outcome.body.splitlines() if line.startswith("data: {")]
        text = "".join(_delta_of(json.loads(line)) for line in lines)
        if "tools" in self.body:
            text = json.loads(text)["text"]
        assert text == TEXT * NUM_STREAM_TOKENS, text


def _text_of(body: dict[str, Any]) -> str:
    """Return the text of an answer in the form of any API."""
    if "choices" in body:
        (choice,) = body["choices"]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    (item,) = body.get("output", [body])
    return str(item["content"][0]["text"])


def _delta_of(event: dict[str, Any]) -> str:
    """Return the text of an event in the form of any API."""
    if "choices" in event:
        (choice,) = event["choices"]
        if "text" in choice:
            return str(choice["text"])
        calls = choice["delta"].get("tool_calls", [])
        return str(choice["delta"].get("content", "") + "".join(c["function"]["arguments"] for c in calls))
    if not event["type"].endswith("delta") or "stop_reason" in event["delta"]:
        return ""
    return str(event["delta"]["text"] if isinstance(event["delta"], dict) else event["delta"])


def cases(model: str) -> list[Case]:
    """Return the kinds of requests that are measured."""
    tokens: dict[str, Any] = {"model": model, "prompt": [*range(1, NUM_PROMPT_TOKENS + 1)]}
    words = "def add(first, second): return first + second; "
    text = (words * (CHAT_BYTES // len(words) + 1))[:CHAT_BYTES]
    chat = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": NUM_TOKENS}
    response = {"model": model, "input": text, "max_output_tokens": NUM_TOKENS}
    stream = {"model": model, "prompt": [1, 2, 3], "max_tokens": NUM_STREAM_TOKENS, "stream": True}
    short = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    short["max_tokens"] = NUM_STREAM_TOKENS
    items = {"model": model, "input": "Hi", "max_output_tokens": NUM_STREAM_TOKENS, "stream": True}
    return [
        Case("completions", COMPLETIONS, {**tokens, "max_tokens": NUM_TOKENS}, 5000, 32, 1000),
        Case("chats", CHATS, chat, 1500, 32, 300),
        Case("responses", RESPONSES, response, 1500, 32, 240),
        Case("messages", MESSAGES, chat, 1500, 32, 240),
        Case("events", COMPLETIONS, stream, 512, 64, 20_000, counts_events=True),
        Case("events of chats", CHATS, short, 512, 64, 16_000, counts_events=True),
        Case("events of responses", RESPONSES, items, 512, 64, 16_000, counts_events=True),
        Case("events of messages", MESSAGES, short, 512, 64, 16_000, counts_events=True),
    ]


def calls(model: str, arguments: str) -> list[Case]:
    """Return the stream of a chat that is a call, whose one argument is a text."""
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    body |= {"max_tokens": NUM_STREAM_TOKENS, "tools": [{"type": "function", "function": TOOL}]}
    return [Case(f"events of calls, {arguments}", CHATS, body, 512, 64, 14_400, counts_events=True)]


def measure(model: str, cores: Cores, rounds: int, *, share: float = 1.0) -> list[dict[str, Any]]:
    """Return a row for each kind of request, over the median round.

    share: of the requests of a round. Where it is not all, one format of arguments stands for all.
    """
    rows = _measured(model, cores, cases(model), rounds, share)
    for arguments, parser in [*FORMATS_OF_ARGUMENTS.items()][: None if share == 1.0 else 1]:
        rows += _measured(model, cores, calls(model, arguments), rounds, share, parser)
    return rows


def _measured(
    model: str, cores: Cores, listed: list[Case], rounds: int, share: float, parser: str | None = None
) -> list[dict[str, Any]]:
    """Return a row for each case. parser: the chat format in which every answer is a call."""
    rows = []
    process = FrontEndProcess(model, cores.front_end, parser=parser)
    with process as front, LoadProcess(cores.load) as client:
        for case in listed:
            num = max(case.num_connections, int(case.num_requests * share))
            load = replace(case, num_requests=num).load(front.port)
            figures = []
            for number in range(rounds + 1):
                before = front.cpu_seconds()
                outcome = client.run(load)
                cpu = front.cpu_seconds() - before
                replace(case, num_requests=num).check(outcome)
                count = outcome.num_events if case.counts_events else num
                if number:  # the first warms up
                    figures.append((count / outcome.seconds, cpu / count * 1e6, cpu / outcome.seconds))
            per_s, cpu_us, busy = (statistics.median(values) for values in zip(*figures, strict=True))
            rows.append(
                {
                    "front end alone": case.name,
                    "per second": per_s,
                    "aim": case.wanted_per_s,
                    "µs of processor time each": cpu_us,
                    "core busy": busy,
                    "per second of processor time": 1e6 / cpu_us,
                }
            )
    return rows


def measure_idle(model: str, cores: Cores, num_streams: int) -> dict[str, Any]:
    """Return the memory that streams take which have begun and have nothing to send."""
    stream = {"model": model, "prompt": [1, 2, 3], "max_tokens": 100, "stream": True}
    with FrontEndProcess(model, cores.front_end, is_idle=True) as front, LoadProcess(cores.load) as client:
        client.run(Load(front.port, COMPLETIONS, [stream], 8, 8, hold=True))
        before = front.resident_mib()
        outcome = client.run(Load(front.port, COMPLETIONS, [stream], num_streams, num_streams, hold=True))
        taken = front.resident_mib() - before
    assert len(outcome.first_s) == num_streams
    return {
        "idle streams": num_streams,
        "MiB of the front end": before,
        "MiB beyond that": taken,
        "KiB each": taken * 1024 / num_streams,
        "wanted MiB": 200 * num_streams / 2000,
    }
