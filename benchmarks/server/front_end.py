"""The front end alone, in a process of its own: python -m benchmarks.server.front_end MODEL [CORE] [OPTIONS]

All of it works as in `paged serve`, metrics and the log of requests included, over a `StubEngine`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import subprocess
import sys
from typing import Self

import psutil

from benchmarks.server.cores import cpu_seconds
from benchmarks.server.stub import StubEngine, call_around
from paged.server.app import new_app
from paged.server.drain import Drain
from paged.server.front_end import FrontEnd
from paged.server.http.listener import Server, allow_many_connections, bind, new_event_loop
from paged.server.options import ServeOptions
from paged.server.telemetry.request_log import RequestLog, set_up_logging


class FrontEndProcess:
    """The process, for the benchmark that starts it. `port` is where it listens."""

    def __init__(
        self,
        model: str,
        core: int | None = None,
        *,
        is_idle: bool = False,
        parser: str | None = None,
    ) -> None:
        command = [sys.executable, "-m", "benchmarks.server.front_end", model]
        command += [*([] if core is None else [str(core)]), *(["--idle"] if is_idle else [])]
        command += [] if parser is None else ["--parser", parser]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the front end did not start"
        self.port = int(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(20)

    def cpu_seconds(self) -> float:
        """Return the processor time of the process and of those that render its templates."""
        return cpu_seconds(self._process.pid)

    def resident_mib(self) -> float:
        """Return the memory of the process."""
        return float(psutil.Process(self._process.pid).memory_info().rss) / 2**20


def main() -> None:
    """Print the port, and serve until terminated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("core", type=int, nargs="?")
    parser.add_argument("--idle", action="store_true", help="give each stream one token only")
    parser.add_argument("--parser", help="a chat format in which every answer is a call")
    args = parser.parse_args()
    if args.core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {args.core})
    assert "torch" not in sys.modules
    allow_many_connections()
    options = ServeOptions(port=0, tool_call_parser=args.parser or "auto")
    around = ("", "") if args.parser is None else call_around(args.parser)
    with open(os.devnull, "w") as nowhere, bind(options) as listener:
        set_up_logging("text", nowhere)
        front = FrontEnd(StubEngine(args.model, is_idle=args.idle, around=around), options, [RequestLog()])
        port = listener.getsockname()[1]
        server = Server(
            new_app(front),
            options,
            on_start=lambda: print(port, flush=True),
            on_refusal=front.observers.refused,
        )
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(_serve(front, server, listener))


async def _serve(front: FrontEnd, server: Server, listener: socket.socket) -> None:
    with Drain(front, server, delay_s=0.0, timeout_s=0.0):
        await server.listen(listener)


if __name__ == "__main__":
    main()
