"""One system in its own process: reads calls as lines of JSON and writes an answer for each.

    {"call": "load", "model": directory, "dtype": "bfloat16", ...}   see Options
    {"call": "run", "prompts": [[1, 2]], "max_tokens": [5], "batch_size": null}

Runs in the environments of the peers, so only the standard library may be imported at the top. Started by
process.py only.
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
# The class of each system.
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
    """The options that a system is loaded with.

    num_requests, num_tokens, longest: of the largest workload: its requests, the tokens of all prompts and
        outputs, and those of the longest request. Systems derive the size of their pool from these.
    """

    model: str
    dtype: str  # one of fleet.PRECISIONS
    threads: int
    num_requests: int
    num_tokens: int
    longest: int
    block_size: int = 16
    max_batched_tokens: int = 512  # token budget of a step, for systems that have one


class System(Protocol):
    """A system, loaded.

    harness_mib: memory of Python that the system would not need without these benchmarks.
    """

    harness_mib: float = 0.0

    def __init__(self, options: Options) -> None: ...

    def run(
        self, prompts: Tokens, max_tokens: list[int], batch_size: int | None
    ) -> tuple[Tokens, Sequence[float]]:
        """Return the greedy tokens of every prompt, EOS ignored, and perf_counter at each first token.

        batch_size: requests to run at a time, sorted by length; None leaves it to the system.
        """


def in_batches(prompts: Tokens, batch_size: int | None) -> list[list[int]]:
    """Return the indices of each batch: prompts of similar length, or all in order if batch_size is None."""
    if batch_size is None:
        return [[*range(len(prompts))]]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def load_class(name: str) -> Any:
    """Import the class of a system. Its constructor imports the library."""
    module, cls = CLASSES[name].split(".")
    return getattr(importlib.import_module(f"benchmarks.peers.{module}"), cls)


class Server:
    """Answers calls for one system."""

    def __init__(self, name: str) -> None:
        self.cls = load_class(name)
        self.system = None

    def prepare(self, **options: Any) -> None:
        """Convert the checkpoint if the system needs another format. Done in a separate process."""
        if hasattr(self.cls, "prepare"):
            self.cls.prepare(Options(**options))

    def load(self, **options: Any) -> None:
        """Load the system."""
        self.system = self.cls(Options(**options))

    def run(self, prompts: Tokens, max_tokens: list[int], batch_size: int | None = None) -> dict[str, Any]:
        """Run and time one workload."""
        started = time.perf_counter()
        tokens, first = self.system.run(prompts, max_tokens, batch_size)
        seconds = time.perf_counter() - started
        assert [len(t) for t in tokens] == max_tokens, "it generated more or fewer tokens than asked for"
        return {
            "tokens": tokens,
            "seconds": seconds,
            "first_token_s": [t - started for t in first],
            "peak_rss_mib": peak_rss_mib() - getattr(self.system, "harness_mib", 0.0),
        }

    def phases(self, prompts: Tokens, num_tokens: int) -> dict[str, Any]:
        """Run the prompts for one token each, then continue them to num_tokens: prefill and decode apart."""
        prefill = self.run(prompts, [1] * len(prompts))
        continued = [prompt + new for prompt, new in zip(prompts, prefill["tokens"], strict=True)]
        decode = self.run(continued, [num_tokens - 1] * len(prompts))
        return {
            "tokens": [a + b for a, b in zip(prefill["tokens"], decode["tokens"], strict=True)],
            "prefill_s": prefill["seconds"],
            "decode_s": decode["seconds"],
            "peak_rss_mib": decode["peak_rss_mib"],
        }

    def judge(self, prompts: Tokens, tokens: Tokens) -> list[float]:
        """Return the gaps of the tokens; only for the system "judge", see hf.Judge."""
        return self.system.gaps(prompts, tokens)


def main() -> None:
    """Answer calls until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep the output of libraries out of the answers
    server = Server(sys.argv[1])
    for line in sys.stdin:
        request = json.loads(line)
        call: Callable[..., Any] = getattr(server, request.pop("call"))
        try:
            answer = {"value": call(**request)}
        except Exception as error:  # the parent reports it, and goes on without this system
            traceback.print_exc()
            said = " ".join(f"{type(error).__name__}: {error}".split())
            answer = {"error": said if len(said) <= 300 else f"{said[:150]} ... {said[-150:]}"}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # do not wait for the threads of libraries


if __name__ == "__main__":
    main()
