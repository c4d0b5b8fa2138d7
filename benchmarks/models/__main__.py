"""How fast are families other than Llama, and what does a start cost?

    python -m benchmarks.models
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
prompts. Batches of fewer than 8 take up to 8 times as many rounds, as their runs are short. A ratio is the
ratio of medians, with the range of the rounds' ratios; above 1 is faster than what it is compared with. The
first run in a checkout compiles kernels and makes checkpoints, which takes minutes more.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from benchmarks.common import checkpoint, print_json, print_table
from benchmarks.models.beside_llama_cpp import gguf_rows
from benchmarks.models.commands import command_rows
from benchmarks.models.counts import assert_equal_cost, assert_within_windows, counts
from benchmarks.models.kept import kept_rows
from benchmarks.models.ways import Turns, Way, ratio_rows
from benchmarks.peers.report import Row
from paged.device.devices import resolve_dtype

SECTIONS = ("llama", "generate", "starts")
FAMILIES = {"gemma3-1b": "gemma3-tiny", "phi3-1b": "phi3-tiny"}
# Batches, and the ratio that is wanted.
BATCHES = {"llama": (1, 4, 16), "generate": (4, 16)}
QUICK_BATCHES = {"llama": (1, 2), "generate": (2,)}
TARGETS = {"llama": 0.9, "generate": 2.0}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the sections, print their tables and the JSON line."""
    args = parse_args(argv)
    dtype = resolve_dtype("auto", "bfloat16", torch.device("cpu"), False)
    turns = Turns(
        rounds=args.rounds, scale=args.scale, max_tokens=args.max_tokens, dtype=dtype, threads=args.threads
    )
    print(f"{dtype}, {args.threads} threads", flush=True)
    rows: dict[str, list[Row]] = {section: [] for section in args.section if section != "starts"}
    if {"llama", "generate"} & rows.keys():
        for shape, tiny in FAMILIES.items():
            run_family(tiny if args.quick else shape, args, turns, rows)
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
    print_json({"benchmark": "models", "dtype": dtype, **vars(args), "rows": rows})


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--section", nargs="+", choices=SECTIONS, default=SECTIONS, help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=0.25, help="factor on the lengths of prompts")
    parser.add_argument("--max-tokens", type=int, default=24, help="of every request")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--quick", "--rehearse", action="store_true", help="tiny shapes and batches, one round"
    )
    args = parser.parse_args(argv)
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


if __name__ == "__main__":
    main()
