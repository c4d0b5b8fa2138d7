"""The golden record: tokens, kernel results and public names that a change of structure must not touch.

    python -m tests.golden            # compare this tree with tests/golden.json
    python -m tests.golden --write    # record what this CPU computes; keeps the results of other CPUs

Tokens and names are the same everywhere. The bits of CPU kernels depend on the instructions a CPU has, so
they are kept by instruction set: NUMBA_CPU_NAME and NUMBA_CPU_FEATURES record another one's.
"""

import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

import paged
from paged import LLMEngine, SamplingParams
from paged.checkpoints.coded import CodedWeight, Factors
from paged.checkpoints.formats.fp4 import E2M1
from paged.kernels.attention_options import AttentionOptions
from paged.kernels.backend import load_kernels
from paged.kernels.cpu.target import HAS_DOT, HAS_LOOKUP, HAS_TILES, VECTOR_BYTES
from paged.kernels.routing import RoutingOptions, Score
from paged.model.weights.coded_panels import PANEL_FORMS, PanelCodes
from paged.model.weights.expert_panels import PanelExperts
from paged.model.weights.panels import PanelWeight

RECORD = Path(__file__).parent / "golden.json"
NUM_PARAMETER_SETS = 50
COUNTED = tuple(map(float, range(16)))
PROMPTS = [
    "def fibonacci(n):",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n",
    "    return [line",
    "class Stack:\n    def push(self, item):",
]
Results = dict[str, str]


def instruction_set() -> str:
    """Name the instructions that decide the bits of a CPU kernel's results."""
    has = {"dot": HAS_DOT, "lookup": HAS_LOOKUP, "tiles": HAS_TILES}
    return "-".join([f"{8 * VECTOR_BYTES}", *(name for name, value in has.items() if value)])


def public_names() -> list[str]:
    """Return what `import paged` offers."""
    return sorted(paged.__all__)


def parameter_set(number: int) -> SamplingParams:
    """One of NUM_PARAMETER_SETS; the first is greedy without anything else."""
    choose = random.Random(number)
    optional: dict[str, Any] = {
        "top_p": choose.choice([0.5, 0.9]),
        "top_k": choose.choice([5, 40]),
        "min_p": choose.choice([0.02, 0.2]),
        "typical_p": choose.choice([0.3, 0.9]),
        "top_n_sigma": choose.choice([1.0, 2.0]),
        "presence_penalty": choose.choice([-0.5, 0.8]),
        "frequency_penalty": choose.choice([-0.2, 0.6]),
        "repetition_penalty": choose.choice([0.9, 1.2]),
        "dry_multiplier": 0.8,
        "logit_bias": {choose.randrange(4, 200): 3.0},
        "min_tokens": 12,
        "stop": ["\n\n"],
        "bad_words": ["self"],
        "n": 2,
    }
    chosen = choose.sample(sorted(optional), number % 5)
    temperature = 0.0 if number % 4 == 0 and "n" not in chosen else choose.choice([0.6, 1.0])
    rest = {name: optional[name] for name in chosen}
    return SamplingParams(temperature=temperature, seed=number, max_tokens=24, **rest)


def tokens(**options: Any) -> dict[str, list[list[int]]]:
    """Generate the demo model's tokens for every parameter set in one ragged batch.

    options: of the engine; they must not change a token.
    """
    engine = LLMEngine("demo", device="cpu", dtype="float32", num_blocks=600, **options)
    sets = [parameter_set(i) for i in range(NUM_PARAMETER_SETS)]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(NUM_PARAMETER_SETS)]
    outputs = engine.generate(prompts, sets, use_tqdm=False)
    return {str(i): [one.token_ids for one in output.outputs] for i, output in enumerate(outputs)}


def kernel_results() -> Results:
    """Hash the results of each CPU kernel for inputs that are the same on every machine."""
    return {name: _hash(results) for name, results in _kernel_cases()}


def _kernel_cases() -> Iterator[tuple[str, list[Tensor]]]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        yield from ((f"{case} {name}", results) for case, results in _row_cases(dtype))
        yield from ((f"attention {case} {name}", results) for case, results in _attention_cases(dtype))
        if dtype != torch.float16:
            yield from ((f"linear {case} {name}", results) for case, results in _linear_cases(dtype))
            yield from ((f"experts {case} {name}", results) for case, results in _expert_cases(dtype))
    yield from _routing_cases()
    yield from _sampling_cases()


def _numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Numbers between -2 and 2 with all bits in use, made of integers: no library rounds them its own way."""
    integers = np.random.default_rng([seed, *shape]).integers(-(2**23), 2**23, shape)
    return torch.from_numpy(integers.astype(np.float32) / 2**22).to(dtype)


def _row_cases(dtype: torch.dtype) -> Iterator[tuple[str, list[Tensor]]]:
    kernels, make = load_kernels("numba"), partial(_numbers, dtype=dtype)
    for size in (48, 320):
        residual = make(5, size, seed=1)
        normed = kernels.rms_norm(make(5, size), make(size, seed=2), 1e-5, residual=residual)
        yield f"rms_norm {size}", [normed, residual]
    for size in (48, 315):
        residual = make(5, size, seed=1)
        normed = kernels.layer_norm(make(5, size), make(size, seed=2), make(size, seed=15), 1e-5, residual)
        yield f"layer_norm {size}", [normed, residual]
    for tanh in (False, True):
        kernels.gelu(numbers := 2 * make(5, 145), tanh=tanh)
        yield f"gelu{' by tanh' if tanh else ''}", [numbers]
    kernels.add(make(5, 145), numbers)
    yield "add", [numbers]
    yield "silu_and_mul", [kernels.silu_and_mul(make(5, 2 * 144))]
    kernels.scale_by_sigmoid(numbers, 3 * make(5, 145, seed=20))
    yield "scale_by_sigmoid", [numbers]
    yield (
        "gated_norm",
        [kernels.gated_norm(make(5, 3, 37), make(37, seed=2), 3 * make(5, 111, seed=21), 1e-5)],
    )
    columns = torch.tensor([[0, 50, 1], [50, 145, 0]], dtype=torch.int32)
    ranks = torch.tensor([[3, 0], [5, 2]], dtype=torch.int32)
    slots = torch.tensor([1, -1, 0, 1, 1], dtype=torch.int32)
    a, b = make(2, 2, 5, 70, seed=27), make(2, 5, 145, seed=28)
    kernels.add_lora(make(5, 70, seed=29), numbers, a, b, ranks, columns, slots)
    yield "add_lora", [numbers]
    sequences = [torch.tensor(x, dtype=torch.int32) for x in ([2, 0], [4, 9], [0, 4, 7])]
    for gated in (False, True):
        states = make(3, 3, 70, seed=22)
        x = make(7, 210 if gated else 70)
        out = kernels.short_conv(x, _numbers(4, 70), _numbers(70), states, *sequences, gated=gated)
        yield f"short_conv{' gated' if gated else ''}", [out, states]
    matrices = _numbers(3, 4, 16, 80, seed=23)
    gates = make(7, 8, seed=24), -_numbers(4, seed=25).abs(), _numbers(4, seed=26)
    out = kernels.gated_delta(make(7, 2 * 2 * 16 + 4 * 80), *gates, matrices, *sequences)
    yield "gated_delta", [out, matrices]
    rates, bias, skip = -_numbers(4, seed=25).abs(), _numbers(4, seed=26), _numbers(4, seed=27)
    for head_dim in (64, 80):
        matrices = _numbers(3, 4, 16, head_dim, seed=23)
        x, steps = make(7, 4 * head_dim + 2 * 2 * 16), make(7, 4, seed=24)
        given = rates, bias, skip, matrices
        out = kernels.mamba2_scan(x, steps, *given, *sequences, limits=(0.1, 1.0))
        yield f"mamba2_scan {head_dim}", [out, matrices]
    heads, gate = make(5, 3, 37), 3 * make(5, 111, seed=21)
    yield (
        "gated_norm of products",
        [kernels.gated_norm(heads, make(111, seed=2), gate, 1e-5, gate_first=True)],
    )
    yield "gated_norm without norm", [kernels.gated_norm(heads, None, gate, 1e-5)]
    kernels.relu_squared(numbers := 2 * make(5, 145))
    yield "relu_squared", [numbers]
    for norm in (None, make(32, seed=3)):
        caches = [torch.zeros(4, 4, 2, 32, dtype=dtype) for _ in "kv"]
        query = kernels.rotary_store_kv(
            make(7, 8, 32),
            _numbers(7, 16),
            _numbers(7, 16, seed=14),
            *caches,
            torch.tensor([3, 9, 0, 15, 7, 6, 1]),
            query_norm_weight=norm,
            key_norm_weight=norm,
        )
        yield f"rotary_store_kv {'with' if norm is not None else 'without'} norm", [query, *caches]


def _attention_cases(dtype: torch.dtype) -> Iterator[tuple[str, list[Tensor]]]:
    kernels = load_kernels("numba")
    queries, contexts = [1, 1, 37, 5, 1], [1, 130, 300, 64, 1100]
    for head_dim, options in (
        (64, {}),
        (64, {"sliding_window": 100}),
        (48, {"softcap": 20.0}),
        (128, {"sinks": _numbers(6, seed=7)}),
    ):
        for cache in (dtype, torch.int8):
            is_int8 = cache == torch.int8
            block_size, needed = 16, [-(-n // 16) for n in contexts]
            shape = sum(needed), block_size, 2, head_dim
            stored = [_numbers(*shape, dtype=dtype, seed=s) for s in (4, 5)]
            keys, values = [(63 * x.float()).to(cache) if is_int8 else x for x in stored]
            scales = _numbers(shape[0], 2, block_size, seed=6).abs() / 127 if is_int8 else None
            order = np.random.default_rng(0).permutation(shape[0])
            tables = torch.zeros(len(contexts), max(needed), dtype=torch.int32)
            for i, n in enumerate(needed):
                start = sum(needed[:i])
                tables[i, :n] = torch.from_numpy(order[start : start + n].astype(np.int32))
            out = kernels.paged_attention(
                _numbers(sum(queries), 6, head_dim, dtype=dtype),
                keys,
                values,
                tables,
                torch.tensor(contexts, dtype=torch.int32),
                torch.tensor([0, *np.cumsum(queries)], dtype=torch.int32),
                AttentionOptions(
                    scale=head_dim**-0.5,
                    max_seqlen_q=max(queries),
                    key_scales=scales,
                    value_scales=scales,
                    **options,
                ),
            )
            told = " ".join(["int8" if is_int8 else "plain", *options])
            yield f"{head_dim} {told}", [out]


def _linear_cases(dtype: torch.dtype) -> Iterator[tuple[str, list[Tensor]]]:
    """Use a small shape and one large enough for bfloat16 weights to be kept in 12 bits."""
    for out_features, in_features in ((80, 96), (1040, 512)):
        for kept in dict.fromkeys((dtype, torch.bfloat16)):  # float32 that bfloat16 holds is kept as such
            weight = (_numbers(out_features, in_features, seed=9) / 16).to(kept).to(dtype)
            for name, form in PANEL_FORMS.items():
                product = form(weight)
                for rows in (1, 3, 17, 70):
                    x = _numbers(rows, in_features, dtype=dtype, seed=rows)
                    told = str(kept).removeprefix("torch.")
                    case = f"{out_features}x{in_features} {name or 'plain'} of {told}, {rows} rows"
                    yield case, [product(x, _numbers(out_features, dtype=dtype, seed=10))]
            if in_features % 64 == 0:
                gated = PANEL_FORMS[None](weight, gated=True)
                yield f"{out_features}x{in_features} gated of {kept}", [gated(x, None)]


def _routing_cases() -> Iterator[tuple[str, list[Tensor]]]:
    """Choose experts in every way, with ties and a NaN, and sort rows by them."""
    kernels = load_kernels("numba")
    logits = 4 * _numbers(9, 36)
    logits[1] = logits[1].round()
    logits[2, 5] = torch.nan
    groups = {"num_groups": 4, "num_kept_groups": 2}
    for score in get_args(Score):
        for more in ({}, groups, {**groups, "group_score": "best_two", "renormalise": True, "scale": 1.5}):
            options = RoutingOptions(num_chosen=5, score=score, **more)
            bias = _numbers(36, seed=16) if score == "sigmoid" else None
            experts, weights = kernels.route(logits.clone(), options, bias, _numbers(36, seed=17).abs())
            yield f"route {score} {' '.join(more)}", [experts, weights]
    yield "sort_by_expert", [*kernels.sort_by_expert(experts, 36)[:3]]


def _expert_cases(dtype: torch.dtype) -> Iterator[tuple[str, list[Tensor]]]:
    """Multiply rows by their experts in every form of weights: experts with no, one, few and many rows."""
    kernels = load_kernels("numba")
    offsets = torch.tensor([0, 1, 1, 18, 88], dtype=torch.int32)
    sources = torch.arange(88) % 30
    biases = [_numbers(80, seed=18 + expert) for expert in range(4)]
    for name, make in _expert_forms(dtype).items():
        for gated in (False, True):
            forms = [make(expert, gated) for expert in range(4)]
            for form, bias in zip(forms, biases, strict=True):
                form.lay_out(bias.to(dtype))
            product = PanelExperts(forms, with_bias=True)
            yield f"{name}{' gated' * gated}", [product(_numbers(30, 128, dtype=dtype), offsets, sources)]
    out = _numbers(88, 80, dtype=dtype)
    places = torch.from_numpy(np.random.default_rng(2).permutation(88).reshape(22, 4))
    shared = _numbers(22, 80, dtype=dtype, seed=19)
    weights = _numbers(22, 4).abs()
    yield "sum", [kernels.sum_experts(out, places, weights)]
    yield "sum with shared", [kernels.sum_experts(out, places, weights, shared, _numbers(22, 1))]
    yield "clamped_swiglu", [kernels.clamped_swiglu(4 * _numbers(5, 74, dtype=dtype), 7.0, 1.702)]


def _expert_forms(dtype: torch.dtype) -> dict[str, Callable[[int, bool], PanelWeight]]:
    """Return how each form of weights [80, 128] is made: of an expert by its number, gated or not."""

    def floats(expert: int) -> Tensor:
        return (_numbers(80, 128, seed=20 + expert) / 16).to(dtype)

    def of_codes(kind: str, expert: int, gated: bool) -> PanelWeight:
        draw = np.random.default_rng([expert, 3])
        codes = torch.from_numpy(draw.integers(0, 256, (80, 128)).astype(np.uint8))
        exponents = torch.from_numpy(draw.integers(-4, 4, (80, 4)).astype(np.float32))
        powers = torch.exp2(exponents)
        weight = {
            "mxfp4": CodedWeight(codes & 15, Factors(powers.bfloat16()), E2M1),
            "q8_0": CodedWeight(codes.view(torch.int8), Factors((powers / 3).half())),
            "q4_1": CodedWeight(codes & 15, Factors(powers.half(), offset=-powers.half()), COUNTED),
        }[kind]
        return PanelCodes(weight, "gated" if gated else "layer", dtype=dtype)

    plain = {
        name or "plain": lambda expert, gated, form=form: form(floats(expert), gated=gated)
        for name, form in PANEL_FORMS.items()
    }
    return plain | {kind: partial(of_codes, kind) for kind in ("mxfp4", "q8_0", "q4_1")}


def _sampling_cases() -> Iterator[tuple[str, list[Tensor]]]:
    kernels, rows, vocabulary = load_kernels("numba"), 6, 1009
    logits = 4 * _numbers(rows, vocabulary)
    yield "greedy", [*kernels.greedy(logits.clone())]
    chosen = torch.arange(rows) * 100
    yield "token_logprobs", [*kernels.token_logprobs(logits.clone(), chosen, 5)]
    changed = logits.clone()
    counts = torch.from_numpy(np.random.default_rng(1).integers(0, 3, (rows, vocabulary)).astype(np.int32))
    factors = [_numbers(rows, seed=s).abs() / 4 + 0.9 for s in (11, 12, 13)]
    kernels.apply_penalties(changed, torch.arange(rows), torch.arange(rows), counts, counts > 0, *factors)
    yield "apply_penalties", [changed]
    filters: dict[str, Tensor] = {
        "min_p": torch.full((rows,), 0.05),
        "top_n_sigma": torch.full((rows,), 1.5),
        "typical_p": torch.full((rows,), 0.8),
        "top_k": torch.full((rows,), 30, dtype=torch.int32),
        "top_p": torch.full((rows,), 0.7),
    }
    for names in ([], *([name] for name in filters), list(filters)):
        given = {name: filters[name] if name in names else None for name in filters}
        drawn = [
            kernels.sample_tokens(
                logits.clone(),
                torch.arange(rows),
                torch.full((rows,), position),
                temperature=torch.linspace(0.5, 1.5, rows),
                **given,
            )
            for position in range(20)
        ]
        yield f"sample_tokens {' '.join(names)}", drawn


def _hash(results: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in results:
        digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def recorded() -> dict[str, Any]:
    """Load the committed record."""
    found: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return found


def differences(known: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Name what differs between the record and this tree."""
    names = [] if known.get("public_names") == found["public_names"] else ["public_names"]
    here = instruction_set()
    pairs = {
        "tokens": (known.get("tokens", {}), found["tokens"]),
        "kernel": (known.get("kernels", {}).get(here, {}), found["kernels"][here]),
    }
    for part, (before, now) in pairs.items():
        names += [f"{part} {name}" for name in before | now if before.get(name) != now.get(name)]
    return names


def main() -> int:
    """Compare or write. Returns 1 where something differs."""
    known, here = recorded(), instruction_set()
    found = {
        "public_names": public_names(),
        "tokens": tokens(),
        "kernels": {**known.get("kernels", {}), here: kernel_results()},
    }
    if "--write" in sys.argv:
        RECORD.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    different = differences(known, found)
    print(f"{here}: {len(found['tokens'])} sets of tokens, {len(found['kernels'][here])} kernel results")
    print("different:", *different, sep="\n  ") if different else print("nothing differs")
    return int(bool(different) and "--write" not in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
