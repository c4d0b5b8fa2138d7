"""What do several engine processes of one machine give?

    python -m benchmarks.replicas                               # all sections
    python -m benchmarks.replicas --sections batch --rounds 2

batch: `paged run-batch` with two engine processes of one thread each, against two commands that are started
by hand for half of the lines each, from start to end. All must give the same texts. With --ray: two engine
processes that are children against two in actors of a local Ray cluster, lines/s from the first line of the
output to the last.

prefixes: questions about a few long texts, in random order, over two engine processes whose caches hold half
of the texts: routers against each other. `prefix-aware` sends a text to the engine that has it.

sizes: 1 to 512 requests at once on one process with all cores, on two replicas and on two stages: tokens/s,
the speed-up over the one process, and the memory of the processes (PSS). All must give the same tokens.

processes: of two engine processes the time to start, tokens/s of many requests at once, the first token of
one alone, and after one is killed, the seconds until all its requests have a next token and until it serves
again. With --ray: beside two in actors of a local Ray cluster.

A ratio is the median over the rounds, whose ways run in turns. That of CPU seconds, of all processes from
start to end, depends less on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import parse_args, print_json, print_table
from benchmarks.server.text_checkpoint import text_checkpoint
from paged import SamplingParams
from paged.engine.async_base import RequestStream
from paged.server.engine_client import EngineClient
from paged.server.launcher import Launcher, LocalLauncher

NUM_TEXTS = 50
TEXT_TOKENS = 512
QUESTIONS = 8  # about each text
BLOCK_SIZE = 16
OPTIONS: dict[str, Any] = {"device": "cpu", "num_threads": 1, "num_blocks": 4096, "max_num_seqs": 64}
NUM_REQUESTS = 128
NUM_TOKENS = 64  # of each
FIRST_TOKENS = 40
SIZES = (1, 8, 64, 256, 512)  # requests at once
# Each has all cores of the machine.
DIVISIONS: dict[str, dict[str, Any]] = {
    "one process": {},
    "two replicas": {"replicas": 2},
    "two stages": {"pipeline_parallel_size": 2},
}
SIZES_OPTIONS: dict[str, Any] = {"device": "cpu", "num_blocks": 4096, "max_num_seqs": max(SIZES)}
Way = Callable[[Path], None]
Process = subprocess.Popen[str]


def main() -> None:
    """Run the sections, and print a table for each."""
    sections = {"batch": _batch, "prefixes": _prefixes, "sizes": _sizes, "processes": _processes}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=sections, help="all; with --ray, processes")
    parser.add_argument("--model", default="llama-15m")
    parser.add_argument("--lines", type=int, default=1500, help="of the batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--ray", action="store_true", help="of batch and processes: compare with engines on a Ray cluster"
    )
    args = parse_args(parser, sections=["batch"], model="demo", lines=8, rounds=1)
    model = text_checkpoint(args.model)
    chosen = args.sections or (["processes"] if args.ray else [*sections])
    found = {name: sections[name](model, args) for name in chosen}
    print_json({"benchmark": "replicas", **vars(args), **found})


def _batch(model: str, args: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        lines = [_line(i, [1 + i % 199] * 16, 32 + i % 32) for i in range(args.lines)]
        batch = _Batch(Path(folder), model, lines)
        if args.ray:
            return {"on Ray": _compare_batches(batch, Path(folder), args.rounds)}
        ways: dict[str, Way] = {"--replicas 2": batch.replicas, "two commands": batch.two_commands}
        return _compare(ways, Path(folder), args.rounds, "two commands")


def _prefixes(model: str, args: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        texts = _Batch(Path(folder), model, _questions())
        # Half of the texts, and the requests that are computed.
        num_blocks = NUM_TEXTS // 2 * TEXT_TOKENS // BLOCK_SIZE + 256
        options = ("--num-blocks", str(num_blocks), "--block-size", str(BLOCK_SIZE), "--max-num-seqs", "8")
        ways: dict[str, Way] = {
            router: lambda file, router=router: texts.replicas(file, "--router", router, *options)
            for router in ("prefix-aware", "least-loaded", "round-robin")
        }
        return _compare(ways, Path(folder), args.rounds, "round-robin")


def _sizes(model: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    engines = {
        name: _Engines(model, LocalLauncher(), **SIZES_OPTIONS, **division)
        for name, division in DIVISIONS.items()
    }
    rows = asyncio.run(_load_sizes(engines, args.rounds))
    print_table(rows)
    return rows


async def _load_sizes(engines: dict[str, _Engines], rounds: int) -> list[dict[str, Any]]:
    """Return a row for each number of requests at once, with the columns of each division."""
    rows = []
    try:
        for size in SIZES:
            row: dict[str, Any] = {"requests": size}
            for own in engines.values():
                await own.load(size)  # the first one compiles
                own.seconds.clear()
            expected = None
            for _ in range(rounds):
                for name, own in engines.items():
                    found = await own.load(size)
                    assert expected in (None, found), f"{name}: other tokens"
                    expected = found
            base = statistics.median(engines["one process"].seconds)
            for name, own in engines.items():
                seconds = statistics.median(own.seconds)
                row[f"{name}, tokens/s"] = size * NUM_TOKENS / seconds
                if name != "one process":
                    row[f"{name}, speed-up"] = base / seconds
                row[f"{name}, MiB"] = own.mebibytes
            rows.append(row)
    finally:
        for own in engines.values():
            await own.client.__aexit__()
    return rows


def _line(number: int, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    body = {"prompt": [*prompt], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}


def _questions() -> list[dict[str, Any]]:
    """Return the questions about all texts, in random order."""
    chosen = random.Random(0)
    texts = [[chosen.randrange(2, 4000) for _ in range(TEXT_TOKENS)] for _ in range(NUM_TEXTS)]
    order = [text for text in texts for _ in range(QUESTIONS)]
    chosen.shuffle(order)
    return [_line(i, [*text, 2 + i], 8) for i, text in enumerate(order)]


class _Batch:
    """A batch file, and the ways to compute it."""

    def __init__(self, folder: Path, model: str, lines: list[dict[str, Any]]) -> None:
        self.model = model
        self.whole = folder / "in.jsonl"
        self.halves = [folder / f"half{i}.jsonl" for i in range(2)]
        for path, part in ((self.whole, lines), *zip(self.halves, (lines[::2], lines[1::2]), strict=True)):
            path.write_text("".join(json.dumps(line) + "\n" for line in part))

    def replicas(self, output: Path, *options: str) -> None:
        """Compute it with two engine processes."""
        _wait([self._start(self.whole, output, "--replicas", "2", *options)])

    def two_commands(self, output: Path) -> None:
        """Compute it with two commands, each on its own core."""
        outputs = [output.with_suffix(f".{i}") for i in range(2)]
        pairs = enumerate(zip(self.halves, outputs, strict=True))
        _wait([self._start(half, out, "--num-threads", "1", core=i) for i, (half, out) in pairs])
        output.write_bytes(b"".join(out.read_bytes() for out in outputs))

    def lines_per_s(self, output: Path, *options: str) -> float:
        """Compute it with two engine processes. Return the lines in a second, once there is one."""
        process = self._start(self.whole, output, "--replicas", "2", "--num-threads", "1", *options)
        seen: list[tuple[float, int]] = []  # times, and bytes of the output
        while process.poll() is None:
            size = output.stat().st_size if output.exists() else 0
            if size > (seen[-1][1] if seen else 0):
                seen.append((time.perf_counter(), size))
            time.sleep(0.01)
        _wait([process])
        (began, before), (ended, whole) = seen[0], seen[-1]
        num_lines = len(output.read_bytes()[before:whole].splitlines())
        return num_lines / (ended - began)

    def _start(self, source: Path, output: Path, *options: str, core: int | None = None) -> Process:
        bound = [] if core is None else ["taskset", "--cpu-list", str(core)]
        files = [str(source), str(output)]
        command = [sys.executable, "-m", "paged", "run-batch", *files, "--model", self.model, *options]
        return subprocess.Popen([*bound, *command], stderr=subprocess.PIPE, text=True)


class _Engines:
    """Engine processes, and what is measured of them.

    start_s: how long all took to start.
    seconds: of each load.
    first_s: until the first token, of one request alone.
    moved_s, serving_s: from a death to the next token of each request, and until a new process serves.
    """

    def __init__(self, model: str, launcher: Launcher, **options: Any) -> None:
        started = time.perf_counter()
        self.client = EngineClient(
            model, launcher=launcher, max_restarts=1000, router="round-robin", **options
        )
        self.start_s = time.perf_counter() - started
        self.seconds: list[float] = []
        self.first_s: list[float] = []
        self.moved_s: list[float] = []
        self.serving_s: list[float] = []

    def stream(self, number: int, num_tokens: int) -> RequestStream:
        """Return a request."""
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        return self.client.generate({"prompt_token_ids": [1 + number % 199] * 16}, params)

    async def load(self, num_requests: int) -> list[list[int]]:
        """Compute many requests at once. Return their tokens."""
        started = time.perf_counter()
        found = await asyncio.gather(*(_read(self.stream(i, NUM_TOKENS), []) for i in range(num_requests)))
        self.seconds.append(time.perf_counter() - started)
        return found

    @property
    def mebibytes(self) -> float:
        """The memory of the processes, and of those that they have started; shared pages count once."""
        first = [psutil.Process(each.connection._process.pid) for each in self.client._supervisor.replicas]
        every = {process for one in first for process in (one, *one.children(recursive=True))}
        return sum(process.memory_full_info().pss for process in every) / 2**20

    async def first_token(self, number: int) -> None:
        """Measure the first token of a request that is alone."""
        started = time.perf_counter()
        await _read(self.stream(number, 1), [])
        self.first_s.append(time.perf_counter() - started)

    async def die(self, num_requests: int) -> None:
        """Kill a process that has half of the requests, and measure when they and it go on."""
        streams = [self.stream(i, 2000) for i in range(num_requests)]
        times: list[list[float]] = [[] for _ in streams]
        pairs = zip(streams, times, strict=True)
        readers = [asyncio.create_task(_read(stream, own)) for stream, own in pairs]
        while not all(times):
            await asyncio.sleep(0.01)
        replica = self.client._supervisor.replicas[0]
        moved = [own for stream, own in zip(streams, times, strict=True) if stream.replica == replica.replica]
        os.kill(replica.connection._process.pid, signal.SIGKILL)
        killed = time.perf_counter()
        while replica.is_up:
            await asyncio.sleep(0.001)
        noticed = time.perf_counter()
        while not all(own[-1] > noticed for own in moved):
            await asyncio.sleep(0.001)
        self.moved_s.append(time.perf_counter() - killed)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        while not replica.is_up:
            await asyncio.sleep(0.01)
        self.serving_s.append(time.perf_counter() - killed)


async def _read(stream: RequestStream, times: list[float]) -> list[int]:
    """Return the tokens of a request. Add the time of each output."""
    token_ids: Sequence[int] = ()
    async for output in stream:
        times.append(time.perf_counter())
        token_ids = output.outputs[0].token_ids
    return [*token_ids]


def _processes(model: str, args: argparse.Namespace) -> dict[str, Any]:
    engines = {"children": _Engines(model, LocalLauncher(), replicas=2, **OPTIONS)}
    if args.ray:
        from paged.ray.launcher import connect

        engines["on Ray"] = _Engines(model, connect("local", OPTIONS, 2), replicas=2, **OPTIONS)
    asyncio.run(_measure([*engines.values()], args.rounds))
    rows = [
        {
            "engines": name,
            "start s": own.start_s,
            "tokens/s": NUM_REQUESTS * NUM_TOKENS / statistics.median(own.seconds),
            "first token ms": 1e3 * statistics.median(own.first_s),
            "death to token s": statistics.median(own.moved_s),
            "death to serving s": statistics.median(own.serving_s),
        }
        for name, own in engines.items()
    ]
    print_table(rows)
    return {row.pop("engines"): row for row in rows}


async def _measure(engines: Sequence[_Engines], rounds: int) -> None:
    """Measure all in turns."""
    expected = None
    try:
        for i in range(rounds):
            for own in engines:
                found = await own.load(NUM_REQUESTS)
                assert expected in (None, found), "they give other tokens"
                expected = found
            for number in range(FIRST_TOKENS):
                for own in engines:
                    await own.first_token(i * FIRST_TOKENS + number)
            for own in engines:
                await own.die(8)
    finally:
        for own in engines:
            await own.client.__aexit__()


def _compare_batches(batch: _Batch, folder: Path, rounds: int) -> float:
    """Compare batches of engines that are children with those on Ray. Print a table; return the ratio."""
    ways: dict[str, tuple[str, ...]] = {"children": (), "on Ray": ("--ray", "local")}
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    expected = None
    for number in range(rounds):
        for name, options in ways.items():
            output = folder / f"{name}.{number}.jsonl"
            speeds[name].append(batch.lines_per_s(output, *options))
            texts = _texts(output)
            assert expected in (None, texts), f"{name}: other texts"
            expected = texts
    print_table([{"engines": name, "lines/s": statistics.median(own)} for name, own in speeds.items()])
    return statistics.median(ray / own for own, ray in zip(*speeds.values(), strict=True))


def _wait(processes: Sequence[Process]) -> None:
    for process in processes:
        _, said = process.communicate()
        assert process.returncode == 0, said


def _compare(ways: dict[str, Way], folder: Path, rounds: int, base: str) -> dict[str, float]:
    """Compute a batch in all ways in turns. Print a table; return the speed of each over that of the base."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    computed: dict[str, list[float]] = {name: [] for name in ways}
    expected = None
    for number in range(rounds):
        for name, way in ways.items():
            output = folder / f"{name}.{number}.jsonl"
            started = time.perf_counter()
            used = _cpu_s()
            way(output)
            seconds[name].append(time.perf_counter() - started)
            computed[name].append(_cpu_s() - used)
            texts = _texts(output)
            assert expected in (None, texts), f"{name} gives other texts"
            expected = texts
    speed = {
        name: statistics.median(b / t for b, t in zip(seconds[base], times, strict=True))
        for name, times in seconds.items()
    }
    print_table(
        [
            {
                "way": name,
                "s": statistics.median(times),
                f"speed of {base}": speed[name],
                "CPU s": statistics.median(computed[name]),
                f"CPU s of {base}": statistics.median(
                    own / b for own, b in zip(computed[name], computed[base], strict=True)
                ),
            }
            for name, times in seconds.items()
        ]
    )
    return speed


def _cpu_s() -> float:
    """Return the CPU seconds of the processes that have been waited for, and of theirs."""
    times = os.times()
    return times.children_user + times.children_system


def _texts(output: Path) -> dict[str, str]:
    results = map(json.loads, output.read_text().splitlines())
    return {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in results}


if __name__ == "__main__":
    main()
