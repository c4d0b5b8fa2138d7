"""How fast do one, 8 and 64 streams run, in which time is a model loaded, and in how much memory?

    make test-real peers PEERS=llama-cpp                  # SmolLM2-135M and llama.cpp, once
    python -m benchmarks.peers.streams
    python -m benchmarks.peers.streams --model smollm2-135m --streams 1 8 --ways paged-int8 llama_cpp-Q8_0

This engine beside llama.cpp, on the same weights. A way is an engine in one precision: Q8_0, Q4_0 and Q4_K_M
are the same file for both, which llama.cpp makes; int8 and int4 are this engine's option quantization, and
compared with Q8_0 and Q4_0. All streams get different prompts of 512 tokens at once, and outputs of 128,
greedy. Prompts and decodes are timed apart: first the prompts for one token each, then the rest with the KV
that is there. KV has 16 bits: bfloat16 here, float16 in llama.cpp, which is its default.

Each way has a process of its own for each number of streams, with a pool just as large. Its tokens are judged
first, as in benchmarks.peers; then the ways of a precision take turns. Figures are medians of the rounds.
`load s` is from the start of the process until the first request may come, with the file in the page cache
and kernels compiled. `peak MiB` is the most resident memory (VmHWM) with the fewest streams, in which pages
of mapped files count; numpy and Python, which llama.cpp itself does not need, are subtracted there. In
brackets is the ratio to llama.cpp: above 1, this engine is better.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import checkpoint, print_json, print_table, ragged_workload
from benchmarks.peers.fleet import ROOM, Fleet, Way, prove, warm, ways_named
from benchmarks.peers.process import ENVIRONMENTS
from paged.simulate.model import read_model

MODELS = ["smollm2-135m", "tinyllama-1.1b"]
WAYS = [
    *("paged-bfloat16", "llama_cpp-bfloat16"),
    *("paged-int8", "paged-Q8_0", "llama_cpp-Q8_0"),
    *("paged-int4", "paged-Q4_0", "llama_cpp-Q4_0"),
    *("paged-Q4_K_M", "llama_cpp-Q4_K_M"),
]
LIKE = {"int8": "Q8_0", "int4": "Q4_0"}  # the precision of llama.cpp to compare with

LESS_IS_BETTER = ("load s", "peak MiB")

Row = dict[str, Any]


def main() -> None:
    """Print a table for each model, and the JSON line."""
    args = parse_args()
    results = []
    for name in args.model:
        left_out: dict[str, str] = {}
        runs: dict[int, dict[Way, list[Row]]] = {}
        loads: dict[Way, list[float]] = {}
        for num_streams in args.streams:
            runs[num_streams] = {}
            for ways in groups(args.ways, left_out):
                runs[num_streams] |= measure(args, checkpoint(name), ways, num_streams, loads, left_out)
        rows = table(runs, loads, args.prompt, args.output)
        if not rows:
            sys.exit(f"no way ran: {left_out}")
        print(f"\n{name}, prompts of {args.prompt}, outputs of {args.output}, {args.threads} threads")
        print_table([shown(row) for row in rows])
        for way, reason in left_out.items():
            print(f"left out {way}: {reason}")
        results.append({"model": name, "left_out": left_out, "rows": rows})
    told = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    print_json({"benchmark": "streams", **told, "results": results})


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.streams",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--model", nargs="+", default=MODELS, help="of benchmarks.common, or directories")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--ways", nargs="+", default=WAYS, help="as of benchmarks.peers")
    parser.add_argument("--rounds", type=int, default=3, help="at most")
    parser.add_argument("--seconds", type=float, default=30.0, help="after which no round begins")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--output", type=int, default=128, help="tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, help=argparse.SUPPRESS)
    small = {"model": ["llama-15m"], "streams": [1, 2], "ways": ["paged-int8"], "rounds": 1}
    args = common.parse_args(parser, **small, prompt=16, output=4, threads=1)
    try:
        args.ways = [str(way) for way in ways_named(args.ways)]
    except ValueError as error:
        parser.error(str(error))
    return args


def groups(names: list[str], left_out: dict[str, str]) -> list[list[Way]]:
    """Return the ways that are compared with each other: so many fit into memory at once."""
    found: dict[str, list[Way]] = {}
    for way in ways_named(names):
        if str(way) not in left_out:
            found.setdefault(LIKE.get(way.dtype, way.dtype), []).append(way)
    return [*found.values()]


def measure(
    args: argparse.Namespace,
    directory: str,
    ways: list[Way],
    num_streams: int,
    loads: dict[Way, list[float]],
    left_out: dict[str, str],
) -> dict[Way, list[Row]]:
    """Let ways take turns with so many streams. Return their rounds; loads and left_out are added to."""
    vocab_size = read_model(directory).vocab_size
    longest = args.prompt + args.output
    options = {
        "model": directory,
        "threads": args.threads,
        "num_requests": num_streams,
        "num_tokens": num_streams * longest,
        "longest": longest,
    }
    room = ROOM * sum(file.stat().st_size for file in Path(directory).glob("*.safetensors"))
    small = ragged_workload(1, vocab_size, scale=min(1 / 8, longest / 640), seed=-1)
    if not loads.keys() & set(ways):
        # In other processes: one that compiles kernels takes time and memory that the next does not.
        with Fleet(ways, options, room, args.environments) as fleet:
            fleet.prepare()
            prove(fleet, small)
            ways = [*fleet.ways]
        left_out |= fleet.left_out
    runs: dict[Way, list[Row]] = {}
    with Fleet(ways, options, room, args.environments) as fleet:
        warm(fleet, small)
        started = time.perf_counter()
        for round_ in range(args.rounds):
            if time.perf_counter() - started > args.seconds:
                break
            # The order rotates: a way that heats the machine must not always precede the same one.
            turn = round_ % max(1, len(fleet.ways))
            for way in fleet.ways[turn:] + fleet.ways[:turn]:
                prompts = prompts_of(num_streams, args.prompt, vocab_size, seed=round_)
                run = fleet.call(way, "phases", prompts=prompts, num_tokens=args.output)
                if run is not None:
                    runs.setdefault(way, []).append(run)
                    took = f"prompts {run['prefill_s']:.2f} s, decodes {run['decode_s']:.2f} s"
                    print(f"{num_streams} streams, round {round_ + 1}, {way}: {took}", flush=True)
    for way, seconds in fleet.load_s.items():
        loads.setdefault(way, []).extend(seconds)
    left_out |= fleet.left_out
    return {way: runs[way] for way in fleet.ways if way in runs}


def prompts_of(num_prompts: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Make prompts that have nothing in common, nor with those of other rounds."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(num_prompts)]


def table(
    runs: dict[int, dict[Way, list[Row]]], loads: dict[Way, list[float]], prompt: int, output: int
) -> list[Row]:
    """Return a row for each way that ran with every number of streams.

    Prompt tokens/s and memory are those of the fewest streams.
    """
    first = runs[min(runs)]
    found: dict[Way, dict[str, float]] = {}
    for way in first:
        if all(way in ran for ran in runs.values()):
            found[way] = {"prompt/s": prompt * min(runs) / _median(first[way], "prefill_s")}
            for n, ran in sorted(runs.items()):
                found[way][f"decode/s {n}"] = n * (output - 1) / _median(ran[way], "decode_s")
            found[way]["load s"] = statistics.median(loads[way])
            found[way]["peak MiB"] = max(run["peak_rss_mib"] for run in first[way])
    return [{"way": str(way), **figures, "ratios": ratios(found, way)} for way, figures in found.items()]


def ratios(found: dict[Way, dict[str, float]], way: Way) -> dict[str, float]:
    """Return this engine's figures over llama.cpp's, those of which less is better inverted."""
    other = found.get(Way("llama_cpp", LIKE.get(way.dtype, way.dtype)))
    if other is None or way.system != "paged":
        return {}
    return {
        name: other[name] / figure if name in LESS_IS_BETTER else figure / other[name]
        for name, figure in found[way].items()
    }


def shown(row: Row) -> Row:
    """Return the cells of a row: each figure with its ratio."""
    cells = {"way": row["way"]}
    for name, figure in row.items():
        if name not in ("way", "ratios"):
            cells[name] = f"{figure:,.{0 if figure >= 100 else 1}f}"
            if row["ratios"]:
                cells[name] += f" ({row['ratios'][name]:.2f})"
    return cells


def _median(runs: list[Row], name: str) -> float:
    return statistics.median(run[name] for run in runs)


if __name__ == "__main__":
    main()
