"""How long should every kernel take, by counting bytes, FLOPs and instructions? No GPU needed.

    python -m benchmarks.roofline                    # every GPU of the table; compiles for minutes
    python -m benchmarks.roofline --target sm_90

For each batch, the limit is the least bytes and FLOPs that any kernel needs. The prediction adds what our
kernel does beyond that: it also moves the partial results of split decodes; its loop, compiled for the target
and read from the machine code (benchmarks/compiled.py), occupies an SM's schedulers and tensor cores for a
number of cycles per tile; and by Little's law it needs bandwidth times latency of bytes in flight. The
slowest of these, plus the launches, is the predicted time. It is optimistic: shared memory, barriers and
clocks below boost are not modelled. Nothing here is measured. Where benchmarks/results/ has results of
`python -m benchmarks.gpu`, they are shown beside the predictions.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import parse_args, print_json, print_table
from benchmarks.shapes import AttentionShape, attention_shapes

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet: dense bfloat16, no sparsity."""

    target: str
    bytes_per_s: float
    flops: float
    sms: int
    hertz: float  # boost: flops / (sms * flops of an SM's cycle)

    @property
    def flops_per_cycle(self) -> float:
        """FLOPs of one SM's tensor cores per cycle."""
        return self.flops / self.sms / self.hertz


# NVIDIA's data sheets of A100 80GB SXM, H100 SXM, H200 SXM and DGX B200 (an eighth of it); AMD's of MI300X.
# SMs and clocks: the architecture white papers (GA100, GH100), the CDNA 3 white paper; B200's clock follows
# from 8192 FLOP a cycle and SM.
GPUS = {
    "A100": Gpu("sm_80", 2.039e12, 312e12, 108, 1.41e9),
    "H100": Gpu("sm_90", 3.35e12, 989.4e12, 132, 1.83e9),
    "H200": Gpu("sm_90", 4.8e12, 989.4e12, 132, 1.83e9),
    "B200": Gpu("sm_100", 8.0e12, 2250e12, 148, 1.856e9),
    "MI300X": Gpu("gfx942", 5.3e12, 1307.4e12, 304, 2.1e9),
}
# Assumed for all of them: the latency of a load under load, and of a kernel launch behind another kernel.
LATENCY_S, LAUNCH_S = 1e-6, 2e-6


@dataclass(frozen=True)
class Work:
    """The work of our kernels on one batch."""

    moved: int
    flops: int
    partial_bytes: int  # written by the splits and read by the merge
    programs: int  # that could run at once
    tiles: int  # over all programs
    launches: int


@dataclass(frozen=True)
class Prediction:
    """The times of one batch in seconds, by cause."""

    limit: float
    memory: float  # bytes, partials included, at what is in flight
    compute: float  # issue and tensor cores
    launches: float

    @property
    def seconds(self) -> float:
        """The slower of memory and compute, plus the launches."""
        return max(self.memory, self.compute) + self.launches


def main() -> None:
    """Print a table for every GPU, the comparison with measurements, and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", choices=sorted({gpu.target for gpu in GPUS.values()}))
    parser.add_argument("--only", default="", help="batches whose name contains this")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parse_args(parser, target="sm_80", only="decode 64 x 1k, block 16")
    os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported: this compiles
    rows = []
    for name, gpu in GPUS.items():
        if args.target in (None, gpu.target):
            print(f"\n{name} ({gpu.target})", flush=True)
            table = [row_of(name, gpu, shape) for shape in attention_shapes() if args.only in shape.name]
            found = [row for row in table if row is not None]
            print_table(
                [{k: v for k, v in row.items() if k not in ("gpu", "flops", "bytes")} for row in found]
            )
            around = layer_rows(name, gpu) if not args.only or args.rehearse else []
            if around:
                print_table([{k: v for k, v in row.items() if k != "gpu"} for row in around])
            rows += found + around
    compared = compare(rows, args.results)
    if compared:
        print("\npredicted and measured")
        print_table(compared)
    else:
        print(f"\nno results in {args.results}: nothing has been measured to compare with")
    print_json({"benchmark": "roofline", "target": args.target, "rows": rows, "compared": compared})


def row_of(name: str, gpu: Gpu, shape: AttentionShape) -> dict[str, Any] | None:
    """Predict one batch on one GPU. None if there is no such kernel."""
    from benchmarks.compiled import compile_for

    if shape.cache == "float8_e4m3fn" and gpu.target in ("sm_80", "gfx942"):
        return None  # no e4m3, or another encoding of it
    compiled = compile_for(shape, gpu.target)
    work = count_work(shape, compiled.config.BLOCK_Q, compiled.config.TILE)
    cycles = tile_cycles(gpu, shape, compiled)
    in_flight = bytes_in_flight(gpu, shape, compiled, work.programs)
    predicted = predict(gpu, work, cycles, in_flight)
    return {
        "gpu": name,
        "case": shape.name,
        "bytes": work.moved,
        "flops": work.flops,
        "MB": work.moved / 1e6,
        "GFLOP": work.flops / 1e9,
        "partials": work.partial_bytes / work.moved,
        "issue": compiled.issue_cycles(),
        "cycles": cycles,
        "blocks/SM": compiled.blocks_per_sm,
        "KB/SM": in_flight / gpu.sms / 1e3,
        "needed": gpu.bytes_per_s * LATENCY_S / gpu.sms / 1e3,
        "limit us": predicted.limit * 1e6,
        "memory us": predicted.memory * 1e6,
        "compute us": predicted.compute * 1e6,
        "us": predicted.seconds * 1e6,
        "of limit": f"{predicted.limit / predicted.seconds:.0%}",
    }


def count_work(shape: AttentionShape, block_q: int, tile: int) -> Work:
    """Count the work of the kernels on this batch, with bfloat16 queries."""
    moved, flops = shape.cost(2)
    kv_heads = shape.num_kv_heads
    most_splits = len(splits(max(shape.seq_lens)))
    launches = 2 + (most_splits > 1) + (not shape.is_decode)
    if not shape.is_decode:  # a program for each Q-block and KV head
        ends = [min(end, n) for n in shape.seq_lens for end in range(block_q, n + block_q, block_q)]
        tiles = sum(-(-end // tile) for end in ends)
        return Work(moved, flops, 0, len(ends) * kv_heads, tiles * kv_heads, launches)
    items = [splits(n) for n in shape.seq_lens]
    programs = sum(map(len, items))
    tiles = sum(-(-length // tile) for lengths in items for length in lengths)
    # float32: the unnormalised output of every split, its maximum and its sum, written and read once.
    num_partials = sum(len(lengths) for lengths in items if len(lengths) > 1)
    partial = 2 * num_partials * shape.num_heads * (shape.head_dim + 2) * 4
    return Work(moved, flops, partial, programs * kv_heads, tiles * kv_heads, launches)


def splits(num_keys: int) -> list[int]:
    """Return the lengths of a decode's splits, as split_kv lists them on the device."""
    from paged.kernels.gpu.attention.config import SPLIT
    from paged.kernels.gpu.attention.split_kv import MAX_SPLITS

    step = -(-num_keys // (SPLIT * MAX_SPLITS)) * SPLIT
    return [min(step, num_keys - start) for start in range(0, num_keys, step)]


def tile_cycles(gpu: Gpu, shape: AttentionShape, compiled: Any) -> float:
    """Return the cycles that an SM needs for one tile of one block."""
    config = compiled.config
    tensor = 4 * config.BLOCK_M * config.TILE * shape.head_dim / gpu.flops_per_cycle
    issue: float = compiled.issue_cycles()
    # A single block waits for its matrix products. With several, one issues while another multiplies.
    return tensor + issue if compiled.blocks_per_sm == 1 else max(tensor, issue)


def bytes_in_flight(gpu: Gpu, shape: AttentionShape, compiled: Any, programs: int) -> float:
    """Return the bytes that all blocks together have requested at any time."""
    element = 1 if shape.cache else 2
    tile = 2 * compiled.config.TILE * shape.head_dim * element
    resident = compiled.blocks_per_sm * gpu.sms
    return float(min(resident, programs) * compiled.tiles_in_flight() * tile)


def predict(gpu: Gpu, work: Work, cycles: float, in_flight: float) -> Prediction:
    """Predict the times of one batch."""
    # The last round of programs keeps only some of the SMs busy.
    rounds = math.ceil(work.programs / gpu.sms) / (work.programs / gpu.sms)
    return Prediction(
        limit=max(work.moved / gpu.bytes_per_s, work.flops / gpu.flops),
        memory=(work.moved + work.partial_bytes) / min(gpu.bytes_per_s, in_flight / LATENCY_S),
        compute=work.tiles * cycles / gpu.sms / gpu.hertz * rounds,
        launches=work.launches * LAUNCH_S,
    )


def layer_rows(name: str, gpu: Gpu) -> list[dict[str, Any]]:
    """Predict the kernels around attention, each a single launch bound by bandwidth."""
    from benchmarks.cases import LayerShape, layer_costs, layer_name

    rows = []
    for num_tokens in (64, 4096):
        for op, (moved, flops) in layer_costs(LayerShape(), num_tokens, 2).items():
            limit = moved / gpu.bytes_per_s
            row = {"gpu": name, "case": layer_name(op, num_tokens), "bytes": moved, "flops": flops}
            seconds = limit + LAUNCH_S
            rows.append(
                row | {"limit us": limit * 1e6, "us": seconds * 1e6, "of limit": f"{limit / seconds:.0%}"}
            )
    return rows


def compare(rows: list[dict[str, Any]], results: Path) -> list[dict[str, Any]]:
    """Pair every measurement of benchmarks.gpu on a GPU of the table with its prediction."""
    predicted = {(row["gpu"], row["case"]): row for row in rows}
    compared = []
    for path in sorted(results.glob("*.json")):
        result = json.loads(path.read_text())
        gpu = next((name for name in GPUS if name in result["device"]["name"]), None)
        measured = [row for section in result["sections"].values() for row in section["rows"] if "us" in row]
        for row in measured:
            model = predicted.get((gpu or "", row["case"]))
            if model is not None:
                compared.append(
                    {
                        "gpu": gpu,
                        "case": row["case"],
                        "predicted us": model["us"],
                        "measured us": row["us"],
                        "measured / predicted": row["us"] / model["us"],
                    }
                )
    return compared


if __name__ == "__main__":
    main()
