"""How fast are families other than Llama, and what did they cost the models that were there before?

    python -m benchmarks.models
    python -m benchmarks.models --before ../earlier      # a git worktree of an earlier commit
    python -m benchmarks.models --quick                  # tiny shapes, to try it

On a CPU, with random weights, in the dtype of "auto" for a bfloat16 checkpoint, greedy, EOS ignored.
A batch is the number of requests at once. Prompts are ragged (16 to 512 ids times --scale); every request
generates --max-tokens tokens. tokens/s is their number over the time of prompts and outputs. The sections:

    llama      Gemma 3's and Phi-3's shapes of about 1B weights, compared with a Llama of equal cost on this
               engine. Equal are the sizes: layers, width, heads, KV heads, head_dim, MLP, vocabulary, tied
               embeddings. So the matrices have equally many weights, and a token's K and V equally many
               numbers; both are counted, as are the bytes and FLOPs of the largest batch. What the Llama has
               not is what is measured: Gemma's four norms a layer and norms of Q and K, GELU, two rotary
               tables, and two layer groups with block tables of their own; Phi-3's fused projections. No
               request outgrows a sliding window, so that Gemma attends to no fewer tokens than the Llama.
    generate   the same shapes, compared with transformers generate() in the same dtype, with its default
               attention (SDPA): one batch, prompts padded on the left to the longest, the same number of
               tokens for each
    before     TinyLlama's shape and that of a Llama of 15 million weights, compared with the checkout
               --before, whose processes run its own `paged` and `benchmarks.peers.worker`, with prompts half
               as long, in 2 and 8 times as many rounds; then the time in which an engine starts
    imports    seconds and memory of `import paged` and of a start of the demo model with its tokenizer, and
               what a model class of transformers would add. That none is imported is checked.
    starts     TinyLlama's shape in bfloat16, int8 and int4: a start that packs the weights, one that finds
               them packed, and one beside another engine of the same weights. Seconds are those since the
               process was made, memory is the most that was resident, and what is this process's alone.
               decode is the speed of kept weights over that of packed ones, in turns in one process.
               Then commands as whole processes, in turns with the imports that they cannot do without; and
               the first start of a fresh clone, which compiles kernels. And the first token of a GGUF file of
               SmolLM2-135M's shape, in turns with `import torch` and, after make peers PEERS=llama-cpp, with
               llama.cpp; the KV caches of both have room for 1024 tokens

Every way is a process that loads the model once. It first proves on a small run that its tokens are those of
transformers in float32 (benchmarks.peers.hf.Judge), then takes turns with the others; each round has new
prompts. Batches of fewer than 8 take up to 8 times as many rounds, as their runs are short; engines start 4
times in each. A ratio is that of medians, with the range of the rounds' ratios; above 1 is faster than what
it is compared with. The first run in a checkout compiles kernels and makes checkpoints, which takes minutes
more.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import checkpoint, print_json, print_table
from benchmarks.models.beside_llama_cpp import gguf_rows
from benchmarks.models.commands import command_rows
from benchmarks.models.counts import assert_equal_cost, assert_within_windows, counts
from benchmarks.models.kept import kept_rows
from benchmarks.models.starts import check_native_start, medians, start
from benchmarks.models.ways import Turns, Way, ratio_rows
from benchmarks.peers.process import ROOT
from benchmarks.peers.report import Row
from paged.device.devices import resolve_dtype

SECTIONS = ("llama", "generate", "before", "imports", "starts")
FAMILIES = {"gemma3-1b": "gemma3-tiny", "phi3-1b": "phi3-tiny"}
# Times as many rounds and tokens: the target is near 1, and runs of a small model are short.
EARLIER = {"tinyllama-1.1b": (2, 1), "llama-15m": (8, 2)}
QUICK_EARLIER = {"demo": (2, 1)}
STARTS = 4  # in each round
# Batches, and the ratio that is wanted.
BATCHES = {"llama": (1, 4, 16), "generate": (4, 16), "before": (1, 16, 64)}
QUICK_BATCHES = {"llama": (1, 2), "generate": (2,), "before": (1, 3)}
TARGETS = {"llama": 0.9, "generate": 2.0, "before": 0.99}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the sections, print their tables and the JSON line."""
    args = parse_args(argv)
    dtype = resolve_dtype("auto", "bfloat16", torch.device("cpu"))
    turns = Turns(
        rounds=args.rounds, scale=args.scale, max_tokens=args.max_tokens, dtype=dtype, threads=args.threads
    )
    print(f"{dtype}, {args.threads} threads", flush=True)
    rows: dict[str, list[Row]] = {section: [] for section in args.section if section != "starts"}
    if {"llama", "generate"} & rows.keys():
        for shape, tiny in FAMILIES.items():
            run_family(tiny if args.quick else shape, args, turns, rows)
    if "before" in rows:
        run_before(args, turns, rows)
    if "imports" in rows:
        rows["imports"] = run_imports(args)
    if "starts" in args.section:
        rows["commands"] = command_rows(args.rounds, args.threads)
        small = "demo" if args.quick else "llama-135m"
        if found := gguf_rows(small, checkpoint(small), args.rounds, args.threads):
            rows["a GGUF file"] = found
        shape = "gemma3-tiny" if args.quick else "tinyllama-1.1b"
        rows["kept weights"] = []
        for options in ((), ("quantization=int8",), ("quantization=int4",)):
            rows["kept weights"] += kept_rows(shape, checkpoint(shape), args.rounds, args.threads, *options)
    for section, found in rows.items():
        print(f"\n{section}")
        print_table(found)
    told = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    print_json({"benchmark": "models", "dtype": dtype, **told, "rows": rows})


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--section", nargs="+", choices=SECTIONS, help="default: all, without before if there is no --before"
    )
    parser.add_argument("--before", type=Path, metavar="PATH", help="a checkout of an earlier commit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=0.25, help="factor on the lengths of prompts")
    parser.add_argument("--max-tokens", type=int, default=24, help="of every request")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--quick", "--rehearse", action="store_true", help="tiny shapes and batches, one round"
    )
    args = parser.parse_args(argv)
    if args.section is None:
        args.section = [section for section in SECTIONS if section != "before" or args.before]
    if ("before" in args.section) != (args.before is not None):
        parser.error("--section before and --before PATH go together")
    if args.before is not None:
        args.before = args.before.resolve()
        for name in ("paged/__init__.py", "benchmarks/peers/worker.py"):
            if not (args.before / name).is_file():
                parser.error(f"--before {args.before}: has no {name}; a checkout of this project is needed")
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    if args.quick:
        args.rounds = 1
        args.scale = 0.05
        args.max_tokens = 4
    return args


def batches(section: str, args: argparse.Namespace) -> tuple[int, ...]:
    """Return the batches of a section."""
    return (QUICK_BATCHES if args.quick else BATCHES)[section]


def run_family(shape: str, args: argparse.Namespace, turns: Turns, rows: dict[str, list[Row]]) -> None:
    """Run one shape against its Llama and generate(), in the same rounds, and add to the rows."""
    directory = checkpoint(shape)
    twin = f"{shape}-as-llama"
    others = []
    if "llama" in rows:
        others.append(Way("llama", checkpoint(twin), batches("llama", args)))
    if "generate" in rows:
        others.append(Way("generate", directory, batches("generate", args), system="generate"))
    sizes = sorted({batch for way in others for batch in way.batches})
    ways = [Way("native", directory, tuple(sizes)), *others]
    if "llama" in rows:
        work = turns.workload(ways[0], sizes[-1], 0)
        pair = [counts(name, checkpoint(name), work, turns.dtype) for name in (shape, twin)]
        print_table(pair)
        assert_equal_cost(*pair)
        assert_within_windows(directory, turns.longest(ways))
    runs = turns.run(shape, ways)
    for way in others:
        rows[way.name] += ratio_rows(shape, runs, "native", way.name, TARGETS[way.name])


def run_before(args: argparse.Namespace, turns: Turns, rows: dict[str, list[Row]]) -> None:
    """Run the earlier shapes on both checkouts, start both, and add to the rows."""
    roots = {"now": ROOT, "before": args.before}
    rows["starts"] = []
    for shape, (rounds, tokens) in (QUICK_EARLIER if args.quick else EARLIER).items():
        directory = checkpoint(shape)
        ways = [Way(name, directory, batches("before", args), root=root) for name, root in roots.items()]
        longer = replace(
            turns,
            rounds=rounds * turns.rounds,
            scale=turns.scale / 2,
            max_tokens=tokens * turns.max_tokens,
        )
        runs = longer.run(shape, ways)
        rows["before"] += ratio_rows(shape, runs, "now", "before", TARGETS["before"])
        rows["starts"] += start_rows(shape, directory, roots, args)


def start_rows(shape: str, directory: str, roots: dict[str, Path], args: argparse.Namespace) -> list[Row]:
    """Start an engine of each checkout in turns; return a row for each phase."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in roots}
    rounds = args.rounds if args.quick else STARTS * args.rounds
    for round_ in range(-1, rounds):  # the first one compiles and fills the file cache
        for name in [*roots][:: 1 if round_ % 2 else -1]:
            run = start(directory, roots[name], args.threads)
            if round_ >= 0:
                found[name].append(run)
        print(f"{shape}, start {round_ + 1} of {rounds}", flush=True)
    seconds = {
        name: [sum(phase["seconds"] for phase in run["phases"]) for run in runs]
        for name, runs in found.items()
    }
    table = []
    for now, before in zip(medians(found["now"]), medians(found["before"]), strict=True):
        if now["seconds"]:
            table.append(
                (now["phase"], now["seconds"], before["seconds"], now["peak MiB"], before["peak MiB"])
            )
    table.append(("all", *map(statistics.median, seconds.values()), table[-1][3], table[-1][4]))
    return [
        {
            "shape": shape,
            "phase": phase,
            "now s": now_s,
            "before s": before_s,
            "ratio": before_s / now_s,
            "now peak MiB": now_peak,
            "before peak MiB": before_peak,
        }
        for phase, now_s, before_s, now_peak, before_peak in table
    ]


def run_imports(args: argparse.Namespace) -> list[Row]:
    """Measure imports and a native start in fresh processes. Check that no model class is imported."""
    found = []
    for round_ in range(args.rounds):
        found.append(start("demo", ROOT, args.threads, classes=True))
        check_native_start(found[-1])
        print(f"imports, {round_ + 1} of {args.rounds}", flush=True)
    return medians(found)


if __name__ == "__main__":
    main()
