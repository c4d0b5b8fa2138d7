"""What one client can do to another: a victim's completions of 8 tokens, alone and beside each aggressor."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.server import watched
from benchmarks.server.served import ServerProcess

VICTIM = {"prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
AMBIGUOUS = 'root ::= s\ns ::= s s s | s s | "a" | ""'
WORDS = ["the", "quick", "fox", "jumps", "over", "a", "value", "of", "self", "in", "def", "class", "import"]


@dataclass(frozen=True)
class Aggressor:
    """What a client sends at once, again and again. new_body: returns a request that no cache holds yet."""

    path: str
    new_body: Callable[[random.Random], dict[str, Any]]
    num_at_once: int = 1


def _text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_words))


def _ids(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(1, 4000) for _ in range(num)]


def _schema(rng: random.Random) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 30},
        {"type": "integer", "minimum": 0, "maximum": 1000},
        {"enum": ["red", "green", "blue"]},
        {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
    ]
    names = [f"field_{rng.randrange(10**6)}_{i}" for i in range(400)]
    properties = {name: rng.choice(kinds) for name in names}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def _generate(**fields: Any) -> dict[str, Any]:
    return {"temperature": 1.0, "ignore_eos": True, **fields}


AGGRESSORS: dict[str, Aggressor] = {
    "ambiguous grammars": Aggressor(
        "/v1/completions",
        lambda rng: _generate(
            prompt=_ids(rng, 8),
            max_tokens=100,
            logit_bias={"66": 0.0},
            structured_outputs={"grammar": AMBIGUOUS},
        ),
        num_at_once=4,
    ),
    "large JSON schemas": Aggressor(
        "/v1/completions",
        lambda rng: _generate(prompt=_ids(rng, 8), max_tokens=200, structured_outputs={"json": _schema(rng)}),
        num_at_once=4,
    ),
    "echo of 64 long prompts": Aggressor(
        "/v1/completions",
        lambda rng: _generate(
            prompt=[_ids(rng, 1900) for _ in range(64)], max_tokens=1, echo=True, logprobs=5
        ),
    ),
    "1,024 continuations": Aggressor(
        "/v1/score",
        lambda rng: {"prompt": _ids(rng, 500), "continuations": [_ids(rng, 20) for _ in range(1024)]},
    ),
    "prompt_logprobs 20": Aggressor(
        "/v1/completions",
        lambda rng: _generate(prompt=_ids(rng, 1900), max_tokens=1, prompt_logprobs=20),
        num_at_once=8,
    ),
    "n 128, logprobs 20": Aggressor(
        "/v1/completions",
        lambda rng: _generate(prompt=_ids(rng, 8), max_tokens=64, n=128, logprobs=20),
    ),
    "long conversations": Aggressor(
        "/v1/chat/completions",
        lambda rng: {
            "messages": [
                {"role": ("user", "assistant")[i % 2], "content": _text(rng, 800)} for i in range(2001)
            ],
            "max_tokens": 1,
        },
        num_at_once=4,
    ),
    "/tokenize of 8 MB": Aggressor(
        "/tokenize", lambda rng: {"prompt": _text(rng, 1000) * 1600, "return_token_strs": True}, num_at_once=4
    ),
    "many parameters": Aggressor(
        "/v1/completions",
        lambda rng: _generate(
            prompt=_ids(rng, 8),
            max_tokens=32,
            stop=[_text(rng, 700) for _ in range(64)],
            logit_bias={str(i): 0.5 for i in range(4096)},
            bad_words=[_text(rng, 3) for _ in range(10_000)],
        ),
        num_at_once=4,
    ),
    "1,024 embeddings": Aggressor(
        "/v1/embeddings", lambda rng: {"input": [_text(rng, 30) for _ in range(1024)]}
    ),
}


def measure(model: str, *, seconds: float, rate: float) -> list[dict[str, Any]]:
    """Measure the victim alone and beside each aggressor, each for this long at least.

    rate: the victim's requests a second, whether answers come or not.
    """
    with tempfile.TemporaryDirectory() as directory:
        held = Path(directory) / "held.txt"
        held.touch()
        command = [sys.executable, "-m", "benchmarks.server.watched", str(held), model, "--port", "0"]
        with ServerProcess(command) as server:
            asyncio.run(_beside(server.port, None, 1.0, rate))  # warm-up
            return [_row(server.port, name, held, seconds, rate) for name in ("nothing", *AGGRESSORS)]


def _row(port: int, name: str, held: Path, seconds: float, rate: float) -> dict[str, Any]:
    since = time.monotonic()
    aggressor = None if name == "nothing" else name
    waited, statuses = asyncio.run(_beside(port, aggressor, seconds, rate))
    waited.sort()
    return {
        "beside": name,
        "p50 ms": waited[len(waited) // 2] * 1e3,
        "p99 ms": waited[int(0.99 * len(waited))] * 1e3,
        "longest ms": waited[-1] * 1e3,
        "loop held ms": watched.longest(held, "loop", since) * 1e3,
        "longest step ms": watched.longest(held, "step", since) * 1e3,
        "victims": len(waited),
        "answers": " ".join(f"{num}x{status}" for status, num in sorted(statuses.items())),
    }


async def _beside(
    port: int, aggressor: str | None, seconds: float, rate: float
) -> tuple[list[float], dict[str, int]]:
    """Return how long each request of the victim took, and the statuses that the aggressor got."""
    attack = None
    if aggressor is not None:
        command = [sys.executable, "-m", "benchmarks.server.aggressors", str(port), aggressor, str(seconds)]
        attack = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert attack.stdout is not None
        await attack.stdout.readline()  # it begins now
    attacking = attack and asyncio.create_task(attack.communicate())
    tasks = []
    started = time.monotonic()
    while time.monotonic() < started + seconds or (attacking is not None and not attacking.done()):
        tasks.append(asyncio.create_task(_ask_as_victim(port)))
        await asyncio.sleep(max(0.0, started + len(tasks) / rate - time.monotonic()))
    waited = [*await asyncio.gather(*tasks)]
    statuses = json.loads((await attacking)[0]) if attacking is not None else {}
    return waited, statuses


async def _ask_as_victim(port: int) -> float:
    started = time.monotonic()
    status, body = await post(port, "/v1/completions", json.dumps(VICTIM).encode())
    assert status == 200, body
    assert json.loads(body)["usage"]["completion_tokens"] == 8, body
    return time.monotonic() - started


async def post(port: int, path: str, content: bytes) -> tuple[int, bytes]:
    """Return the status and the body of an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(content)}\r\nconnection: close\r\n\r\n".encode() + content)
    answer = await reader.read()
    writer.close()
    head_bytes, _, body = answer.partition(b"\r\n\r\n")
    return int(head_bytes[9:12]), body


async def _attack(port: int, aggressor: Aggressor, seconds: float) -> None:
    """Send the aggressor's requests for this long, and print how many answers had which status."""
    rng = random.Random(0)
    statuses = Counter[int]()
    # What takes long to make is made before.
    contents = [json.dumps(aggressor.new_body(rng)).encode() for _ in range(2 * aggressor.num_at_once)]
    print("begins", flush=True)
    until = time.monotonic() + seconds

    async def client(i: int) -> None:
        rounds = 0
        while time.monotonic() < until:
            status, _ = await post(port, aggressor.path, contents[2 * i + rounds % 2])
            statuses[status] += 1
            rounds += 1

    await asyncio.gather(*map(client, range(aggressor.num_at_once)))
    print(json.dumps(statuses))


if __name__ == "__main__":
    asyncio.run(_attack(int(sys.argv[1]), AGGRESSORS[sys.argv[2]], float(sys.argv[3])))
