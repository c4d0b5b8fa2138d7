"""`paged serve` with a record of what held it: python -m benchmarks.server.watched FILE MODEL [OPTIONS]

Appends a line to the file whenever the front end's event loop came LEAST_S late, or the starts of two steps
of the engine with work between them were further apart: what was held, the time on time.monotonic, and for
how many seconds. The loop was held for as long as it was late, but not for longer than its process computed
meanwhile: what else there is was spent waiting for a core.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

FILE = "BENCHMARK_HELD_FILE"
LEAST_S = 0.01
TICK_S = 0.005


def record(what: str, seconds: float) -> None:
    """Append a line, if this was long."""
    if seconds >= LEAST_S:
        with open(os.environ[FILE], "a") as file:
            file.write(f"{what} {time.monotonic()} {seconds}\n")


def longest(file: Path, what: str, since: float) -> float:
    """Return the longest time for which this was held, in seconds; 0.0 if never for LEAST_S."""
    lines = [line.split() for line in file.read_text().splitlines()]
    return max((float(held) for name, at, held in lines if name == what and float(at) >= since), default=0.0)


async def _watch_loop() -> None:
    while True:
        due = time.monotonic() + TICK_S
        computed = time.process_time()
        await asyncio.sleep(TICK_S)
        record("loop", min(time.monotonic() - due, time.process_time() - computed))


def _serve() -> None:
    from paged.server import launcher
    from paged.server.http.listener import Server

    launcher.ENGINE_PROCESS = "benchmarks.server.watched"
    listen = Server.listen

    async def watched(self: Server, *listeners: object) -> None:
        watching = asyncio.get_running_loop().create_task(_watch_loop())
        try:
            await listen(self, *listeners)  # type: ignore[arg-type]
        finally:
            watching.cancel()

    Server.listen = watched  # type: ignore[assignment, method-assign]
    from paged.commands.cli import main

    sys.argv = ["paged", "serve", *sys.argv[2:]]
    sys.exit(main())


def _run_engine() -> None:
    from paged.engine.loop import EngineLoop
    from paged.server import engine_process

    step = EngineLoop._step
    make_calls = EngineLoop._make_calls
    started: list[float] = []

    def watched_step(self: EngineLoop) -> None:
        step(self)
        if not self.engine.core.has_work():
            record("step", time.monotonic() - started.pop())

    def watched_calls(self: EngineLoop) -> None:
        # One turn of the loop is the calls and the step after them. An idle loop waits in the calls.
        now = time.monotonic()
        if started:
            record("step", now - started.pop())
        make_calls(self)
        if self.engine.core.has_work():
            started.append(now if self.engine.core.scheduler.running else time.monotonic())

    EngineLoop._step = watched_step  # type: ignore[method-assign]
    EngineLoop._make_calls = watched_calls  # type: ignore[method-assign]
    engine_process.main()


if __name__ == "__main__":
    if sys.argv[1].isdigit():  # the descriptor that an engine process gets
        _run_engine()
    else:
        os.environ[FILE] = sys.argv[1]
        _serve()
