"""What does a step cost beside the model? Schedule, batch, sample and book-keeping, 64 requests decoding.

python -m benchmarks.step_overhead
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from benchmarks.common import checkpoint, print_json, print_table
from paged import LLMEngine, SamplingParams
from paged.batch import Batch
from paged.sampler import sample


def main() -> None:
    """Time the parts of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--num-running", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    engine = LLMEngine(checkpoint(args.model), max_num_seqs=args.num_running, skip_tokenizer_init=True)
    params = SamplingParams(temperature=args.temperature, ignore_eos=True, max_tokens=args.steps + 50)
    for i in range(args.num_running):
        engine.add_request(str(i), [1] * (64 + i), params)
    while any(r.num_output_tokens < 2 for r in (*engine.scheduler.running, *engine.scheduler.waiting)):
        engine.step()
    parts: dict[str, list[float]] = {"schedule": [], "batch": [], "forward": [], "sample": [], "update": []}
    for _ in range(args.steps):
        step(engine, parts)
    milliseconds = {name: statistics.median(times) * 1e3 for name, times in parts.items()}
    host = sum(ms for name, ms in milliseconds.items() if name != "forward")
    rows = [{"part": name, "ms": ms} for name, ms in {**milliseconds, "host, all": host}.items()]
    print_table(rows)
    print_json({"benchmark": "step_overhead", "host_ms": host, **milliseconds, **vars(args)})


def step(engine: LLMEngine, parts: dict[str, list[float]]) -> None:
    """What LLMEngine.step does, with a clock between its parts."""
    runner, times = engine.runner, [time.perf_counter()]
    with torch.inference_mode():
        schedule = engine.scheduler.schedule()
        times.append(time.perf_counter())
        batch = Batch.from_schedule(schedule, engine.config.block_size, runner.device)
        times.append(time.perf_counter())
        logits = runner.model(batch, runner.kv_cache)
        times.append(time.perf_counter())
        tokens = sample(logits, schedule.sampled_requests)
        times.append(time.perf_counter())
        engine.scheduler.update(schedule, tokens)
        times.append(time.perf_counter())
    for name, start, end in zip(parts, times[:-1], times[1:], strict=True):
        parts[name].append(end - start)


if __name__ == "__main__":
    main()
