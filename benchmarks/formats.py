"""How fast are linears whose weights keep the codes of quantised files?

    python -m benchmarks.formats --dtype bfloat16 --threads 2

The linears of one decoder layer of a model of 1.1 billion parameters, with weights in the codes and factors
of each format, one after the other, on a CPU: for one row, as a stream decodes, and for a prompt of 512.
Products are compared with those of the floats that the codes stand for: they have the same bits. Then all
formats take turns, with int4 and int8 as `quantization=` makes them, and bfloat16. A ratio is the median over
the rounds of the time of another form over the time of this format: above 1, this format is faster. Memory
and files are compared by their bytes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common import parse_args, print_json, print_table
from benchmarks.linear import CPU, layer_shapes
from benchmarks.timing import device_name
from paged.checkpoints.coded import CodedWeight, Factors
from paged.kernels.checks import TrustedContents
from paged.kernels.panels import linear, pack
from paged.model.weights.coded_panels import PanelCodes, PanelInt4Weight, PanelInt8Weight
from paged.model.weights.panels import PanelWeight

INTEGERS = tuple(float(code - 8) for code in range(16))


class Stored(NamedTuple):
    """A format: the bits of a weight in its file, and the quantised form to compare it with."""

    bits: float
    like: str


# Q4_1 and Q4_K have offsets, GPTQ and AWQ zeros.
FORMATS = {
    "GPTQ, AWQ": Stored(4 + 20 / 128, "int4"),
    "Q4_0": Stored(4.5, "int4"),
    "Q4_1": Stored(5.0, "int4"),
    "Q4_K": Stored(4.5, "int4"),
    "NVFP4": Stored(4.5, "int4"),
    "NVFP4 with a divisor": Stored(4.5, "int4"),
    "Q8_0": Stored(8.5, "int8"),
    "fp8": Stored(8 + 32 / 128**2, "int8"),
}


def main() -> None:
    """Check, then time every format in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="tinyllama-1.1b")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 512])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parse_args(parser, model="llama-15m", rows=[1, 4], rounds=1)
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    shapes = layer_shapes(args.model)
    forms: dict[str, list[PanelWeight]] = {}
    for name in FORMATS:
        weights = [coded(name, *shape) for shape in shapes]
        forms[name] = [PanelCodes(weight, "layer", dtype=dtype) for weight in weights]
        check(weights[0], forms[name][0], dtype)
    floats = [torch.randn(shape).mul_(shape[1] ** -0.5).bfloat16().to(dtype) for shape in shapes]
    plain = {"int4": PanelInt4Weight, "int8": PanelInt8Weight, "bfloat16": PanelWeight}
    forms |= {name: [form(weight) for weight in floats] for name, form in plain.items()}
    results = [row for num_rows in args.rows for row in measure(forms, shapes, num_rows, dtype, args.rounds)]
    print_table(results)
    print_json({"benchmark": "formats", "device": device_name(CPU), "results": results, **vars(args)})


def coded(name: str, num_rows: int, num_inputs: int) -> CodedWeight:
    """Make a weight of random codes in a format."""
    shape = num_rows, num_inputs

    def floats(group: int) -> Tensor:
        return torch.rand(num_rows, num_inputs // group) / 64 + 2**-8

    def integers(group: int, most: int) -> Tensor:
        return torch.randint(0, most, (num_rows, num_inputs // group), dtype=torch.uint8)

    if name == "Q8_0":
        return CodedWeight(torch.randint(-127, 128, shape, dtype=torch.int8), Factors(floats(32).half()))
    if name == "fp8":
        scales = floats(128)[::128].repeat_interleave(128, dim=0)[:num_rows]
        return CodedWeight(torch.randn(shape).to(torch.float8_e4m3fn), Factors(scales))
    factors = {
        "GPTQ, AWQ": lambda: Factors(floats(128).half(), zero=integers(128, 16)),
        "Q4_0": lambda: Factors(floats(32).half()),
        "Q4_1": lambda: Factors(floats(32).half(), offset=-floats(32).half()),
        "Q4_K": lambda: Factors(
            integers(32, 64), None, integers(32, 64), floats(256).half(), -floats(256).half()
        ),
        "NVFP4": lambda: Factors(floats(16).to(torch.float8_e4m3fn), scale_unit=floats(num_inputs)),
        "NVFP4 with a divisor": lambda: Factors(
            floats(16).to(torch.float8_e4m3fn), scale_divisor=1 / floats(num_inputs)
        ),
    }[name]()
    return CodedWeight(torch.randint(0, 16, shape, dtype=torch.uint8), factors, INTEGERS)


def check(weight: CodedWeight, form: PanelCodes, dtype: torch.dtype) -> None:
    """Compare with the product of the floats, bit for bit."""
    pairs = form.panels.in_pairs
    expected = pack(weight.floats().bfloat16() if pairs else weight.floats(), pairs=pairs)
    x = torch.randn(9, weight.shape[1]).to(dtype)
    assert torch.equal(form(x, None), linear(x, expected, None))


def measure(
    forms: dict[str, list[PanelWeight]],
    shapes: list[tuple[int, int]],
    num_rows: int,
    dtype: torch.dtype,
    rounds: int,
) -> list[dict[str, Any]]:
    """Time a layer's linears in every form, one round after the other."""
    inputs = [torch.randn(num_rows, num_inputs).to(dtype) for _, num_inputs in shapes]
    num_weights = sum(outputs * num_inputs for outputs, num_inputs in shapes)
    times: dict[str, list[float]] = {name: [] for name in forms}
    repeats = 1 + 2**26 // (num_rows * num_weights)
    with TrustedContents():  # as in an engine, which checks no launch
        for _ in range(rounds):
            for name, products in forms.items():
                started = time.perf_counter()
                for _ in range(repeats):
                    for product, x in zip(products, inputs, strict=True):
                        product(x, None)
                times[name].append((time.perf_counter() - started) / repeats)

    def ratio(name: str, other: str) -> float:
        return statistics.median(o / own for o, own in zip(times[other], times[name], strict=True))

    rows = []
    for name, stored in FORMATS.items():
        num_bytes = sum(x.nbytes for form in forms[name] for x in form.panels[:2])
        rows.append(
            {
                "rows": num_rows,
                "format": name,
                "ms": statistics.median(times[name]) * 1e3,
                "like": stored.like,
                "ratio to it": ratio(name, stored.like),
                "to bfloat16": ratio(name, "bfloat16"),
                "bits/weight": 8 * num_bytes / num_weights,
                "memory / file": 8 * num_bytes / num_weights / stored.bits,
            }
        )
    return rows


if __name__ == "__main__":
    main()
