"""How fast is the engine on a CPU beside other busy processes?

    python -m benchmarks.busy

The demo model generates for 1, 16 and 64 requests beside 0, 1, 2 and 4 processes that each keep one thread
busy, all in turns. "of fair share" is the rate divided by the rate on idle cores and by the share of the
cores that a fair scheduler gives this process: cores / (cores + busy processes). Medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.common import checkpoint, parse_args, print_json, print_table
from paged import LLMEngine, SamplingParams
from paged.device.threads import usable_cores

SPIN = "while True: pass"
MAX_TOKENS = 128


def main() -> None:
    """Measure every combination in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    args = parse_args(parser, streams=[1, 2], busy=[0, 1], seconds=0.1, rounds=1)
    engine = LLMEngine(str(checkpoint(args.model)), max_num_seqs=max(args.streams), num_blocks=4096)
    rates: dict[tuple[int, int], list[float]] = {}
    for _ in range(args.rounds):
        for num_busy in args.busy:
            with busy_processes(num_busy):
                for num_streams in args.streams:
                    rate = tokens_per_second(engine, num_streams, args.seconds)
                    rates.setdefault((num_streams, num_busy), []).append(rate)
    cores = usable_cores()
    medians = {key: statistics.median(of_key) for key, of_key in rates.items()}
    rows = [
        {
            "streams": num_streams,
            "busy processes": num_busy,
            "tokens/s": rate,
            "of fair share": rate / medians[num_streams, min(args.busy)] * (cores + num_busy) / cores,
        }
        for (num_streams, num_busy), rate in sorted(medians.items())
    ]
    print_table(rows)
    print_json({"benchmark": "busy", "cores": cores, "rows": rows, **vars(args)})


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Keep so many threads of other processes busy."""
    processes = [subprocess.Popen([sys.executable, "-S", "-c", SPIN]) for _ in range(number)]
    try:
        time.sleep(0.3 if number else 0)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def tokens_per_second(engine: LLMEngine, num_streams: int, seconds: float) -> float:
    """Generate for so many requests at once, again and again, for about this long."""
    prompts = [[1 + i] * (8 + i % 8) for i in range(num_streams)]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    engine.generate(prompts, params, use_tqdm=False)
    started = time.perf_counter()
    num_tokens = 0
    while time.perf_counter() < started + seconds:
        num_tokens += MAX_TOKENS * len(engine.generate(prompts, params, use_tqdm=False))
    return num_tokens / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
