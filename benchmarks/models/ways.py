"""Ways to run the same requests: each a process that loads a model once; then they take turns."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.common import Workload, ragged_workload
from benchmarks.peers.fleet import TOLERANCES
from benchmarks.peers.process import Worker
from benchmarks.peers.report import Row, Run
from paged.simulate.model import read_model

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Way:
    """One system with one model, and the batches that it runs."""

    name: str
    model: str  # a directory
    batches: tuple[int, ...]
    system: str = "paged"


@dataclass(frozen=True, kw_only=True)
class Turns:
    """How often, and on what, the ways of a comparison run.

    rounds: of 8 requests and more; a run of fewer is shorter and noisier, so it has up to 8 times as many.
    scale: factor on the lengths of prompts, of 16 to 512 ids.
    max_tokens: of every request.
    """

    rounds: int
    scale: float
    max_tokens: int
    dtype: str
    threads: int

    def workload(self, way: Way, batch: int, seed: int) -> Workload:
        """Make prompts of ragged lengths, the same for every seed, with equally many tokens to generate."""
        vocab_size = read_model(way.model).vocab_size
        prompts = ragged_workload(batch, vocab_size, scale=self.scale, seed=seed).prompts
        return Workload(prompts, [self.max_tokens] * batch)

    def longest(self, ways: Sequence[Way]) -> int:
        """Return the tokens of the longest request."""
        batch = max(batch for way in ways for batch in way.batches)
        return max(map(len, self.workload(ways[0], batch, 0).prompts)) + self.max_tokens

    def run(self, title: str, ways: Sequence[Way]) -> dict[int, dict[str, list[Run]]]:
        """Verify the tokens of all ways, then time them in turns. Return the runs by batch and way."""
        runs: dict[int, dict[str, list[Run]]] = {}
        with ExitStack() as stack:
            workers: dict[Way, Worker] = {}
            for way in ways:
                workers[way] = stack.enter_context(Worker(way.system, threads=self.threads))
                workers[way].call("load", **self._options_of(way))
                print(f"{title}, {way.name}: loaded", flush=True)
            self._prove(title, workers)
            for batch in sorted({batch for way in ways for batch in way.batches}):
                found: dict[str, list[Run]] = {way.name: [] for way in ways if batch in way.batches}
                runs[batch] = found
                rounds = self.rounds * max(1, 8 // batch)
                for round_ in range(-1, rounds):  # the first one warms up
                    # The order rotates: a way that heats the machine must not always precede the same one.
                    turn = (round_ + 1) % len(ways)
                    for way in [way for way in (*ways[turn:], *ways[:turn]) if batch in way.batches]:
                        run = self._timed(workers[way], way, batch, round_)
                        if round_ >= 0:
                            found[way.name].append(run)
                        label = f"round {round_ + 1}" if round_ >= 0 else "warm-up"
                        print(
                            f"{title}, batch {batch}, {label}, {way.name}: {run['seconds']:.2f} s", flush=True
                        )
        return runs

    def _timed(self, worker: Worker, way: Way, batch: int, round_: int) -> Run:
        # Other ids in every round, so that no prefix cache has them.
        work = self.workload(way, batch, seed=round_ + 1)
        max_tokens = work.max_tokens if round_ >= 0 else [min(4, self.max_tokens)] * batch
        run: Run = worker.call("run", prompts=work.prompts, max_tokens=max_tokens)
        return run

    def _options_of(self, way: Way) -> dict[str, Any]:
        batch = max(way.batches)
        lengths = [len(prompt) + self.max_tokens for prompt in self.workload(way, batch, 0).prompts]
        # Each layer group has blocks of its own; without room for all of them, requests would wait.
        groups = 1 if way.system != "paged" else len(read_model(way.model).layer_groups)
        blocks = groups * sum(-(-n // BLOCK_SIZE) for n in lengths)
        return self._options(way.model, batch, blocks * BLOCK_SIZE, max(lengths))

    def _options(self, model: str, num_requests: int, num_tokens: int, longest: int) -> dict[str, Any]:
        return {
            "model": model,
            "dtype": self.dtype,
            "threads": self.threads,
            "num_requests": num_requests,
            "num_tokens": num_tokens,
            "longest": longest,
            "block_size": BLOCK_SIZE,
        }

    def _prove(self, title: str, workers: Mapping[Way, Worker]) -> None:
        """Let transformers in float32 judge the greedy tokens of every way."""
        small = replace(self, max_tokens=min(8, self.max_tokens))
        for model in {way.model: None for way in workers}:
            tokens = {}
            for way in [way for way in workers if way.model == model]:
                work = small.workload(way, min(2, max(way.batches)), seed=-1)
                tokens[way] = workers[way].call("run", prompts=work.prompts, max_tokens=work.max_tokens)[
                    "tokens"
                ]
            with Worker("judge", threads=self.threads) as judge:
                judge.call("load", **{**self._options(model, 1, 1, 1), "dtype": "float32"})
                for way, out in tokens.items():
                    prompts = small.workload(way, len(out), seed=-1).prompts
                    check(
                        f"{title}, {way.name}", self.dtype, judge.call("judge", prompts=prompts, tokens=out)
                    )


def check(name: str, dtype: str, gaps: Sequence[float]) -> None:
    """Print how many tokens are the best ones. Raise AssertionError if the mean gap is too large."""
    gap, best = statistics.mean(gaps), sum(g == 0 for g in gaps) / len(gaps)
    print(f"{name}: {best:.0%} of {len(gaps)} tokens are the best, {gap:.4f} away", flush=True)
    assert gap <= TOLERANCES[dtype], f"{name}: its tokens are not the model's, {gap:.3f} away from the best"


def ratio_rows(
    shape: str, runs: Mapping[int, Mapping[str, list[Run]]], ours: str, theirs: str, target: float
) -> list[Row]:
    """Return a row for each batch that both ways ran: tokens/s, and the ratio of ours to theirs.

    The ratio is that of medians; the range is that of the ratios of single rounds.
    """
    rows = []
    for batch, found in runs.items():
        if theirs not in found:
            continue
        times = {name: [run["seconds"] for run in found[name]] for name in (ours, theirs)}
        num_tokens = sum(map(len, found[ours][0]["tokens"]))
        ratios = [t / o for o, t in zip(times[ours], times[theirs], strict=True)]
        ratio = statistics.median(times[theirs]) / statistics.median(times[ours])
        rows.append(
            {
                "shape": shape,
                "batch": batch,
                f"{ours} tokens/s": num_tokens / statistics.median(times[ours]),
                f"{theirs} tokens/s": num_tokens / statistics.median(times[theirs]),
                "ratio": ratio,
                "range": f"{min(ratios):.2f}-{max(ratios):.2f}",
                "aim": target,
            }
        )
    return rows
