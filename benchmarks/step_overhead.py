"""What does a step cost besides the model? 64 requests decoding, the demo model.

    python -m benchmarks.step_overhead

First the parts of a step as generate() runs it, then whole steps without the model: those of generate(), and
those of step(), which also updates the text of every request.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import checkpoint, parse_args, print_json, print_table
from paged import LLMEngine, SamplingParams
from paged.kernels.checks import TrustedContents
from paged.model.batch import Batch


def main() -> None:
    """Time the parts of each step, then whole steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--num-running", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parse_args(parser, num_running=4, steps=3)
    engine = LLMEngine(checkpoint(args.model), max_num_seqs=args.num_running)
    params = SamplingParams(temperature=args.temperature, ignore_eos=True, max_tokens=3 * args.steps + 50)
    for i in range(args.num_running):
        engine.add_request(str(i), [1] * (64 + i), params)
    while any(r.num_output_tokens < 2 for r in (*engine.scheduler.running, *engine.scheduler.waiting())):
        engine.step()
    parts: dict[str, list[float]] = {"schedule": [], "batch": [], "forward": [], "sample": [], "update": []}
    for _ in range(args.steps):
        step_in_parts(engine, parts)
    milliseconds = {name: statistics.median(times) * 1e3 for name, times in parts.items()}
    milliseconds["generate(), without forward"] = without_forward(engine, engine.core.step, args.steps)
    milliseconds["step(), without forward"] = without_forward(engine, engine.step, args.steps)
    print_table([{"part": name, "ms": ms} for name, ms in milliseconds.items()])
    print_json({"benchmark": "step_overhead", **milliseconds, **vars(args)})


def step_in_parts(engine: LLMEngine, parts: dict[str, list[float]]) -> None:
    """Run one step and append the time of each part."""
    runner = engine.runner
    times = [time.perf_counter()]
    schedule = engine.scheduler.schedule()
    times.append(time.perf_counter())
    plan = runner.plan(schedule)
    upload, download = runner.transfers.new_upload(), runner.transfers.new_download()
    step = runner.batches.put(plan.computed, upload)
    upload.send()
    batch = runner.batches.batch(step)
    times.append(time.perf_counter())
    with TrustedContents():  # as in runner.execute
        logits, best, _ = runner.compute(batch)
        times.append(time.perf_counter())
        seats = runner.sampling_seats.at(plan.computed.sampled_seats)
        draw = runner.sampler.prepare(seats, plan.computed.positions, upload)
        tokens = draw.run(logits, download, best=best)
        assert tokens is not None, "no row is sampled"
        runner.batches.record(step, tokens)
        output = draw.result()
    times.append(time.perf_counter())
    engine.scheduler.update(schedule, output.tokens, output.errors)
    times.append(time.perf_counter())
    for name, start, end in zip(parts, times[:-1], times[1:], strict=True):
        parts[name].append(end - start)


def without_forward(engine: LLMEngine, step: Callable[[], Any], num_steps: int) -> float:
    """Return the median milliseconds of a step, without the model and its head."""
    runner = engine.runner
    spent = [0.0]
    times = []
    compute = runner.compute

    def timed(batch: Batch) -> Any:
        started = time.perf_counter()
        try:
            return compute(batch)
        finally:
            spent[0] += time.perf_counter() - started

    runner.compute = timed  # type: ignore[method-assign]
    for _ in range(num_steps):
        spent[0] = 0.0
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started - spent[0])
    runner.compute = compute  # type: ignore[method-assign]
    return statistics.median(times) * 1e3


if __name__ == "__main__":
    main()
