"""How fast are mixtures of experts on a CPU, next to dense products of the same size?

    python -m benchmarks.moe --threads 2

- decode: one token's experts (gate and up, down), in bytes of weights a second, over a dense MLP that reads
  as many bytes. Both go on to other weights with each token, so that they come from memory.
- prompt: its experts, in FLOP/s, over dense products with as many rows as an expert has on average.
- experts: the time of one token with twice as many experts and as many chosen, over that with the fewer.
- routing: `route` and `sort_by_expert` over the whole layer, for a batch.
- loading: finding and reading many small tensors over reading their file.

Rows are compared with products by their expert alone, then all take turns: a ratio is the median over the
rounds of those within one.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.common import parse_args, print_json, print_table
from benchmarks.timing import device_name
from paged.architectures.families.moe import STACK_NAMES
from paged.kernels.backend import load_kernels
from paged.kernels.checks import TrustedContents
from paged.kernels.routing import ExpertRows, RoutingOptions
from paged.model.weights.coded_panels import PANEL_FORMS
from paged.model.weights.expert_panels import PanelExperts
from paged.model.weights.loading import open_tensors
from paged.model.weights.panels import PanelWeight

CPU = torch.device("cpu")
KERNELS = load_kernels("numba", checked=False)


class Mixture:
    """The experts of a layer, and dense MLPs of as many weights as a token has in its experts."""

    def __init__(self, form: str | None, num_experts: int, num_chosen: int, hidden: int, inner: int) -> None:
        self.num_experts = num_experts
        self.num_chosen = num_chosen
        make = PANEL_FORMS[form]
        gate_up = _random(2 * inner, hidden)
        down = _random(hidden, inner)
        # Each expert has other numbers, of which only the order is made anew.
        self.up_forms = [make(gate_up.roll(expert, 1), gated=True) for expert in range(num_experts)]
        self.down_forms = [make(down.roll(expert, 1)) for expert in range(num_experts)]
        self.up = PanelExperts(self.up_forms, with_bias=False)
        self.down = PanelExperts(self.down_forms, with_bias=False)
        self.num_bytes = sum(map(_bytes_of, (*self.up_forms, *self.down_forms))) / num_experts
        self.num_weights = gate_up.numel() + down.numel()

    def run(self, x: Tensor, rows: ExpertRows, weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts."""
        inner = self.up(x, rows.offsets, rows.sources)
        return KERNELS.sum_experts(self.down(inner, rows.offsets, None), rows.places, weights)

    def check(self, x: Tensor, rows: ExpertRows) -> None:
        """Compare each row with the product by its expert alone."""
        out = self.up(x, rows.offsets, rows.sources)
        for expert, form in enumerate(self.up_forms):
            mine = slice(int(rows.offsets[expert]), int(rows.offsets[expert + 1]))
            assert torch.equal(out[mine], form(x[rows.sources[mine]], None))


def _random(*shape: int) -> Tensor:
    return torch.randn(shape).mul_(shape[1] ** -0.5).bfloat16()


def _bytes_of(form: PanelWeight) -> int:
    return form.panels.weight.nbytes + form.panels.scales.nbytes


def in_turns(rounds: int, *runs: Callable[[], Any]) -> list[list[float]]:
    """Return the seconds of each run in each round."""
    for run in runs:
        run()
    times: list[list[float]] = [[] for _ in runs]
    with TrustedContents():
        for _ in range(rounds):
            for run, own in zip(runs, times, strict=True):
                started = time.perf_counter()
                run()
                own.append(time.perf_counter() - started)
    return times


def ratio(first: list[float], second: list[float]) -> float:
    """Return the median of the first over the second."""
    return statistics.median(a / b for a, b in zip(first, second, strict=True))


def decode(form: str | None, hidden: int, rounds: int) -> dict[str, Any]:
    """Compare one token's experts with a dense MLP of as many bytes."""
    inner = hidden // 2
    mixture = Mixture(form, 64, 8, hidden, inner)
    x = _random(1, hidden)
    weights = torch.full((1, 8), 0.125)
    chosen = [torch.arange(8 * i, 8 * i + 8, dtype=torch.int32)[None] for i in range(8)]
    routed = [KERNELS.sort_by_expert(each, 64) for each in chosen]
    mixture.check(x, routed[3])
    make = PANEL_FORMS[form]
    gate_up = _random(16 * inner, hidden)
    down = _random(hidden, 8 * inner)
    dense = [(make(gate_up.roll(i, 1), gated=True), make(down.roll(i, 1))) for i in range(8)]
    dense_bytes = sum(map(_bytes_of, dense[0]))

    def experts() -> None:
        for rows in routed:
            mixture.run(x, rows, weights)

    def mlps() -> None:
        for up, out in dense:
            out(up(x, None), None)

    own, theirs = in_turns(rounds, experts, mlps)
    moved = 8 * mixture.num_bytes
    return {
        "figure": f"decode, {form or 'bfloat16'}",
        "ms": statistics.median(own) / 8 * 1e3,
        "GB/s": moved / statistics.median(own) * 8 / 1e9,
        "ratio": ratio(theirs, own) * moved / dense_bytes,
        "aim": ">= 0.8",
    }


def prompt(form: str | None, hidden: int, rounds: int) -> dict[str, Any]:
    """Compare a prompt's experts with dense products of as many rows as an expert has."""
    mixture = Mixture(form, 64, 8, hidden, hidden // 2)
    x = _random(512, hidden)
    chosen, weights = KERNELS.route(torch.randn(512, 64), RoutingOptions(num_chosen=8))
    rows = KERNELS.sort_by_expert(chosen, 64)
    mixture.check(x, rows)
    some = x[:64].contiguous()

    def experts() -> None:
        mixture.run(x, rows, weights)

    def products() -> None:
        for up, down in zip(mixture.up_forms, mixture.down_forms, strict=True):
            down(up(some, None), None)

    own, theirs = in_turns(rounds, experts, products)
    flops = 2 * 512 * 8 * mixture.num_weights
    return {
        "figure": f"prompt of 512, {form or 'bfloat16'}",
        "ms": statistics.median(own) * 1e3,
        "GFLOP/s": flops / statistics.median(own) / 1e9,
        "ratio": ratio(theirs, own),
        "aim": ">= 0.7",
    }


def more_experts(hidden: int, rounds: int) -> dict[str, Any]:
    """Compare the time of a token with twice as many experts."""
    mixtures = [Mixture("int8", number, 8, hidden, hidden // 4) for number in (64, 128)]
    x = _random(1, hidden)
    weights = torch.full((1, 8), 0.125)

    def runs_of(mixture: Mixture) -> Callable[[], None]:
        step = mixture.num_experts // 8
        chosen = [torch.arange(0, mixture.num_experts, step, dtype=torch.int32)[None] + i for i in range(8)]
        routed = [KERNELS.sort_by_expert(each, mixture.num_experts) for each in chosen]
        return lambda: [mixture.run(x, rows, weights) for rows in routed] and None

    few, many = in_turns(rounds, *map(runs_of, mixtures))
    return {
        "figure": "128 experts in place of 64, int8",
        "ms": statistics.median(many) / 8 * 1e3,
        "ratio": ratio(many, few),
        "aim": "<= 1.05",
    }


def routing(hidden: int, rounds: int) -> dict[str, Any]:
    """Compare routing with the whole layer."""
    mixture = Mixture("int8", 128, 8, hidden, 3 * hidden // 8)
    x = _random(64, hidden)
    router = PanelWeight(_random(128, hidden), out_dtype=torch.float32)
    options = RoutingOptions(num_chosen=8, renormalise=True)
    logits = router(x, None)

    def route() -> None:
        KERNELS.sort_by_expert(KERNELS.route(logits, options)[0], 128)

    def layer() -> None:
        chosen, weights = KERNELS.route(router(x, None), options)
        mixture.run(x, KERNELS.sort_by_expert(chosen, 128), weights)

    own, whole = in_turns(rounds, route, layer)
    return {
        "figure": "routing of 64 tokens, 128 experts",
        "ms": statistics.median(own) * 1e3,
        "ratio": ratio(own, whole),
        "aim": "<= 0.05",
    }


def loading(rounds: int, num_tensors: int, side: int) -> dict[str, Any]:
    """Compare reading many tensors with reading their file."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "model.safetensors"
        names = [f"model.layers.{i // 384}.mlp.experts.{i % 384}.up_proj.weight" for i in range(num_tensors)]
        tensors = {name: torch.full((side, side), i % 100, dtype=torch.int8) for i, name in enumerate(names)}
        save_file(tensors, file)
        del tensors
        memory = torch.empty(side, side, dtype=torch.int8)
        first = memory.numpy()  # the same memory; torch would take microseconds for a number

        def load() -> None:
            with open_tensors(Path(directory), STACK_NAMES) as sources:
                for i, name in enumerate(names):
                    sources[name].read(out=memory)
                    assert first[0, 0] == i % 100

        def read() -> None:
            buffer = bytearray(2**20)
            with file.open("rb", buffering=0) as opened:
                while opened.readinto(buffer):
                    pass

        own, theirs = in_turns(rounds, load, read)
    return {
        "figure": f"loading {num_tensors:,} tensors of {side * side / 1e3:,.0f} kB",
        "ms": statistics.median(own) * 1e3,
        "ratio": ratio(own, theirs),
        "aim": "<= 1.5",
    }


def main() -> None:
    """Check and time everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--hidden", type=int, default=2048, help="size of a token's vector")
    parser.add_argument("--tensors", type=int, default=18_000, help="that are loaded")
    parser.add_argument("--side", type=int, default=256, help="of the tensors that are loaded")
    args = parse_args(parser, rounds=1, threads=1, hidden=128, tensors=500, side=4)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    results = [
        decode(None, args.hidden, args.rounds),
        decode("int8", args.hidden, args.rounds),
        prompt(None, args.hidden, args.rounds),
        prompt("int8", args.hidden, args.rounds),
        more_experts(args.hidden, args.rounds),
        routing(args.hidden, args.rounds),
        loading(args.rounds, args.tensors, args.side),
    ]
    columns = ("figure", "ms", "GB/s", "GFLOP/s", "ratio", "aim")
    print_table([{column: row.get(column, "") for column in columns} for row in results])
    print_json({"benchmark": "moe", "device": device_name(CPU), "results": results, **vars(args)})


if __name__ == "__main__":
    main()
