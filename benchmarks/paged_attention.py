"""How far is each kernel from its limit of bytes and FLOPs?

    python -m benchmarks.paged_attention

On a GPU the Triton kernels, compiled; on a CPU what the CPU runs, the torch path. The limits, copy bandwidth
and matrix throughput, are measured in the same run. Each case is compared with the reference before its turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import print_json, print_table
from paged.kernels import reference
from paged.kernels.backend import Kernels, load_kernels


@dataclass(frozen=True)
class Limits:
    """What this device reaches: bytes/s in a copy (read and written) and FLOP/s in a matrix product."""

    bytes_per_s: float
    flops: float

    def seconds(self, moved: int, flops: int) -> float:
        """The least time for a kernel that moves and computes this much."""
        return max(moved / self.bytes_per_s, flops / self.flops)


@dataclass(frozen=True)
class Shape:
    """Heads of the model whose kernels are timed."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    hidden_size: int = 4096
    intermediate_size: int = 14336


@dataclass(frozen=True)
class Case:
    """One measurement: an operation, its arguments, and the bytes and FLOPs it cannot do without."""

    name: str
    op: str
    args: tuple[Any, ...]
    cost: tuple[int, int]
    options: dict[str, Any] = field(default_factory=dict)

    def check(self, kernels: Kernels) -> None:
        """Compare what is returned and what is written in place with the reference."""
        results = []
        for implementation in (kernels, reference):
            args = [arg.clone() if isinstance(arg, Tensor) else arg for arg in self.args]
            returned = getattr(implementation, self.op)(*args, **self.options)
            results.append([returned, *(arg for arg in args if isinstance(arg, Tensor))])
        tolerance = 1e-4 if self.args[0].dtype == torch.float32 else 2e-2
        torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)

    def run(self, kernels: Kernels) -> None:
        """Call the operation once."""
        getattr(kernels, self.op)(*self.args, **self.options)


def main() -> None:
    """Measure the limits, then every kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtype", default=None, choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--block-size", type=int, default=16)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    # A CPU gets the heads of TinyLlama and contexts that it can read in a moment.
    shape = Shape() if device.type == "cuda" else Shape(32, 4, 64, args.block_size, 2048, 5632)
    shape = Shape(**{**vars(shape), "block_size": args.block_size})
    limits = measure_limits(device, dtype)
    kernels = load_kernels("triton" if device.type == "cuda" else "torch")
    print(f"{kernels.name} kernels on {device_name(device)}, {dtype}, {shape}")
    print(f"limits: {limits.bytes_per_s / 1e9:,.0f} GB/s copied, {limits.flops / 1e12:,.2f} TFLOP/s")
    rows: list[dict[str, Any]] = []
    for case in cases(shape, dtype, device):
        case.check(kernels)
        seconds = measure(partial(case.run, kernels), device)
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
    print_table(rows)
    print_json({"benchmark": "paged_attention", "device": device_name(device), "rows": rows, **vars(limits)})


def cases(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Every kernel of a decoder layer at a decode and a prefill size."""
    large = device.type == "cuda"
    contexts = [(64, 1024), (64, 8192), (1, 65536)] if large else [(1, 512), (16, 512), (64, 512), (1, 4096)]
    chunks = [(1, 8192), (8, 1024)] if large else [(1, 512), (4, 128)]
    listed = [attention_case(shape, [n] * b, [1] * b, dtype, device) for b, n in contexts]
    listed += [attention_case(shape, [n] * b, [n] * b, dtype, device) for b, n in chunks]
    skewed = [512 if not large else 65536] + [17, 100, 250] * 21
    listed.append(attention_case(shape, skewed, [1] * len(skewed), dtype, device))
    for num_tokens in (64, 4096 if large else 512):
        listed += layer_cases(shape, num_tokens, dtype, device)
    return listed


def attention_case(
    shape: Shape,
    seq_lens: list[int],
    query_lens: list[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Case:
    """Attention over shuffled blocks."""
    from paged.kernels.paged_attention import paged_attention_cost

    tables = [-(-n // shape.block_size) for n in seq_lens]
    num_blocks = sum(tables)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).int()
    block_tables = torch.zeros(len(seq_lens), max(tables), dtype=torch.int32)
    for i, blocks in enumerate(order.split(tables)):
        block_tables[i, : len(blocks)] = blocks
    cache_shape = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
    key_cache = torch.randn(cache_shape, dtype=dtype, device=device)
    value_cache = torch.randn(cache_shape, dtype=dtype, device=device)
    query = torch.randn(sum(query_lens), shape.num_heads, shape.head_dim, dtype=dtype, device=device)
    lengths = torch.tensor([0, *query_lens]).cumsum(0).int()
    inputs = (query, key_cache, value_cache, block_tables.to(device))
    inputs += (torch.tensor(seq_lens, dtype=torch.int32, device=device), lengths.to(device))
    kind = "decode" if max(query_lens) == 1 else "prefill"
    skew = "skewed, up to " if len(set(seq_lens)) > 1 else ""
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    return Case(
        f"paged_attention {kind}, {len(seq_lens)} x {skew}{max(seq_lens)}",
        "paged_attention",
        inputs,
        paged_attention_cost(query_lens, seq_lens, *heads, dtype.itemsize),
        {"scale": shape.head_dim**-0.5, "max_seqlen_q": max(query_lens)},
    )


def layer_cases(shape: Shape, num_tokens: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """The kernels around attention, on num_tokens rows."""
    from paged.kernels.rms_norm import rms_norm_cost
    from paged.kernels.rotary_store_kv import rotary_store_kv_cost
    from paged.kernels.silu_and_mul import silu_and_mul_cost

    def random(*size: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(size, dtype=dtype, device=device)

    hidden, size = shape.hidden_size, dtype.itemsize
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    qkv = random(num_tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
    norms = {f"{name}_norm_weight": random(shape.head_dim) for name in ("query", "key")}
    angles = random(num_tokens, shape.head_dim // 2, dtype=torch.float32)
    num_blocks = -(-num_tokens // shape.block_size)
    caches = [random(num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim) for _ in range(2)]
    slots = torch.randperm(num_blocks * shape.block_size, device=device)[:num_tokens]
    rows = f"{num_tokens} rows"
    return [
        Case(
            f"rms_norm with residual, {rows}",
            "rms_norm",
            (random(num_tokens, hidden), random(hidden), 1e-6, random(num_tokens, hidden)),
            rms_norm_cost(num_tokens, hidden, size, residual=True),
        ),
        Case(
            f"silu_and_mul, {rows}",
            "silu_and_mul",
            (random(num_tokens, 2 * shape.intermediate_size),),
            silu_and_mul_cost(num_tokens, shape.intermediate_size, size),
        ),
        *(
            Case(
                f"rotary_store_kv{' with norms' if options else ''}, {rows}",
                "rotary_store_kv",
                (qkv, angles.cos(), angles.sin(), *caches, slots),
                rotary_store_kv_cost(num_tokens, *heads, size, norm=bool(options)),
                options,
            )
            for options in ({}, norms)
        ),
    ]


def measure_limits(device: torch.device, dtype: torch.dtype) -> Limits:
    """A large copy and a large matrix product."""
    source = torch.empty(2**28 if device.type == "cuda" else 2**26, dtype=torch.float32, device=device).fill_(
        1
    )
    target = torch.empty_like(source)
    n = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    return Limits(
        2 * source.numel() * 4 / measure(lambda: target.copy_(source), device),
        2 * n**3 / measure(lambda: a @ b, device),
    )


def measure(run: Callable[[], Any], device: torch.device) -> float:
    """Median seconds of a call; on a GPU between events, with the L2 cache flushed before each."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return float(do_bench(run, return_mode="median")) / 1e3
    run()
    times: list[float] = []
    while sum(times) < 0.3 or len(times) < 5:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def device_name(device: torch.device) -> str:
    """What the numbers were measured on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    main()
