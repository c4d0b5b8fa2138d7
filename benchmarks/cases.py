"""Operations with their inputs, each compared with the reference before it is timed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.costs import copy_blocks_cost, rms_norm_cost, rotary_store_kv_cost, silu_and_mul_cost
from benchmarks.shapes import AttentionShape
from paged.kernels import reference
from paged.kernels.attention_options import AttentionOptions, AttentionPlan
from paged.kernels.operations import Kernels

# ‖out - reference‖ / ‖reference‖ in float32.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 1e-2}
_CHECKED_ROWS = 32  # of a sequence's new tokens: the reference holds a score for every pair


@dataclass(frozen=True)
class Case:
    """One measurement: an operation, its arguments, and the least bytes and FLOPs it needs."""

    name: str
    op: str
    args: tuple[Any, ...]
    cost: tuple[int, int]
    options: dict[str, Any] = field(default_factory=dict)
    plans: dict[str, AttentionPlan] = field(default_factory=dict)  # of attention, by backend

    def check(self, kernels: Kernels) -> float:
        """Compare the result and everything written in place with the reference. Return the largest error."""
        if self.op == "paged_attention":
            return self.check_attention(self.run(kernels))
        results = []
        for implementation in (kernels, reference):
            args = [arg.clone() if isinstance(arg, Tensor) else arg for arg in self.args]
            returned = getattr(implementation, self.op)(*args, **self.options)
            if self.op == "rotary_store_kv":
                args = args[1:]  # the key heads of qkv are scratch memory, its query heads are the result
            results.append([returned, *(arg for arg in args if isinstance(arg, Tensor))])
        pairs = [(got, want) for got, want in zip(*results, strict=True) if isinstance(got, Tensor)]
        return max(assert_close(got, want) for got, want in pairs if got.is_floating_point())

    def check_attention(self, out: Tensor) -> float:
        """Check that every row is finite, and the last rows of the first, longest and last sequence."""
        query, key_cache, value_cache, tables, seq_lens, bounds = self.args
        assert out.isfinite().all(), f"{self.name}: not all of the output is finite"
        starts, lengths = bounds.tolist(), seq_lens.tolist()
        errors = []
        for i in sorted({0, lengths.index(max(lengths)), len(lengths) - 1}):
            rows = slice(max(starts[i], starts[i + 1] - _CHECKED_ROWS), starts[i + 1])
            num_rows = rows.stop - rows.start
            new = torch.tensor([0, num_rows], dtype=torch.int32, device=out.device)
            options = AttentionOptions(**{**self.options, "max_seqlen_q": num_rows})
            want = reference.paged_attention(
                query[rows], key_cache, value_cache, tables[i : i + 1], seq_lens[i : i + 1], new, options
            )
            errors.append(assert_close(out[rows], want))
        return max(errors)

    def run(self, kernels: Kernels) -> Any:
        """Call the operation once; attention as a layer of a step does whose plan is made."""
        if self.op != "paged_attention":
            return getattr(kernels, self.op)(*self.args, **self.options)
        options = AttentionOptions(**self.options)
        if kernels.name not in self.plans:
            self.plans[kernels.name] = kernels.plan_attention(*self.args, options)
        return kernels.paged_attention(*self.args, options, self.plans[kernels.name])


def assert_close(got: Tensor, want: Tensor) -> float:
    """Return the relative error of a result, which must be within that of its dtype."""
    error = float((got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-30))
    assert error <= TOLERANCES[got.dtype], f"relative error {error:.1e}"
    return error


def attention_case(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> Case:
    """Make a case of attention over shuffled blocks."""
    size = shape.block_size
    needed = [-(-n // size) for n in shape.seq_lens]
    num_blocks = sum(needed)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).int()
    tables = torch.zeros(len(needed), max(needed), dtype=torch.int32)
    for i, blocks in enumerate(order.split(needed)):
        tables[i, : needed[i]] = blocks
    options: dict[str, Any] = {"scale": shape.head_dim**-0.5, "max_seqlen_q": max(shape.query_lens)}
    caches = []
    for name in ("key", "value"):
        cache_shape = (num_blocks, size, shape.num_kv_heads, shape.head_dim)
        cache = torch.randn(cache_shape, dtype=dtype, device=device)
        if shape.cache is not None:
            cache, options[f"{name}_scales"] = quantize(cache, getattr(torch, shape.cache))
        caches.append(cache)
    query = torch.randn(sum(shape.query_lens), shape.num_heads, shape.head_dim, dtype=dtype, device=device)
    seq_lens = torch.tensor(shape.seq_lens, dtype=torch.int32, device=device)
    bounds = torch.tensor([0, *shape.query_lens]).cumsum(0).int()
    return Case(
        shape.name,
        "paged_attention",
        (query, *caches, tables.to(device), seq_lens, bounds.to(device)),
        shape.cost(dtype.itemsize),
        options,
    )


def quantize(cache: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise a cache to 8 bits. The scales are f32[num_blocks, num_kv_heads, block_size]."""
    largest = 127.0 if dtype == torch.int8 else 448.0
    scales = cache.float().abs().amax(-1) / largest
    values = cache.float() / scales[..., None]
    return (values.round() if dtype == torch.int8 else values).to(dtype), scales.transpose(1, 2).contiguous()


@dataclass(frozen=True)
class LayerShape:
    """The sizes that the kernels around attention need; by default those of Llama-3.1-8B."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_layers: int = 32


TINY_LAYER = LayerShape(4, 2, 32, 16, 64, 96, 2)


def layer_costs(shape: LayerShape, num_tokens: int, element_size: int) -> dict[str, tuple[int, int]]:
    """Return (bytes, FLOPs) of the kernels around attention, by operation."""
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    return {
        "rms_norm": rms_norm_cost(num_tokens, shape.hidden_size, element_size),
        "silu_and_mul": silu_and_mul_cost(num_tokens, shape.intermediate_size, element_size),
        "rotary_store_kv": rotary_store_kv_cost(num_tokens, heads, kv_heads, dim, element_size),
        "copy_blocks": copy_blocks_cost(
            num_tokens // 16, 2 * shape.num_layers, shape.block_size, kv_heads, dim, element_size
        ),
    }


def layer_cases(shape: LayerShape, num_tokens: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Make cases of the kernels around attention on num_tokens rows, and of num_tokens / 16 block copies."""

    def random(*size: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(size, dtype=dtype, device=device)

    hidden = shape.hidden_size
    qkv = random(num_tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
    angles = random(num_tokens, shape.head_dim // 2, dtype=torch.float32)
    num_blocks = -(-num_tokens // shape.block_size)
    block = (shape.block_size, shape.num_kv_heads, shape.head_dim)
    caches = [random(num_blocks, *block) for _ in range(2)]
    slots = torch.randperm(num_blocks * shape.block_size, device=device)[:num_tokens]
    num_copies = num_tokens // 16
    planes = random(2 * shape.num_layers, 2 * num_copies, *block)
    pairs = torch.randperm(2 * num_copies, device=device).view(num_copies, 2)
    arguments = {
        "rms_norm": (random(num_tokens, hidden), random(hidden), 1e-6, random(num_tokens, hidden)),
        "silu_and_mul": (random(num_tokens, 2 * shape.intermediate_size),),
        "rotary_store_kv": (qkv, angles.cos(), angles.sin(), *caches, slots),
        "copy_blocks": (planes, pairs),
    }
    # The kernel works in place and runs many times. With weights other than 1 and -1 most numbers would soon
    # be denormal, which is slow on a CPU.
    norms = {f"{name}_norm_weight": random(shape.head_dim).sign() for name in ("query", "key")}
    options = {"rotary_store_kv": norms}
    costs = layer_costs(shape, num_tokens, dtype.itemsize)
    return [
        Case(layer_name(op, num_tokens), op, args, costs[op], options.get(op, {}))
        for op, args in arguments.items()
    ]


def layer_name(op: str, num_tokens: int) -> str:
    """Return the name of one such case."""
    if op == "copy_blocks":
        return f"copy_blocks, {num_tokens // 16} blocks"
    options = {"rms_norm": " with residual", "rotary_store_kv": " with norms"}
    return f"{op}{options.get(op, '')}, {num_tokens} rows"
