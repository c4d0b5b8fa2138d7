"""How far is each kernel from its limit of bytes and FLOPs?

    python -m benchmarks.paged_attention

On a CPU the numba kernels, and how much longer plain torch takes. On a GPU the Triton kernels on a few
batches: `python -m benchmarks.gpu` measures all of them. The limits, bandwidth and matrix throughput, are
measured in the same run. Each case is compared with the reference before it is timed.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.cases import TINY_LAYER, Case, LayerShape, attention_case, layer_cases
from benchmarks.common import parse_args, print_json, print_table
from benchmarks.shapes import AttentionShape, decode, prefill, tiny_shapes
from benchmarks.timing import device_name, measure_limits, time_call
from paged.kernels.backend import load_kernels
from paged.kernels.checks import TrustedContents


def main() -> None:
    """Measure the limits, then every kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtype", default=None, choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--block-size", type=int, default=16)
    args = parse_args(parser)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    limits = measure_limits(device, dtype, tiny=args.rehearse)
    kernels = load_kernels("triton" if device.type == "cuda" else "numba")
    plain = load_kernels("torch") if device.type == "cpu" else None
    print(f"{kernels.name} kernels on {device_name(device)}, {dtype}")
    moved_by = "copied" if device.type == "cuda" else "copied or read"
    print(f"limits: {limits.bytes_per_s / 1e9:,.0f} GB/s {moved_by}, {limits.flops / 1e12:,.2f} TFLOP/s")
    rows: list[dict[str, Any]] = []
    for case in cases(args, dtype, device):
        case.check(kernels)
        with TrustedContents():  # as an engine's steps
            seconds = time_call(partial(case.run, kernels), device, tiny=args.rehearse).seconds
        moved, flops = case.cost
        rows.append(
            {
                "kernel": case.name,
                "us": seconds * 1e6,
                "GB/s": moved / seconds / 1e9,
                "GFLOP/s": flops / seconds / 1e9,
                "of limit": f"{limits.seconds(moved, flops) / seconds:.0%}",
            }
        )
        if plain is not None:
            with TrustedContents():
                timing = time_call(partial(case.run, plain), device, tiny=args.rehearse)
            rows[-1]["torch takes"] = timing.seconds / seconds
    print_table(rows)
    print_json({"benchmark": "paged_attention", "device": device_name(device), "rows": rows, **vars(limits)})


def cases(args: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Make a case for every kernel of a decoder layer, at the sizes of a decode and of a prefill."""
    if args.rehearse:
        layer = replace(TINY_LAYER, block_size=args.block_size)
        shapes = [replace(shape, block_size=args.block_size) for shape in tiny_shapes()]
        listed = [attention_case(shape, dtype, device) for shape in shapes]
        return listed + layer_cases(layer, 64, dtype, device)
    block_size = args.block_size
    large = device.type == "cuda"
    # A CPU gets the heads of TinyLlama, and contexts that it reads in milliseconds.
    layer = LayerShape() if large else LayerShape(32, 4, 64, block_size, 2048, 5632, 2)
    model = {
        "num_heads": layer.num_heads,
        "num_kv_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "block_size": block_size,
    }
    contexts = [(64, 1024), (64, 8192), (1, 65536)] if large else [(1, 512), (16, 512), (64, 512), (1, 4096)]
    chunks = [(1, 8192), (8, 1024)] if large else [(1, 512), (4, 128)]
    shapes = [decode(batch, context, **model) for batch, context in contexts]
    shapes.append(decode(*contexts[-2], cache="int8", **model))
    shapes += [prefill(batch, length, **model) for batch, length in chunks]
    lengths = (65536 if large else 512, *(17, 100, 250) * 21)
    name = f"decode {len(lengths)} x skewed, up to {max(lengths)}"
    shapes.append(AttentionShape("skewed", name, lengths, (1,) * len(lengths), **model))
    listed = [attention_case(shape, dtype, device) for shape in shapes]
    for num_tokens in (64, 4096 if large else 512):
        listed += layer_cases(layer, num_tokens, dtype, device)
    return listed


if __name__ == "__main__":
    main()
