"""Bodies of every shape: the front end's memory and time for each, and how long others wait meanwhile."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.server import watched
from benchmarks.server.aggressors import VICTIM, post
from benchmarks.server.served import ServerProcess

COMPLETION, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
MOST = 16 * 2**20  # bytes: --max-request-bytes
AT_ONCE = 5  # bodies of a kind, beside the victim's


def filled(unit: str, most: int = MOST) -> bytes:
    """Return a body with a list in a field that is ignored, of as many units as fit."""
    begin, end = b'{"prompt": "a", "max_tokens": 1, "metadata": {"x": [', b"]}}"
    one = unit.encode()
    return begin + b",".join([one] * ((most - len(begin) - len(end)) // (len(one) + 1))) + end


def values(unit: str) -> bytes:
    """Return a body with as many values as a body may have."""
    return filled(unit, min(MOST, 2_090_000 * (len(unit.encode()) + 1)))


def containers(unit: str, per_unit: int = 1) -> bytes:
    """Return the densest body of objects and arrays that is taken."""
    num = 130_000 // per_unit
    padding = " " * max(0, 2_100_000 - num * (len(unit) + 1))
    return filled(unit, num * (len(unit) + 1) + 60) + padding.encode()


def text(unit: str, path: str = COMPLETION) -> bytes:
    """Return a body with a text of as many units as fit, as JSON has it."""
    own = unit * ((MOST - 200) // len(unit.encode()))
    if path == CHAT:
        return b'{"max_tokens": 1, "messages": [{"role": "user", "content": "%b"}]}' % own.encode()
    return b'{"max_tokens": 1, "prompt": "%b"}' % own.encode()


def dumped(**fields: Any) -> bytes:
    """Return a body as clients write it."""
    return json.dumps(fields).encode()


def _tools(num: int) -> list[dict[str, Any]]:
    properties = {f"field_{i}": {"type": "string", "description": "What it is. " * 8} for i in range(20)}
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return [
        {"type": "function", "function": {"name": f"tool_{i}", "parameters": parameters}} for i in range(num)
    ]


# The path, and what makes the body. First what is refused for its shape, then the worst that is not, then
# what clients send.
BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "lists": (COMPLETION, lambda: filled("[]")),
    "lists, 60 deep": (COMPLETION, lambda: filled("[" * 58 + "]" * 58)),
    "lists, 100,000 deep": (COMPLETION, lambda: filled("[" * 10**5 + "]" * 10**5)),
    "objects of one key": (COMPLETION, lambda: filled('{"a":1}')),
    "short ints": (COMPLETION, lambda: filled("1")),
    "ints of 10,000 digits": (COMPLETION, lambda: filled("3" * 10_000)),
    "floats of 10,000 digits": (COMPLETION, lambda: filled("0." + "3" * 10_000)),
    "one int of 16 MB": (COMPLETION, lambda: filled("3" * (MOST - 100))),
    "a key of 16 MB": (COMPLETION, lambda: b'{"prompt": "a", "%b": 1}' % (b"k" * (MOST - 30))),
    "one string, no end": (COMPLETION, lambda: b'{"prompt": "' + b"\\n" * (MOST // 2 - 10)),
    "densest lists": (COMPLETION, lambda: containers("[]")),
    "densest lists, deep": (COMPLETION, lambda: containers("[" * 50 + "]" * 50, 50)),
    "densest objects": (COMPLETION, lambda: containers('{"a":1}')),
    "most ints": (COMPLETION, lambda: values("1")),
    "most floats": (COMPLETION, lambda: values("1.5")),
    "most texts of 2": (COMPLETION, lambda: values('"ab"')),
    "most texts of 1": (COMPLETION, lambda: values('"Ā"')),
    "ints of 4,300 digits": (COMPLETION, lambda: filled("3" * 4_290)),
    "floats of 4,300 digits": (COMPLETION, lambda: filled("0." + "3" * 4_200)),
    "keys": (
        COMPLETION,
        lambda: (
            b'{"prompt":"a","max_tokens":1,"metadata":{%b}}'
            % b",".join(b'"%06x":1' % i for i in range(1_500_000))
        ),
    ),
    "most keys": (
        COMPLETION,
        lambda: (
            b'{"prompt":"a","max_tokens":1,"metadata":{"x":[%b]}}'
            % b",".join(b"{%b}" % b",".join(b'"%05x":1' % i for i in range(260_000)) for _ in range(6))
        ),
    ),
    "long keys": (
        COMPLETION,
        lambda: (
            b'{"prompt":"a","max_tokens":1,"metadata":{%b}}'
            % b",".join(b'"%030000d":1' % i for i in range(550))
        ),
    ),
    "unknown fields": (COMPLETION, lambda: b"{%b}" % b",".join(b'"%06x":1' % i for i in range(1_500_000))),
    "white space": (COMPLETION, lambda: b'{"prompt": "a", "max_tokens": 1}'.ljust(MOST)),
    "text": (COMPLETION, lambda: text("hello world ")),
    "text, escapes": (COMPLETION, lambda: text("\\n")),
    "text, \\u escapes": (COMPLETION, lambda: text("\\u0100")),
    "text, one emoji": (COMPLETION, lambda: text("hello world ")[:-8] + '😀"}'.encode()),
    "text, Chinese": (COMPLETION, lambda: text("中文")),
    "chat": (CHAT, lambda: text("hello world ", CHAT)),
    "chat, one emoji": (CHAT, lambda: text("hello world ", CHAT).replace(b"hello ", "😀 ".encode(), 1)),
    "chat, escapes": (CHAT, lambda: text("\\n", CHAT)),
    "1M token ids": (COMPLETION, lambda: dumped(prompt=[i % 4000 for i in range(2**20)], max_tokens=1)),
    # The last prompt is wrong, so that the rest is not computed.
    "2,048 prompts of ids": (COMPLETION, lambda: dumped(prompt=[*[[7] * 900] * 2047, [-1]], max_tokens=1)),
    "2,048 embeddings": (EMBEDDINGS, lambda: dumped(input=[*[[7] * 900] * 2047, [-1]])),
    "tools": (
        CHAT,
        lambda: dumped(
            messages=[{"role": "user", "content": "a"}], tools=_tools(128), max_tokens=1, tool_choice="none"
        ),
    ),
    "logit_bias, bad_words": (
        COMPLETION,
        lambda: dumped(
            prompt="a",
            max_tokens=1,
            logit_bias={str(i): 0.5 for i in range(4096)},
            bad_words=[f"word {i}" for i in range(10_000)],
        ),
    ),
    "messages of blocks": (
        "/v1/messages",
        lambda: dumped(
            max_tokens=1,
            messages=[
                {"role": "assistant", "content": [{"type": "text", "text": "abc" * 30}] * 60_000},
            ],
        ),
    ),
}


def measure(model: str, *, rate: float, names: list[str] | None = None) -> list[dict[str, Any]]:
    """Send each body alone, then AT_ONCE of them beside a victim's requests, at this rate a second.

    Each has a server of its own: what a process once had for one body, it has for the next.
    """
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for name in names or BODIES:
            held = Path(directory) / "held.txt"
            held.write_text("")
            command = [sys.executable, "-m", "benchmarks.server.watched", str(held), model, "--port", "0"]
            with ServerProcess([*command, "--num-blocks", "2048"]) as server:
                for _ in range(3):
                    asyncio.run(post(server.port, COMPLETION, json.dumps(VICTIM).encode()))
                rows.append(asyncio.run(_row(server, held, name, rate)))
    return rows


async def _row(server: ServerProcess, held: Path, name: str, rate: float) -> dict[str, Any]:
    path, new_body = BODIES[name]
    body = new_body()
    before = memory(server.pid)["VmRSS"]
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")  # forgets the peak
    since = time.monotonic()
    status, answer = await post(server.port, path, body)
    alone_s = time.monotonic() - since
    peak = memory(server.pid)["VmHWM"] - before

    beside = time.monotonic()
    many = asyncio.gather(*(post(server.port, path, body) for _ in range(AT_ONCE)))
    waited = []
    while not many.done() or len(waited) < 5:
        started = time.monotonic()
        of_victim, _ = await post(server.port, COMPLETION, json.dumps(VICTIM).encode())
        assert of_victim == 200, of_victim
        waited.append(time.monotonic() - started)
        await asyncio.sleep(max(0.0, started + 1 / rate - time.monotonic()))
    statuses = Counter(each for each, _ in await many)
    return {
        "body": name,
        "MB": len(body) / 2**20,
        "status": status,
        "ms": alone_s * 1e3,
        "memory / size": peak / len(body),
        "loop held ms": watched.longest(held, "loop", since) * 1e3,
        f"{AT_ONCE} at once": " ".join(f"{num}x{each}" for each, num in sorted(statuses.items())),
        "victim's longest ms": max(waited) * 1e3,
        "s": time.monotonic() - beside,
        "says": "" if status == 200 else json.loads(answer)["error"]["message"][:50],
    }


def memory(pid: int) -> dict[str, int]:
    """Return the memory of a process in bytes, by the names that the kernel gives."""
    lines = Path(f"/proc/{pid}/status").read_text()
    return {name: int(kb) * 1024 for name, kb in re.findall(r"(Vm\w+):\s+(\d+) kB", lines)}
