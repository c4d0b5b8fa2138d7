"""One system in a process of its own: requests come in as lines of JSON, and an answer goes out for each.

    {"call": "load", "model": directory, "dtype": "bfloat16", ...}   see Options
    {"call": "run", "prompts": [[1, 2]], "max_tokens": [5], "batch_size": null}

Runs in the environments of the peers, so only the standard library may be imported up here. Not to be started
by hand: see process.py.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.common import peak_rss_mib

Tokens = list[list[int]]
# Where each system is, by its name.
CLASSES = {
    "paged": "ours.Paged",
    "generate": "hf.Generate",
    "generate_batch": "hf.GenerateBatch",
    "judge": "hf.Judge",
    "openvino": "openvino_genai_peer.OpenVino",
    "llama_cpp": "llama_cpp_peer.LlamaCpp",
    "vllm": "vllm_peer.Vllm",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a system is loaded with.

    num_requests, num_tokens, longest: of the largest workload that will be run: how many at once, prompts and
        outputs together, and the longest of these. Systems that want to know the size of their pool get it.
    """

    model: str
    dtype: str  # "float32", "bfloat16", "int8" or "int4"
    threads: int
    num_requests: int
    num_tokens: int
    longest: int
    block_size: int = 16
    max_batched_tokens: int = 512  # of a step, for those who can be told


class System(Protocol):
    """One way to generate, loaded."""

    def __init__(self, options: Options) -> None: ...

    def run(
        self, prompts: Tokens, max_tokens: list[int], batch_size: int | None
    ) -> tuple[Tokens, Sequence[float]]:
        """Greedy tokens of every prompt, EOS ignored, and when the first of each came, by perf_counter.

        batch_size: run so many at a time, sorted by length; None: as the system likes it best.
        """


def in_batches(prompts: Tokens, batch_size: int | None) -> list[list[int]]:
    """Which prompts run together: those of similar length; all in their order where batch_size is None."""
    if batch_size is None:
        return [[*range(len(prompts))]]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def load_class(name: str) -> Any:
    """The class of a system; it imports its library only when it is made."""
    module, cls = CLASSES[name].split(".")
    return getattr(importlib.import_module(f"benchmarks.peers.{module}"), cls)


class Server:
    """Answers calls for one system."""

    def __init__(self, name: str) -> None:
        self.cls, self.system = load_class(name), None

    def prepare(self, **options: Any) -> None:
        """Convert the checkpoint where the system wants another format; to be done in another process."""
        if hasattr(self.cls, "prepare"):
            self.cls.prepare(Options(**options))

    def load(self, **options: Any) -> None:
        """Make the system."""
        self.system = self.cls(Options(**options))

    def run(self, prompts: Tokens, max_tokens: list[int], batch_size: int | None = None) -> dict[str, Any]:
        """One workload, timed."""
        started = time.perf_counter()
        tokens, first = self.system.run(prompts, max_tokens, batch_size)
        seconds = time.perf_counter() - started
        assert [len(t) for t in tokens] == max_tokens, "it generated more or fewer tokens than asked for"
        return {
            "tokens": tokens,
            "seconds": seconds,
            "first_token_s": [t - started for t in first],
            "peak_rss_mib": peak_rss_mib(),
        }

    def judge(self, prompts: Tokens, tokens: Tokens) -> list[float]:
        """Only of the system "judge": see there."""
        return self.system.gaps(prompts, tokens)


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    server = Server(sys.argv[1])
    for line in sys.stdin:
        request = json.loads(line)
        call: Callable[..., Any] = getattr(server, request.pop("call"))
        try:
            answer = {"value": call(**request)}
        except Exception as error:  # whoever asked tells it, and goes on without this system
            traceback.print_exc()
            said = " ".join(f"{type(error).__name__}: {error}".split())
            answer = {"error": said if len(said) <= 300 else f"{said[:150]} ... {said[-150:]}"}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # without waiting for the threads of libraries


if __name__ == "__main__":
    main()
