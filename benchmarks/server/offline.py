"""The engine without a server, in a process of its own: `generate`, and the first token of AsyncLLMEngine.

It reads one JSON line for each order and answers with one.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from typing import Any, Self

from benchmarks.server.cores import cpu_seconds

Tokens = list[list[int]]


class OfflineProcess:
    """The process, for the benchmark that starts it."""

    def __init__(self, options: dict[str, Any], cores: tuple[int, ...]) -> None:
        command = [sys.executable, "-m", "benchmarks.server.offline", json.dumps([options, cores])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._receive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def generate(self, prompts: Tokens, max_tokens: int) -> tuple[float, Tokens]:
        """Return the seconds of `generate` and its tokens."""
        seconds, tokens = self._ask({"prompts": prompts, "max_tokens": max_tokens})
        return seconds, tokens

    def cpu_seconds(self) -> float:
        """Return the processor time of the process."""
        return cpu_seconds(self._process.pid)

    def first_token_s(self, prompt: list[int]) -> float:
        """Return the seconds to the first output of a stream."""
        return float(self._ask({"prompt": prompt}))

    def _ask(self, order: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return self._receive()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the engine has ended"
        return json.loads(line)


async def _serve(options: dict[str, Any]) -> None:
    from paged import AsyncLLMEngine, RequestOutputKind, SamplingParams

    async with AsyncLLMEngine(**options) as engine:
        print(json.dumps("ready"), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            started = time.perf_counter()
            if "prompt" in order:
                params = SamplingParams(
                    temperature=0.0, max_tokens=2, ignore_eos=True, output_kind=RequestOutputKind.DELTA
                )
                stream = engine.generate(order["prompt"], params)
                await anext(stream)
                seconds = time.perf_counter() - started
                async for _ in stream:
                    pass
                print(json.dumps(seconds), flush=True)
                continue
            params = SamplingParams(temperature=0.0, max_tokens=order["max_tokens"], ignore_eos=True)
            prompts: Tokens = order["prompts"]
            outputs = await engine.call(lambda e: e.generate(prompts, params, use_tqdm=False))  # noqa: B023
            seconds = time.perf_counter() - started
            print(json.dumps([seconds, [list(o.outputs[0].token_ids) for o in outputs]]), flush=True)


if __name__ == "__main__":
    given, cores = json.loads(sys.argv[1])
    if cores:
        os.sched_setaffinity(0, cores)
    asyncio.run(_serve(given))
