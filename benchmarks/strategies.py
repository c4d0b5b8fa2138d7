"""What does continuous batching gain over simpler strategies on the same prompts?

    python -m benchmarks.strategies
    python -m benchmarks.strategies --model tinyllama-1.1b --dtype bfloat16 --num-requests 16

Ragged requests (prompts of 16 to 512 ids, outputs of 50 to 128 tokens), all present at the start, greedy. In
float32 all strategies must give the same tokens, which is asserted in every round:

    sequential        this engine, one request after the other
    static, padded    transformers generate(): padded batches of prompts of similar length
    static, ragged    this engine, the same batches: no padding, but each batch waits for the one before
    two processes     this engine twice, each with every other request and half of the threads
    continuous        this engine: a request that finishes makes room for the next one at once

Each strategy is a process that loads the model once; then they take turns. Figures are medians of rounds. A
batch has --batch-size requests, and so many run at once in the last two strategies.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common import Workload, checkpoint, parse_args, print_json, print_table, ragged_workload
from benchmarks.peers.process import Worker
from benchmarks.peers.report import Run
from paged.simulate.model import read_model


@dataclass(frozen=True)
class Strategy:
    """How the requests are distributed over processes and batches.

    at_once: requests that a process may run at once, as a share of --batch-size; 0 means one.
    in_batches: a batch waits until all requests of the one before are finished.
    """

    name: str
    why: str
    system: str = "paged"
    num_processes: int = 1
    at_once: float = 1.0
    in_batches: bool = False


STRATEGIES = [
    Strategy(
        "sequential", "the weights are read for every token of every request", at_once=0, in_batches=True
    ),
    Strategy(
        "static, padded",
        "computes padding, and runs until the longest output ends",
        system="generate",
        in_batches=True,
    ),
    Strategy(
        "static, ragged", "no padding, but a batch shrinks until the longest output ends", in_batches=True
    ),
    Strategy(
        "two processes",
        "the weights are stored and read twice; the processes do not wait for each other",
        num_processes=2,
        at_once=0.5,
    ),
    Strategy(
        "continuous", "places are filled as they become free, so most requests share each read of the weights"
    ),
]


def main() -> None:
    """Compare the tokens, then time in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, tinyllama-1.1b, llama-15m or a directory")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of one strategy")
    args = parse_args(parser, num_requests=4, batch_size=2, scale=0.02, rounds=1, threads=1)
    directory = checkpoint(args.model)
    vocab_size = read_model(directory).vocab_size

    def workload(round_: int) -> Workload:
        # Other ids in every round, so that no prefix cache has them.
        return ragged_workload(args.num_requests, vocab_size, scale=args.scale, seed=round_)

    runs: dict[str, list[Run]] = {strategy.name: [] for strategy in STRATEGIES}
    with ExitStack() as stack:
        running = [Running(strategy, directory, workload(0), args, stack) for strategy in STRATEGIES]
        for round_ in range(-1, args.rounds):  # the first one warms up
            now = workload(round_)
            for way in running:
                run = way.run(now)
                runs[way.strategy.name].append(run)
                print(f"round {round_ + 1}, {way.strategy.name}: {run['seconds']:.2f} s", flush=True)
            # In bfloat16 another order of summation may turn a near tie.
            if args.dtype == "float32":
                same_tokens({name: found[-1] for name, found in runs.items()})
    table = rows({name: found[1:] for name, found in runs.items()}, workload(0))
    print(
        f"\n{args.model}: {args.num_requests} requests, batches of {args.batch_size}, threads: {args.threads}"
    )
    print_table([{k: v for k, v in row.items() if k != "conclusion"} for row in table])
    print("\ncompared with continuous, median of the rounds and range:")
    for row in table:
        print(f"{row['strategy']}: {row['conclusion']}")
    print_json({"benchmark": "strategies", **vars(args), "rows": table})


class Running:
    """The processes of a strategy."""

    def __init__(
        self,
        strategy: Strategy,
        directory: str,
        workload: Workload,
        args: argparse.Namespace,
        stack: ExitStack,
    ) -> None:
        at_once = max(1, int(args.batch_size * strategy.at_once))
        self.strategy = strategy
        self.batch_size = at_once if strategy.in_batches else None
        threads = max(1, args.threads // strategy.num_processes)
        lengths = [len(p) + n for p, n in zip(workload.prompts, workload.max_tokens, strict=True)]
        options: dict[str, Any] = {
            "model": directory,
            "dtype": args.dtype,
            "threads": threads,
            "num_requests": at_once,
            "num_tokens": sum(sorted(lengths)[-at_once:]),
            "longest": max(lengths),
        }
        self.workers = [
            stack.enter_context(Worker(strategy.system, threads=threads))
            for _ in range(strategy.num_processes)
        ]
        for worker in self.workers:
            worker.call("load", **options)

    def run(self, workload: Workload) -> Run:
        """Run all requests, distributed over the processes."""
        count = len(self.workers)
        started = time.perf_counter()
        for i, worker in enumerate(self.workers):
            prompts = workload.prompts[i::count]
            max_tokens = workload.max_tokens[i::count]
            worker.send("run", prompts=prompts, max_tokens=max_tokens, batch_size=self.batch_size)
        parts = [worker.receive() for worker in self.workers]
        seconds = time.perf_counter() - started
        tokens: list[list[int]] = [[] for _ in workload.prompts]
        for i, part in enumerate(parts):
            tokens[i::count] = part["tokens"]
        return {
            "tokens": tokens,
            "seconds": seconds,
            "first_token_s": [t for part in parts for t in part["first_token_s"]],
            "peak_rss_mib": sum(part["peak_rss_mib"] for part in parts),
        }


def same_tokens(runs: Mapping[str, Run]) -> None:
    """Assert that all strategies gave the same tokens."""
    expected = runs["continuous"]["tokens"]
    for name, run in runs.items():
        assert run["tokens"] == expected, f"{name} gives other tokens than continuous"


def rows(runs: Mapping[str, list[Run]], workload: Workload) -> list[dict[str, Any]]:
    """Return the medians of every strategy, and how they compare with continuous batching."""
    table = []
    for strategy in STRATEGIES:
        found = runs[strategy.name]
        seconds = statistics.median(run["seconds"] for run in found)
        ratios = [
            run["seconds"] / best["seconds"] for run, best in zip(found, runs["continuous"], strict=True)
        ]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) of its time"
        compared = "the baseline" if strategy.name == "continuous" else ratio
        table.append(
            {
                "strategy": strategy.name,
                "requests/s": len(workload.prompts) / seconds,
                "tokens/s": workload.num_output_tokens / seconds,
                "TTFT s": statistics.median(statistics.mean(run["first_token_s"]) for run in found),
                "worst": statistics.median(max(run["first_token_s"]) for run in found),
                "peak MiB": max(run["peak_rss_mib"] for run in found),
                "conclusion": f"{compared}: {strategy.why}",
            }
        )
    return table


if __name__ == "__main__":
    main()
