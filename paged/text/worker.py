"""Worker: a process of bounded time and memory for text that a stranger's files process.

Chat templates are code, and the patterns and normalizers of a tokenizer may take any time and memory. A call
into C or Rust cannot be stopped from within its own process, so the operating system enforces the limits:
errors beyond the memory, SIGPROF beyond the CPU time. A process that neither answers nor computes is killed
by the clock. A process serves one call at a time; the next call replaces one that ended. `Workers` are
several of them, so that a call which hangs delays no other.

The process runs a module that calls `serve`: a line of JSON in, a line of JSON out.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import LifoQueue
from typing import Any

import psutil

from ..base.errors import RequestError, WorkerLostError

MOST_READ = 2**20  # bytes at once
PIECE = 2**16  # characters of a text that are encoded or parsed by one call
TEXT_END = b"\r"  # after a piece of a reply's text; in JSON it is escaped
LOOK_AT_PROCESS_S = 0.5  # between two looks whether a process that does not answer was stopped
# By which a process ends for what it computes: the limit of its time, no memory, an error of a library.
OWN_SIGNALS = (
    signal.SIGPROF,
    signal.SIGABRT,
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGXFSZ,
)
ROOT = str(Path(__file__).parents[2])  # where a process finds the package that its parent runs


class _StoppedError(Exception):
    """The process was stopped from outside."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """The resources that one call may use.

    time_s: seconds of CPU time.
    wall_s: seconds of real time; more than time_s, since a busy machine gives a process little time.
    memory: bytes of address space, including the interpreter's.
    characters: maximum length of the request as JSON, and of the answer.
    """

    time_s: float = 5.0
    wall_s: float = 20.0
    memory: int = 512 * 2**20
    characters: int = 64 * 2**20


class Worker:
    """A client of a worker process. The process is started when needed.

    module: the module that the process runs.
    subject: the subject of messages such as "the chat template takes more than 5 s".
    setup: a request that a new process answers first, within `setup_s` seconds of CPU time.
    """

    def __init__(
        self,
        module: str,
        subject: str,
        limits: WorkerLimits,
        *,
        setup: dict[str, Any] | None = None,
        setup_s: float = 0.0,
    ) -> None:
        self.limits = limits
        self._module = module
        self._subject = subject
        self._setup = None if setup is None else _line(setup, setup_s)
        self._setup_s = setup_s
        self._unsent = bytearray()  # of the setup
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[Any, Any] | None = None
        self._is_set_up = False
        self._lock = threading.Lock()  # one request at a time

    def set_up(self) -> dict[str, Any]:
        """Start the process. Return its answer to the setup. Raises RequestError if it does not answer."""
        with self._lock:
            self._start()
            return self._finish_setup()

    def ask(self, request: dict[str, Any], name: str = "the request") -> dict[str, Any]:
        """Return the process's answer to a request.

        name: the name of the request, for messages.

        If the process is killed or stopped from outside, it is replaced and asked once more.

        Raises RequestError if the request is not JSON or is too long, if it exceeds a limit or ends the
        process, or if the answer is an error; WorkerLostError if the second process is lost too.
        """
        try:
            line = _line(request, self.limits.time_s)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"{name} must be JSON: {error}") from error
        if len(line) > self.limits.characters:
            raise RequestError(
                f"{name} has {len(line)} characters as JSON, more than {self.limits.characters}"
            )
        with self._lock:
            try:
                return self._answer(line)
            except WorkerLostError:
                return self._answer(line)

    def _answer(self, line: bytearray) -> dict[str, Any]:
        if self._process is None:
            self._start()
        if self._setup is not None and not self._is_set_up:
            self._finish_setup()
        return self._exchange(line, self.limits.time_s)

    def restart(self) -> None:
        """Start the process if it is not running, without waiting, so that the next call finds it ready."""
        with self._lock:
            if self._process is None:
                self._start()

    def _finish_setup(self) -> dict[str, Any]:
        reply = self._exchange(self._unsent, self._setup_s)
        self._is_set_up = True
        return reply

    def _exchange(self, line: bytearray, time_s: float) -> dict[str, Any]:
        process = self._process
        assert process is not None
        wall_s = self.limits.wall_s * max(1.0, time_s / self.limits.time_s)  # the setup has more of both
        try:
            reply = _reply(process, line, time.monotonic() + wall_s)
        except TimeoutError:
            self.close()
            raise RequestError(f"{self._subject} takes more than {wall_s:g} s") from None
        except _StoppedError:
            self.close()
            raise WorkerLostError(f"the process that runs {self._subject} was stopped; try again") from None
        except BaseException:  # an interrupt: the reply would be read as that of the next request
            self.close()
            raise
        *texts, rest = reply
        if not rest.endswith(b"\n"):
            self.close()
            code = process.returncode
            if code < 0 and -code not in OWN_SIGNALS:
                raise WorkerLostError(
                    f"the process that runs {self._subject} was killed by signal {-code}; try again"
                )
            raise RequestError(self._end_of(code, time_s))
        answer = dict(json.loads(rest))
        if texts:
            answer["text"] = "".join(map(json.loads, texts))
        if "error" in answer:
            raise RequestError(answer["error"])
        if not answer:
            raise RequestError(self._too_much_memory())
        return answer

    def _end_of(self, code: int, time_s: float) -> str:
        if code == -signal.SIGPROF:
            return f"{self._subject} takes more than {time_s:g} s"
        if code == -signal.SIGABRT:  # Rust ends the process if it gets no memory
            return self._too_much_memory()
        return f"{self._subject} ended the process that runs it (exit code {code})"

    def _too_much_memory(self) -> str:
        return f"{self._subject} takes more than {self.limits.memory // 2**20} MiB of memory"

    def _start(self) -> None:
        limits = (self.limits.memory, self.limits.characters)
        path = [*filter(None, sys.path)]  # so that it finds what this process finds
        if ROOT not in path:  # found in the current directory, which sys.path has as ""
            path = [ROOT, *path]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", self._module, *map(str, limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # reports of Rust's panics, which the answer has in a line
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            process_group=0,  # so that the terminal's Ctrl-C does not reach it
            bufsize=0,
        )
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        self._end = weakref.finalize(self, _end, self._process)
        self._is_set_up = False
        if self._setup is not None:  # it begins to load, while nothing waits for it
            self._unsent = self._setup[_write(self._process, self._setup) :]

    def close(self) -> None:
        """End the process. The next request starts another one."""
        if self._end is not None:
            self._end()
        self._process = None


class Workers:
    """A pool of workers for the same task. Each call has a worker to itself, preferably the last one used.

    size: maximum number of concurrent calls; further calls wait.
    """

    def __init__(self, size: int, new_worker: Callable[[], Worker]) -> None:
        self._workers = [new_worker() for _ in range(size)]
        self._free: LifoQueue[Worker] = LifoQueue()
        for worker in reversed(self._workers):
            self._free.put(worker)

    @property
    def first(self) -> Worker:
        """The worker that is used if calls do not overlap."""
        return self._workers[0]

    def ask(
        self, request: dict[str, Any], name: str = "the request", *, restarts: bool = False
    ) -> dict[str, Any]:
        """Return a process's answer to a request; see `Worker.ask`.

        restarts: whether a process that has ended is restarted at once, before the next call needs it.
        """
        worker = self._free.get()
        try:
            return worker.ask(request, name)
        except RequestError:
            if restarts:
                worker.restart()
            raise
        finally:
            self._free.put(worker)

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.close()


def _write(process: subprocess.Popen[bytes], data: bytearray | memoryview) -> int:
    """Write what the pipe takes. Return how many bytes; all if the process has ended: no reply will come."""
    assert process.stdin is not None
    try:
        return process.stdin.write(data) or 0
    except BrokenPipeError:
        return len(data)


def _reply(process: subprocess.Popen[bytes], line: bytearray, deadline: float) -> list[bytearray]:
    """Write a line, and read one. Return its pieces, or what there is of them if the process ends.

    Raises TimeoutError, or _StoppedError if the process was stopped.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    unsent = memoryview(line)
    pieces = [bytearray()]
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    look_at = time.monotonic() + LOOK_AT_PROCESS_S
    while not pieces[-1].endswith(b"\n"):
        unsent = unsent[_write(process, unsent) :]
        if unsent:
            poll.register(process.stdin, select.POLLOUT)
        else:
            with suppress(KeyError):
                poll.unregister(process.stdin)
        now = time.monotonic()
        if now >= deadline:
            raise TimeoutError
        if now >= look_at:
            look_at = now + LOOK_AT_PROCESS_S
            if psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
                raise _StoppedError
        wait_s = min(deadline, look_at) - now
        if any(fd == process.stdout.fileno() for fd, _ in poll.poll(wait_s * 1000)):
            part = process.stdout.read(MOST_READ)
            if part == b"":
                break
            first, *others = (part or b"").split(TEXT_END)
            pieces[-1] += first
            pieces += map(bytearray, others)
    return pieces


def _line(request: dict[str, Any], time_s: float) -> bytearray:
    line = bytearray(b"[%b, " % json.dumps(time_s).encode())
    for piece in _in_pieces(request):
        line += piece
    line += b"]\n"
    return line


def _in_pieces(value: Any) -> Iterator[bytes]:
    """Yield a value as JSON, so that no call takes long: other threads wait for it."""
    if type(value) is str and len(value) > PIECE:
        yield b'"'
        for start in range(0, len(value), PIECE):
            yield json.dumps(value[start : start + PIECE])[1:-1].encode()
        yield b'"'
    elif type(value) is dict and all(type(name) is str for name in value):
        yield b"{"
        for i, (name, entry) in enumerate(value.items()):
            yield (", " if i else "").encode() + json.dumps(name).encode() + b": "
            yield from _in_pieces(entry)
        yield b"}"
    elif type(value) is list:
        yield b"["
        for i, entry in enumerate(value):
            yield b", " if i else b""
            yield from _in_pieces(entry)
        yield b"]"
    else:
        yield json.dumps(value).encode()


def _reply_of(answer: dict[str, Any]) -> str:
    """Return an answer as JSON, after the pieces of a long text."""
    text = answer.get("text")
    if not (isinstance(text, str) and len(text) > PIECE):
        return json.dumps(answer)
    pieces = [json.dumps(text[start : start + PIECE]) for start in range(0, len(text), PIECE)]
    rest = {name: value for name, value in answer.items() if name != "text"}
    return TEXT_END.decode().join([*pieces, json.dumps(rest)])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):  # unwritten data is discarded
                pipe.close()


def serve(answer: Callable[..., dict[str, Any]]) -> None:
    """Answer the requests on stdin, one per line, within the limits. The process of a Worker runs this.

    answer: takes a request's entries and `most_characters` as arguments. If it raises MemoryError, `serve`
        answers with an error.
    """
    memory, most_characters = map(int, sys.argv[1:3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is for the parent process
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # what a library prints is no reply
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no file may be written, only pipes
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform != "darwin":  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    for line in sys.stdin.buffer:
        try:
            time_s, request = json.loads(line)
            signal.setitimer(signal.ITIMER_PROF, time_s)  # SIGPROF ends the process, even in a C call
            reply = _reply_of(answer(**request, most_characters=most_characters))
        except MemoryError:
            reply = "{}"
        except RecursionError:
            reply = json.dumps({"error": "the request is nested too deeply"})
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(reply + "\n")
        replies.flush()
