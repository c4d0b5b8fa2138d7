"""What is compiled ahead of time: each kernel launched for every case that may need code of its own."""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from paged.kernels.attention_options import AttentionOptions
from paged.kernels.checks import QUANTIZED_DTYPES
from paged.kernels.codes import (
    PackedCodes,
    PackedExperts,
    coded_linear,
    grouped_coded_linear,
    pack_codes,
    take_coded_rows,
)
from paged.kernels.gpu.attention.config import choose_config, largest_head_dim
from paged.kernels.gpu.experts.grouped_linear import grouped_linear
from paged.kernels.gpu.sampling.penalties import apply_penalties
from paged.kernels.gpu.sampling.sample_tokens import sample_tokens
from paged.kernels.gpu.sampling.take_parameters import take_parameters
from paged.kernels.gpu.unpack_step import unpack_step
from paged.kernels.operations import Kernels
from paged.kernels.routing import RoutingOptions
from paged.kernels.seats import NUM_COLUMNS, NUM_PARAMETER_WORDS, NUM_TOKEN_COLUMNS, StepTensors
from tests.support.absent_gpu import TARGETS
from tests.support.coded_weights import coded_weight

DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "int8", "float8_e4m3fn")}
# Every row of choose_config's tables and each branch of the kernels, with head dims that are padded and the
# smallest and the largest blocks: head_dim, group, dtype, block_size, and what else is not as usual.
AttentionCase = tuple[int, int, str, int, dict[str, Any]]
ATTENTION_CASES: list[AttentionCase] = [
    (128, 4, "bfloat16", 16, {"window": 4096}),
    (128, 7, "float16", 64, {}),
    (128, 20, "bfloat16", 64, {}),
    (256, 4, "bfloat16", 16, {"window": 4096, "softcap": True}),
    (96, 3, "float16", 8, {"window": 1024}),
    (32, 1, "bfloat16", 256, {}),
    (64, 8, "bfloat16", 16, {"window": 128, "sinks": True}),
    (128, 4, "bfloat16", 16, {"cache": "int8"}),
    (128, 4, "bfloat16", 16, {"cache": "float8_e4m3fn"}),
    (128, 4, "bfloat16", 16, {"max_decode_q": 8}),
    (576, 16, "bfloat16", 64, {"value_dim": 512}),
    (64, 4, "float32", 16, {}),
    (128, 7, "float32", 16, {}),
    (256, 4, "float32", 16, {"window": 4096}),
    (576, 16, "float32", 64, {"value_dim": 512}),
    (64, 4, "bfloat16", 64, {}),
    (128, 4, "bfloat16", 128, {"window": 4096, "sinks": True}),
    (128, 4, "bfloat16", 64, {"cache": "float8_e4m3fn"}),
    (256, 4, "bfloat16", 64, {"cache": "int8"}),
    (256, 4, "bfloat16", 64, {"softcap": True}),
    (128, 4, "bfloat16", 64, {}),
    # Decodes of groups beyond 16 rows.
    (64, 32, "bfloat16", 16, {"decodes": True}),
    (256, 32, "bfloat16", 16, {"decodes": True}),
    (576, 128, "bfloat16", 64, {"value_dim": 512, "decodes": True}),
    (64, 32, "float32", 16, {"decodes": True}),
    (128, 32, "float32", 16, {"decodes": True}),
    (256, 32, "float32", 16, {"decodes": True}),
    (576, 128, "float32", 64, {"value_dim": 512, "decodes": True}),
    # Values of other dimensions than keys that are no view of them; the widest of each row; an 8-bit cache,
    # and one narrower than queries of float32, for every row.
    (192, 4, "bfloat16", 16, {"value_dim": 128}),
    (64, 4, "bfloat16", 16, {"cache": "int8"}),
    (576, 128, "bfloat16", 64, {"value_dim": 512}),
    (512, 4, "bfloat16", 16, {}),
    (192, 4, "float32", 16, {"value_dim": 128}),
    (256, 4, "bfloat16", 16, {"cache": "int8"}),
    (576, 16, "bfloat16", 64, {"value_dim": 512, "cache": "int8"}),
    (576, 4, "bfloat16", 16, {}),
    (576, 4, "float32", 16, {}),
    (64, 32, "bfloat16", 16, {"cache": "int8", "decodes": True}),
    (128, 32, "bfloat16", 16, {"cache": "int8", "decodes": True}),
    (64, 4, "float32", 16, {"cache": "bfloat16"}),
    (128, 4, "float32", 16, {"cache": "float16"}),
    (256, 32, "bfloat16", 16, {"cache": "int8", "decodes": True}),
    (576, 128, "bfloat16", 64, {"value_dim": 512, "cache": "int8", "decodes": True}),
    (256, 4, "float32", 16, {"cache": "int8"}),
    (576, 16, "float32", 64, {"value_dim": 512, "cache": "float16"}),
    (576, 32, "bfloat16", 16, {"decodes": True}),
    (576, 32, "float32", 16, {"decodes": True}),
    (128, 4, "float16", 16, {"cache": "int8"}),
    # A few tokens of a decode are more rows too.
    (64, 8, "bfloat16", 64, {"max_decode_q": 8}),
    (128, 8, "bfloat16", 64, {"max_decode_q": 8}),
    (128, 8, "bfloat16", 16, {"max_decode_q": 4, "cache": "int8"}),
    (256, 8, "bfloat16", 16, {"max_decode_q": 4}),
]
# Of these, what people run on GPUs of their own; compiled for CONSUMER_TARGETS too.
COMMON_CASES: list[AttentionCase] = [
    (64, 4, "bfloat16", 64, {}),  # Llama 3.2 1B
    (128, 4, "bfloat16", 16, {"window": 4096}),  # Mistral 7B
    (128, 7, "float16", 64, {}),  # Qwen 2.5 7B
    (96, 3, "float16", 8, {"window": 1024}),  # Phi-3
    (256, 4, "bfloat16", 16, {"window": 4096, "softcap": True}),  # Gemma 2
    (64, 8, "bfloat16", 16, {"window": 128, "sinks": True}),  # gpt-oss
    (576, 16, "bfloat16", 64, {"value_dim": 512}),  # DeepSeek V2 Lite
    (64, 4, "bfloat16", 16, {"cache": "int8"}),
    (128, 4, "bfloat16", 16, {"cache": "int8"}),
    (256, 4, "bfloat16", 16, {"cache": "int8"}),
    (128, 4, "bfloat16", 16, {"cache": "float8_e4m3fn"}),
    (128, 4, "bfloat16", 64, {"cache": "float8_e4m3fn"}),
    (64, 4, "float32", 16, {}),
    (128, 7, "float32", 16, {}),
    (64, 32, "bfloat16", 16, {"decodes": True}),
    (128, 4, "bfloat16", 16, {"max_decode_q": 8}),
    (64, 8, "bfloat16", 64, {"max_decode_q": 8}),  # speculative tokens
]
# e4m3 arithmetic begins with sm_89, and AMD's has a format of its own.
FP8_TARGETS = ("sm_89", "sm_90", "sm_100", "sm_120")


def has_case(target: str, case: AttentionCase) -> bool:
    """Return whether a target has kernels for this head_dim and cache, and for so many tokens of a decode."""
    head_dim, group, dtype, _, options = case
    if head_dim > largest_head_dim(target) or target not in targets_of(options.get("cache")):
        return False
    queries = options.get("max_decode_q", 1)
    config = choose_config(head_dim, group, DTYPES[dtype], "decode", target, queries=queries)
    return queries <= config.BLOCK_Q


def targets_of(cache: str | None) -> tuple[str, ...]:
    """Return the targets that have such a cache."""
    return FP8_TARGETS if cache == "float8_e4m3fn" else tuple(TARGETS)


def launch_attention(
    kernels: Kernels,
    head_dim: int,
    group: int,
    dtype: torch.dtype,
    block_size: int,
    *,
    window: int | None = None,
    value_dim: int | None = None,
    cache: str | None = None,
    softcap: bool = False,
    sinks: bool = False,
    decodes: bool = False,
    max_decode_q: int = 1,
    num_tokens: int = 40,
    num_seqs: int = 2,
    max_blocks: int = 128,
) -> None:
    """Launch attention once, as a batch with prefill does: it compiles prefill, plan, decode and merge.

    decodes: as a batch of decodes does, without prefill.
    Values of 512 dimensions are a view of the keys of one KV head, as in MLA. A `cache` of another dtype than
    queries has scales where it is quantised.
    """
    is_mla = value_dim == 512
    num_kv_heads, num_blocks = 1 if is_mla else 2, 4
    num_heads = num_kv_heads * group
    if decodes:
        num_tokens = num_seqs
    sizes = num_blocks, block_size, num_kv_heads
    key_cache = torch.empty(*sizes, head_dim, dtype=DTYPES[cache] if cache else dtype)
    quantized = key_cache.dtype in QUANTIZED_DTYPES
    scales = torch.empty(num_blocks, num_kv_heads, block_size) if quantized else None
    kernels.paged_attention(
        torch.empty(num_tokens, num_heads, head_dim, dtype=dtype),
        key_cache,
        key_cache[..., :512] if is_mla else key_cache.new_empty(*sizes, value_dim or head_dim),
        torch.zeros(num_seqs, max_blocks, dtype=torch.int32),
        torch.zeros(num_seqs, dtype=torch.int32),
        torch.zeros(num_seqs + 1, dtype=torch.int32),
        AttentionOptions(
            scale=head_dim**-0.5,
            max_seqlen_q=1 if decodes else num_tokens,
            sliding_window=window,
            softcap=50.0 if softcap else None,
            sinks=torch.empty(num_heads) if sinks else None,
            key_scales=scales,
            value_scales=scales,
            max_decode_q=max_decode_q,
        ),
    )


def other_launches(
    kernels: Kernels, dtype: torch.dtype, num_tokens: int = 5
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield launches of the kernels that know no heads, as a layer of Llama-3-8B does, and what each is."""
    size = 4096

    def new(*shape: int) -> Tensor:
        return torch.empty(num_tokens, *shape, dtype=dtype)

    hidden, residual, weight = new(size), new(size), torch.empty(size, dtype=dtype)
    yield from _norm_launches(kernels, hidden, residual, weight)
    heads = new(12, 256)[:, 8:]
    narrow = torch.empty(256, dtype=dtype)
    yield "RMS, heads", lambda: kernels.rms_norm_into(heads, narrow, 1e-6, heads)  # Gemma 4's norm of V
    yield "gelu", lambda: kernels.gelu(new(4 * size), tanh=False)
    yield "gelu, tanh", lambda: kernels.gelu(new(4 * size), tanh=True)
    yield "silu_and_mul", lambda: kernels.silu_and_mul(new(2 * 14336))
    yield "gelu_and_mul", lambda: kernels.gelu_and_mul(new(2 * 14336))
    yield "clamped_swiglu", lambda: kernels.clamped_swiglu(new(2 * 2880), 7.0, 1.702)
    ups = new(30 * 256)[:, 512:768]  # of a layer, among those of all
    yield "gelu_and_mul, two tensors", lambda: kernels.gelu_and_mul(new(256), ups)
    angles = torch.empty(num_tokens, 256)
    query = {"query_norm_weight": torch.empty(512, dtype=dtype)}  # of a layer that reads K and V of another
    yield "", lambda: kernels.rotary_store_kv(new(8, 512), angles, angles, None, None, None, **query)
    yield "", lambda: kernels.scale_and_cap(hidden, 12.0)
    yield "", lambda: kernels.scale_and_cap(torch.empty(num_tokens, VOCAB_SIZE), 1.0, 30.0)
    yield "", lambda: kernels.scale_rows(new(6144)[:, :size], torch.empty(num_tokens))
    yield from _state_launches(kernels, dtype, num_tokens)
    yield from _lora_launches(kernels, dtype, num_tokens)
    planes = torch.empty(2, 4, 16, 8, 128, dtype=dtype)
    yield "", lambda: kernels.copy_blocks(planes, torch.zeros(num_tokens, 2, dtype=torch.int64))
    yield "", lambda: launch_unpack_step(num_tokens)
    table = torch.zeros(257, NUM_PARAMETER_WORDS, dtype=torch.int32)
    yield "", lambda: take_parameters(table, torch.zeros(num_tokens, dtype=torch.int64))


def _state_launches(
    kernels: Kernels, dtype: torch.dtype, num_tokens: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield launches of the layers with states of Qwen3.5-9B, LFM2-1.2B and Nemotron 3 Nano, over one
    sequence.
    """
    sequence = tuple(torch.zeros(size, dtype=torch.int32) for size in (1, 1, 2))
    columns, num_heads = 8192, 32
    made = torch.empty(num_tokens, columns + 4096 + 2 * num_heads, dtype=dtype)
    qkv, gate, gates = made.split([columns, 4096, 2 * num_heads], dim=1)
    inputs = torch.empty(4, 3, columns, dtype=dtype)
    taps, rates = torch.empty(4, columns), torch.empty(num_heads)
    yield "", lambda: kernels.short_conv(qkv, taps, None, inputs, *sequence, gated=False)
    gated, narrow = torch.empty(num_tokens, 3 * 2048, dtype=dtype), torch.empty(4, 2, 2048, dtype=dtype)
    yield (
        "gated",
        lambda: kernels.short_conv(gated, torch.empty(3, 2048), None, narrow, *sequence, gated=True),
    )
    states = torch.empty(4, num_heads, 128, 128)
    mixed = torch.empty(num_tokens, columns, dtype=dtype)
    yield "", lambda: kernels.gated_delta(mixed, gates, rates, rates, states, *sequence)
    # With the inputs of runs of 4 drafts.
    runs = torch.zeros(1, 2, dtype=torch.int32)
    columns_of_runs = torch.empty(4, 10, columns, dtype=dtype), runs
    rows_of_runs = torch.empty(4, 10, columns + 2 * num_heads, dtype=dtype), runs
    columns_of_narrow = torch.empty(4, 10, 2048, dtype=dtype), runs
    wide = taps, None, inputs, *sequence, *columns_of_runs
    yield "runs", lambda: kernels.short_conv(qkv, *wide, gated=False)
    few = torch.empty(3, 2048), None, narrow, *sequence, *columns_of_narrow
    yield "gated, runs", lambda: kernels.short_conv(gated, *few, gated=True)
    yield "runs", lambda: kernels.gated_delta(mixed, gates, rates, rates, states, *sequence, *rows_of_runs)
    heads = torch.empty(num_tokens, num_heads, 128, dtype=dtype)
    yield "", lambda: kernels.gated_norm(heads, torch.empty(128, dtype=dtype), gate, 1e-6)
    yield from _mamba_launches(kernels, dtype, num_tokens)
    attended = torch.empty(num_tokens, 4096, dtype=dtype)
    yield "", lambda: kernels.scale_by_sigmoid(attended, gate)


def _lora_launches(
    kernels: Kernels, dtype: torch.dtype, num_tokens: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield launches of adapters of rank 16 and 64, for Q, K and V and for `down` of Llama-3.2-1B."""
    slots = torch.zeros(num_tokens, dtype=torch.int32)
    for sizes, in_features, rank in (((2048, 512, 512), 2048, 16), ((2048,), 8192, 64)):
        ends = [*accumulate(sizes)]
        columns = [[end - size, end, i] for i, (size, end) in enumerate(zip(sizes, ends, strict=True))]
        given = (
            torch.empty(num_tokens, in_features, dtype=dtype),
            torch.empty(num_tokens, ends[-1], dtype=dtype),
            torch.empty(4, len(sizes), rank, in_features, dtype=dtype),
            torch.empty(4, rank, ends[-1], dtype=dtype),
            torch.zeros(4, len(sizes), dtype=torch.int32),
            torch.tensor(columns, dtype=torch.int32),
            slots,
        )
        yield f"{rank}x{len(sizes)}", lambda given=given: kernels.add_lora(*given)


def _mamba_launches(
    kernels: Kernels, dtype: torch.dtype, num_tokens: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    sequence = tuple(torch.zeros(size, dtype=torch.int32) for size in (1, 1, 2))
    inner, columns, num_heads = 4096, 6144, 64
    made = torch.empty(num_tokens, inner + columns + num_heads, dtype=dtype)
    gate, x, steps = made.split([inner, columns, num_heads], dim=1)
    inputs = torch.empty(4, 3, columns, dtype=dtype)
    taps, of_columns, of_heads = torch.empty(4, columns), torch.empty(columns), torch.empty(num_heads)
    yield "bias", lambda: kernels.short_conv(x, taps, of_columns, inputs, *sequence, gated=False)
    states = torch.empty(4, num_heads, 128, 64)
    mixed = torch.empty(num_tokens, columns, dtype=dtype)
    given = of_heads, of_heads, of_heads, states
    limits = 0.001, float("inf")
    yield "", lambda: kernels.mamba2_scan(mixed, steps, *given, *sequence, limits=limits)
    # With the inputs of runs of 4 drafts.
    runs = torch.zeros(1, 2, dtype=torch.int32)
    wide = *sequence, torch.empty(4, 10, columns, dtype=dtype), runs
    yield "bias, runs", lambda: kernels.short_conv(x, taps, of_columns, inputs, *wide, gated=False)
    rows = *sequence, torch.empty(4, 10, columns + num_heads, dtype=dtype), runs
    yield "runs", lambda: kernels.mamba2_scan(mixed, steps, *given, *rows, limits=limits)
    groups, weight = torch.empty(num_tokens, 8, 512, dtype=dtype), torch.empty(inner, dtype=dtype)
    yield "gate first", lambda: kernels.gated_norm(groups, weight, gate, 1e-5, gate_first=True)
    yield "no norm", lambda: kernels.gated_norm(groups, None, gate, 1e-5)  # Falcon-H1's
    inner_rows = torch.empty(num_tokens, 4 * 2688, dtype=dtype)
    yield "relu_squared", lambda: kernels.relu_squared(inner_rows)


def _norm_launches(
    kernels: Kernels, hidden: Tensor, residual: Tensor, weight: Tensor
) -> Iterator[tuple[str, Callable[[], object]]]:
    given = hidden, weight, 1e-6
    bias = torch.empty_like(weight)
    yield "RMS, residual", lambda: kernels.rms_norm(*given, residual)
    yield "RMS", lambda: kernels.rms_norm(*given)
    yield "RMS", lambda: kernels.rms_norm_into(*given, hidden)  # OLMo's norms of Q and K
    yield "RMS, unit_offset", lambda: kernels.rms_norm(*given, unit_offset=True)
    yield "RMS, add", lambda: kernels.rms_norm_into(*given, residual, add=True)
    yield "RMS, add, unit_offset", lambda: kernels.rms_norm_into(*given, residual, unit_offset=True, add=True)
    yield "LayerNorm", lambda: kernels.layer_norm(hidden, weight, bias, 1e-6)
    yield "LayerNorm, residual", lambda: kernels.layer_norm(hidden, weight, bias, 1e-6, residual)


def launch_others(kernels: Kernels, dtype: torch.dtype, num_tokens: int = 5) -> None:
    """Launch all of `other_launches`."""
    for _, launch in other_launches(kernels, dtype, num_tokens):
        launch()


def launch_unpack_step(num_rows: int) -> None:
    """Launch it as a step of decodes and one prompt does, with 256 seats of 128k tokens."""
    ints = torch.zeros(num_rows + 1, dtype=torch.int32)
    out = StepTensors(
        torch.zeros(NUM_TOKEN_COLUMNS + 1, num_rows + 99, dtype=torch.int64),
        torch.zeros(1, 2 * num_rows + 1, 8192, dtype=torch.int32),
        ints[:num_rows],
        ints,
    )
    unpack_step(
        torch.zeros(num_rows, NUM_COLUMNS, dtype=torch.int32),
        ints,
        ints,
        ints.view(1, -1),
        torch.zeros(256, dtype=torch.int64),
        torch.zeros(1, 256, 8192, dtype=torch.int32),
        ints,
        None,
        out,
        num_tokens=num_rows + 99,
        longest=100,
        block_size=16,
    )


# num_heads, num_kv_heads, head_dim, dtype, norm, dtype of the cache: every shape of tile, full and padded.
# "fixed" in the place of the norm: with fixed scales of the cache.
ROTARY_CASES: list[tuple[int, int, int, str, str, str | None]] = [
    (32, 8, 64, "bfloat16", "", None),
    (32, 4, 64, "bfloat16", "norm", None),
    (32, 8, 128, "bfloat16", "", None),
    (16, 8, 128, "bfloat16", "norm", None),
    (32, 8, 80, "float16", "", None),
    (8, 4, 256, "bfloat16", "norm", None),
    (7, 1, 16, "float16", "norm", None),
    (32, 8, 128, "float32", "norm", None),
    (8, 4, 256, "float32", "norm", None),
    (32, 8, 128, "bfloat16", "", "int8"),
    (8, 4, 256, "bfloat16", "norm", "int8"),
    (32, 8, 128, "float32", "norm", "int8"),
    (16, 8, 128, "bfloat16", "norm", "float8_e4m3fn"),
    (8, 4, 256, "bfloat16", "norm unit_offset", None),
    (32, 8, 128, "bfloat16", "fixed", "float8_e4m3fn"),
]


def launch_rotary_store_kv(
    kernels: Kernels,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    norm: str = "",
    num_tokens: int = 5,
    cache_dtype: str | None = None,
) -> None:
    """Launch it as a layer does, on the view of a fused projection's output.

    norm: that of heads, if any; and "fixed" for fixed scales of the cache.
    """
    qkv = torch.empty(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    angles = torch.empty(num_tokens, head_dim // 2)
    stored = DTYPES[cache_dtype] if cache_dtype else dtype
    key_cache, value_cache = torch.empty(2, 4, 16, num_kv_heads, head_dim, dtype=stored)
    key_scales, value_scales = torch.empty(2, 4, num_kv_heads, 16) if cache_dtype else (None, None)
    weight = torch.empty(head_dim, dtype=dtype) if "norm" in norm else None
    fixed = torch.empty(num_kv_heads) if "fixed" in norm else None
    kernels.rotary_store_kv(
        qkv.unflatten(-1, (-1, head_dim)),
        angles,
        angles,
        key_cache,
        value_cache,
        torch.zeros(num_tokens, dtype=torch.int64),
        query_norm_weight=weight,
        key_norm_weight=weight,
        unit_offset="unit_offset" in norm,
        key_scales=key_scales,
        value_scales=value_scales,
        fixed_key_scales=fixed,
        fixed_value_scales=fixed,
    )


# Weights of every kind of codes and factors: kind, dtype of x, outputs, inputs, inputs of a group. Of the
# last ones, one ends in a tile of inputs that is half empty, and two are not split.
CodedCase = tuple[str, str, int, int, int]
CODED_CASES: list[CodedCase] = [
    ("gptq", "bfloat16", 1024, 2048, 128),
    ("q4_k units", "bfloat16", 1024, 2048, 32),
    ("int8", "bfloat16", 1024, 2048, 2048),
    ("e4m3", "bfloat16", 1024, 2048, 128),
    ("q4_k units", "float32", 1024, 2048, 32),
    ("int4", "bfloat16", 1024, 2048, 32),
    ("iq4_nl", "bfloat16", 1024, 2048, 32),
    ("nvfp4", "bfloat16", 1024, 2048, 16),
    ("e4m3", "float32", 1024, 2048, 128),
    ("gptq", "float32", 1024, 2048, 128),
    ("mxfp4", "bfloat16", 1024, 2880, 32),
    ("gptq", "float16", 16384, 1024, 128),
    ("int8", "bfloat16", 16384, 1024, 1024),
]
COMMON_CODED_CASES = CODED_CASES[:5]  # compiled for CONSUMER_TARGETS too


# A number of rows for each of its kernels.
NUM_CODED_ROWS = {"few": 5, "some": 40, "many": 300, "most": 1000}


def packed_of(case: CodedCase) -> PackedCodes:
    """Return a weight of a case."""
    kind, _, *shape = case
    weight = coded_weight(kind, *shape)
    return pack_codes(weight.codes, *weight.factors, table=weight.table)


def launch_coded_linear(case: CodedCase, weight: PackedCodes, num_rows: int) -> None:
    """Launch the product as a layer with a bias does; it also compiles for other numbers of rows."""
    _, dtype, num_outputs, num_inputs, _ = case
    bias = torch.empty(num_outputs, dtype=DTYPES[dtype])
    coded_linear(torch.empty(num_rows, num_inputs, dtype=DTYPES[dtype]), weight, bias)


def launch_coded_rows(case: CodedCase, weight: PackedCodes, num_rows: int) -> None:
    """Launch the lookup as an embedding does."""
    take_coded_rows(weight, torch.zeros(num_rows, dtype=torch.int64), DTYPES[case[1]])


def launch_routing(kernels: Kernels, dtype: torch.dtype, num_tokens: int = 5) -> None:
    """Launch what surrounds the products of Qwen3 30B-A3B's experts and, with groups and a bias, of 256."""
    softmax = RoutingOptions(num_chosen=8, renormalise=True)
    experts, weights = kernels.route(torch.empty(num_tokens, 128), softmax)
    count = torch.ones(1, dtype=torch.int32)  # of a padded step
    kernels.route(torch.empty(num_tokens, 128), softmax, count=count)
    kernels.sort_by_expert(experts, 128, torch.zeros(num_tokens, dtype=torch.int32))
    rows = kernels.sort_by_expert(experts, 128)
    x = torch.empty(len(rows.sources), 2048, dtype=dtype)
    kernels.sum_experts(x, rows.places, weights)
    kernels.sum_experts(x, rows.places, weights, x[:num_tokens], weights[:, :1].contiguous())
    groups = RoutingOptions(
        num_chosen=8, score="sigmoid", num_groups=8, num_kept_groups=4, group_score="best_two"
    )
    kernels.route(torch.empty(num_tokens, 256), groups, torch.empty(256), torch.empty(256))


# Weights of experts: kind, dtype of x, experts, outputs, inputs, inputs of a group. A tile of inputs is half
# empty in gpt-oss's codes, and of numbers in the case with 2000.
ExpertsCase = tuple[str, str, int, int, int, int]
EXPERTS_CASES: list[ExpertsCase] = [
    ("numbers", "bfloat16", 128, 1536, 2048, 1),  # Qwen3 30B-A3B
    ("mxfp4", "bfloat16", 32, 1440, 2880, 32),  # gpt-oss has four times the outputs
    ("int8", "bfloat16", 128, 1536, 2048, 2048),
    ("int4", "bfloat16", 128, 1536, 2048, 32),
    ("numbers", "float32", 64, 1024, 2048, 1),  # OLMoE
    ("numbers", "float16", 32, 2048, 2000, 1),
    ("gptq", "bfloat16", 128, 1536, 2048, 128),
    ("q4_k units", "bfloat16", 128, 1536, 2048, 32),
    ("e4m3", "bfloat16", 128, 1536, 2048, 128),
    ("q4_k units", "float32", 64, 1024, 2048, 32),
]
COMMON_EXPERTS_CASES = EXPERTS_CASES[:5]  # compiled for CONSUMER_TARGETS too
NUM_EXPERTS_ROWS = {"few": 5, "some": 40, "many": 300}  # of an expert


def experts_of(case: ExpertsCase) -> Tensor | PackedExperts:
    """Return the weights of a case, in codes those of one expert again and again."""
    kind, dtype, num_experts, num_outputs, num_inputs, group = case
    if kind == "numbers":
        return torch.empty(num_experts, num_outputs, num_inputs, dtype=DTYPES[dtype])
    packed = packed_of((kind, dtype, num_outputs, num_inputs, group))
    tensors = (None if x is None else x.expand(num_experts, *x.shape) for x in packed.tensors)
    return PackedExperts(tuple(tensors), num_experts, packed.layout)


def launch_grouped_linear(case: ExpertsCase, weight: Tensor | PackedExperts, num_rows: int) -> None:
    """Launch the first product of experts with a bias, with so many rows for each expert."""
    _, dtype, num_experts, num_outputs, num_inputs, _ = case
    bias = torch.empty(num_experts, num_outputs, dtype=DTYPES[dtype])
    x = torch.empty(num_rows * num_experts, num_inputs, dtype=DTYPES[dtype])
    sources = torch.zeros(len(x), dtype=torch.int64)
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32)
    if isinstance(weight, PackedExperts):
        grouped_coded_linear(x, weight, offsets, sources, bias)
    else:
        grouped_linear(x, weight, offsets, sources, bias)


# Llama 3's: a row begins at 16 bytes. With an odd one no kernel can load more than 4 bytes a thread.
VOCAB_SIZE = 128256


def launch_sampling(*filters: str, num_rows: int = 3) -> None:
    """Launch what makes tokens of logits, with these filters."""
    logits = torch.empty(num_rows, VOCAB_SIZE)
    rows = torch.zeros(num_rows, dtype=torch.int64)
    counts = torch.zeros(2, VOCAB_SIZE, dtype=torch.int32)
    ones = torch.ones(num_rows)
    apply_penalties(logits, rows, rows, counts, counts > 0, ones, ones, ones)
    params: dict[str, Any] = {
        name: (ones.int() if name == "top_k" else ones) if name in filters else None
        for name in ("min_p", "top_n_sigma", "typical_p", "top_k", "top_p")
    }
    sample_tokens(logits, rows, rows, temperature=ones, highest=ones.clone(), **params)
