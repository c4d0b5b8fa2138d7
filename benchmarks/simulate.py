"""Does `paged simulate` predict what the engine does?

    python -m benchmarks.simulate
    paged simulate --coefficients coefficients.json --num-blocks 1000 …   # with --write coefficients.json

Runs the engine on ragged workloads, fits a cost model to its steps by least squares, and predicts workloads
of other lengths and concurrency, which the engine runs too. The ratio is predicted to measured throughput;
the benchmark fails if a median is further than --tolerance from 1.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import Workload, checkpoint, parse_args, print_json, print_table
from paged import EngineConfig, LLMEngine, SamplingParams
from paged.scheduler.schedule import Schedule
from paged.simulate.cost import Work, window_shares, work_of
from paged.simulate.fleet import Fleet, FleetConfig
from paged.simulate.model import read_model
from paged.simulate.workload import Arrival

OPTIONS = {"num_blocks": 4096, "max_num_batched_tokens": 512}


@dataclass(frozen=True)
class Case:
    """A workload whose requests all arrive at once. Lengths are uniform; seqs: max_num_seqs."""

    name: str
    num_requests: int
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    seqs: int

    def workload(self, vocab_size: int) -> Workload:
        """Make the requests, the same in every call."""
        rng = random.Random(self.name)
        prompts = [
            [rng.randrange(vocab_size) for _ in range(rng.randint(*self.input_len))]
            for _ in range(self.num_requests)
        ]
        return Workload(prompts, [rng.randint(*self.output_len) for _ in range(self.num_requests)])


# Many sequences with short contexts and few with long ones, or the fit could not separate their costs.
FIT = [
    Case("fit short", 64, (4, 48), (16, 64), 64),
    Case("fit long", 10, (500, 1500), (32, 96), 5),
    Case("fit ragged", 32, (16, 512), (16, 128), 24),
]
PREDICT = [
    Case("short", 96, (8, 64), (32, 128), 48),
    Case("long", 24, (200, 900), (64, 256), 16),
    Case("ragged", 48, (25, 256), (25, 256), 32),
]


class Served:
    """An engine that serves a case step by step. Its clock counts only the steps."""

    def __init__(self, directory: str, case: Case) -> None:
        options = {**OPTIONS, "max_num_seqs": case.seqs}
        self.case = case
        self.engine = LLMEngine(directory, device="cpu", skip_tokenizer_init=True, **options)
        workload = case.workload(self.engine.model_config.vocab_size)
        for i, (prompt, max_tokens) in enumerate(zip(workload.prompts, workload.max_tokens, strict=True)):
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            self.engine.add_request(str(i), prompt, params)
        self.steps: list[tuple[Work, float]] = []  # and its seconds
        self.seconds = 0.0
        self.first_tokens: dict[str, float] = {}
        self.num_tokens = 0
        self.num_wanted = workload.num_output_tokens
        self._windows = window_shares(self.engine.model_config)
        self._schedule = self.engine.scheduler.schedule
        self.engine.scheduler.schedule = self._recorded

    def step(self) -> None:
        """Run one step and time it."""
        started = time.perf_counter()
        outputs = self.engine.step()
        seconds = time.perf_counter() - started
        self.steps.append((self._work, seconds))
        self.seconds += seconds
        self.num_tokens += len(outputs)
        for output in outputs:
            self.first_tokens.setdefault(output.request_id, self.seconds)

    def _recorded(self) -> Schedule:
        schedule = self._schedule()
        self._work = work_of(schedule, self._windows)
        return schedule


def serve(directory: str, cases: list[Case]) -> list[Served]:
    """Serve all cases, their steps interleaved, so that other load on the machine slows all of them alike."""
    served = [Served(directory, case) for case in cases]
    while unfinished := [s for s in served if s.engine.has_unfinished_requests()]:
        min(unfinished, key=lambda s: s.num_tokens / s.num_wanted).step()
    assert all(s.num_tokens == s.num_wanted for s in served)
    return served


def main() -> None:
    """Measure all cases, fit some, predict the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, a shape of benchmarks.common, or a directory")
    parser.add_argument("--rounds", type=int, default=3)
    # Threads wait for each other, so with more than one a step measures the other load of a shared machine.
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tolerance", type=float, default=0.15)
    parser.add_argument("--write", type=Path, metavar="FILE", help="where to write the coefficients")
    args = parse_args(parser, rounds=1, tolerance=1e9)
    torch.set_num_threads(args.threads)
    directory = checkpoint(args.model)
    serve(directory, FIT[:1])  # warm up
    rounds = [serve(directory, FIT + PREDICT) for _ in range(args.rounds)]
    coefficients = fit([step for served in rounds for s in served[: len(FIT)] for step in s.steps])
    rows = [row(directory, runs, coefficients) for runs in list(zip(*rounds, strict=True))[len(FIT) :]]
    print_table([{"coefficient": name, "us": 1e6 * value} for name, value in coefficients.items()])
    print_table(rows)
    if args.write:
        args.write.write_text(json.dumps(coefficients) + "\n")
    worst = max(abs(row["ratio"] - 1) for row in rows)
    print_json({"benchmark": "simulate", "coefficients": coefficients, "cases": rows, "worst": worst})
    assert worst <= args.tolerance, f"a prediction is {worst:.0%} off"


def fit(steps: list[tuple[Work, float]]) -> dict[str, float]:
    """Fit by least squares, dropping terms until none is negative."""
    terms = {
        "step_s": [1.0 for _ in steps],
        "token_s": [work.num_tokens for work, _ in steps],
        "seq_s": [work.num_seqs for work, _ in steps],
        "context_s": [work.context for work, _ in steps],
        "pair_s": [work.pairs for work, _ in steps],
    }
    seconds = np.array([seconds for _, seconds in steps])
    while True:
        solution, *_ = np.linalg.lstsq(np.array([*terms.values()]).T, seconds, rcond=None)
        found = dict(zip(terms, map(float, solution), strict=True))
        worst = min(found, key=lambda name: found[name] * sum(terms[name]))
        if found[worst] >= 0:
            return {"step_s": 0.0, **found}
        del terms[worst]


def predict(directory: str, case: Case, coefficients: dict[str, float]) -> tuple[float, Sequence[float]]:
    """Predict the seconds to serve a case, and the time to first token of each request."""
    engine = EngineConfig(model=directory, max_num_seqs=case.seqs, **OPTIONS)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "coefficients.json"
        file.write_text(json.dumps(coefficients))
        fleet = Fleet(FleetConfig(coefficients=str(file)), engine)
    workload = case.workload(read_model(directory).vocab_size)

    def arrivals() -> Iterator[Arrival]:
        for prompt, max_tokens in zip(workload.prompts, workload.max_tokens, strict=True):
            yield Arrival(0.0, prompt, max_tokens)

    found = fleet.run(arrivals())
    assert found.num_output_tokens == workload.num_output_tokens
    return found.duration, found.latencies[""].ttft


def row(directory: str, runs: Sequence[Served], coefficients: dict[str, float]) -> dict:
    """Return predicted and measured figures of one case."""
    case = runs[0].case
    num_tokens = runs[0].num_tokens
    seconds, first_tokens = predict(directory, case, coefficients)
    ratios = sorted(run.seconds / seconds for run in runs)
    return {
        "case": case.name,
        "requests": case.num_requests,
        "predicted_tok_s": num_tokens / seconds,
        "measured_tok_s": num_tokens / statistics.median(run.seconds for run in runs),
        "ratio": statistics.median(ratios),
        "from": ratios[0],
        "to": ratios[-1],
        "predicted_ttft_p50": statistics.median(first_tokens),
        "measured_ttft_p50": statistics.median(t for run in runs for t in run.first_tokens.values()),
    }


if __name__ == "__main__":
    main()
