"""How fast is a linear in each form of its weight?

    python -m benchmarks.linear --dtype bfloat16 --threads 2

The linears of one decoder layer run one after the other, with 1 to 1024 rows, in the shapes of a model of 15
million parameters and of one of 1.1 billion. Every weight is exact in bfloat16. Every form is compared with
the product in float64, then all take turns. A ratio is the median over the rounds of the time of the form
that `LLMEngine` uses without quantisation, over the time of this form: above 1, this form is faster. GB/s
counts the bytes of this form's weights, read once.

"panels" is the engine's own kernel. "torch" is used without numba, and for bfloat16 on ARM CPUs with bfloat16
instructions. With int8 and int4 weights in bfloat16 it has two implementations, "kernel" and "tiles", chosen
by the number of rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import SHAPES, parse_args, print_json, print_table
from benchmarks.timing import device_name
from paged.device.devices import only_torch_has_bfloat16
from paged.model.weights.choice import choose_forms
from paged.model.weights.coded_panels import PanelInt4Weight, PanelInt8Weight
from paged.model.weights.panels import PanelWeight
from paged.model.weights.quantization import Int4Weight, Int8Weight

CPU = torch.device("cpu")
Products = list[Callable[[Tensor], Tensor]]  # one for each linear of a layer


def main() -> None:
    """Check, then time every form in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["llama-15m", "tinyllama-1.1b"], choices=SHAPES)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parse_args(parser, models=["llama-15m"], rows=[1, 4], rounds=1)
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    results = []
    for model in args.models:
        shapes = layer_shapes(model)
        weights = [torch.randn(shape).mul_(shape[1] ** -0.5).bfloat16().to(dtype) for shape in shapes]
        forms = forms_of(weights, dtype)
        for num_rows in args.rows:
            inputs = [torch.randn(num_rows, weight.shape[1], dtype=dtype) for weight in weights]
            rows = measure(forms, inputs, args.rounds)
            results += [{"model": model, "rows": num_rows, **row} for row in rows]
    print_table(results)
    print_json({"benchmark": "linear", "device": device_name(CPU), "results": results, **vars(args)})


def layer_shapes(model: str) -> list[tuple[int, int]]:
    """Return (outputs, inputs) of each linear of a layer."""
    shape = SHAPES[model]
    hidden, intermediate = shape["hidden_size"], shape["intermediate_size"]
    head_dim = shape.get("head_dim", hidden // shape["num_attention_heads"])
    query, kv = (shape[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
    return [(query + 2 * kv, hidden), (hidden, query), (2 * intermediate, hidden), (hidden, intermediate)]


def forms_of(weights: list[Tensor], dtype: torch.dtype) -> dict[str, tuple[Products, list[Tensor], int]]:
    """Return for each form its products, the weights that it represents, and its bytes."""
    packed = choose_forms(CPU, dtype, None, tied=False, in_panels=False).of_floats["layer"]
    unquantised = {"panels": PanelWeight, "torch": packed}
    if dtype == torch.bfloat16 and only_torch_has_bfloat16():
        unquantised = {"torch": packed, "panels": PanelWeight}
    forms: dict[str, tuple[Products, list[Tensor], int]] = {}
    for name, form in unquantised.items():
        made: list[Any] = [form(weight) for weight in weights]
        in_panels = [t for f in made for t in f.panels[:2]] if form is PanelWeight else weights
        forms[name] = ([lambda x, f=f: f(x, None) for f in made], weights, sum(t.nbytes for t in in_panels))
    num_bytes = sum(w.nbytes for w in weights)
    forms["F.linear"] = ([lambda x, w=w: F.linear(x, w) for w in weights], weights, num_bytes)
    for name, form, panel_form in (
        ("int8", Int8Weight, PanelInt8Weight),
        ("int4", Int4Weight, PanelInt4Weight),
    ):
        made = [form(weight) for weight in weights]
        meant = [f.dequantized() for f in made]
        panels: list[Any] = [panel_form(weight) for weight in weights]
        num_bytes = sum(t.nbytes for f in panels for t in f.panels[:2])
        forms[f"panels {name}"] = ([lambda x, f=f: f(x, None) for f in panels], meant, num_bytes)
        num_bytes = sum(t.nbytes for f in made for t in vars(f).values() if isinstance(t, Tensor))
        forms[f"torch {name}"] = ([lambda x, f=f: f(x, None) for f in made], meant, num_bytes)
        if dtype == torch.bfloat16:
            forms[f"torch {name} kernel"] = ([f.by_kernel for f in made], meant, num_bytes)
            forms[f"torch {name} tiles"] = ([f.by_tiles for f in made], meant, num_bytes)
    return forms


def measure(
    forms: dict[str, tuple[Products, list[Tensor], int]],
    inputs: list[Tensor],
    rounds: int,
) -> list[dict[str, Any]]:
    """Time a layer's linears in every form, one round after the other."""
    for products, meant, _ in forms.values():
        for product, x, weight in zip(products, inputs, meant, strict=True):
            check(product(x), x, weight)
    num_weights = sum(weight.numel() for weight in meant)
    times: dict[str, list[float]] = {name: [] for name in forms}
    repeats = 1 + 2**26 // (len(inputs[0]) * num_weights)
    for _ in range(rounds):
        for name, (products, _, _) in forms.items():
            started = time.perf_counter()
            for _ in range(repeats):
                for product, x in zip(products, inputs, strict=True):
                    product(x)
            times[name].append((time.perf_counter() - started) / repeats)
    flops = 2 * len(inputs[0]) * num_weights
    rows = []
    for name, (_, _, num_bytes) in forms.items():
        seconds = statistics.median(times[name])
        ratios = [u / t for u, t in zip(times[next(iter(forms))], times[name], strict=True)]
        rows.append(
            {
                "form": name,
                "ms": seconds * 1e3,
                "ratio": statistics.median(ratios),
                "GB/s": num_bytes / seconds / 1e9,
                "GFLOP/s": flops / seconds / 1e9,
                "bits/weight": 8 * num_bytes / num_weights,
            }
        )
    return rows


def check(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """Compare the first rows with the product in float64; the others must be finite."""
    expected = x[:4].double() @ weight.double().T
    size = x[:4].double().abs() @ weight.double().abs().T
    assert ((out[:4].double() - expected).abs() <= 4 * torch.finfo(x.dtype).eps * size).all()
    assert out.isfinite().all()


if __name__ == "__main__":
    main()
