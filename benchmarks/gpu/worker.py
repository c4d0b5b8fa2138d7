"""The sections of benchmarks.gpu that touch the device, run in a process of their own.

Each result goes at once, as a line of JSON, into a file that benchmarks.gpu reads, so that a crash loses only
one section. Started by benchmarks.gpu only.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"

from benchmarks.cases import TINY_LAYER, Case, LayerShape, attention_case, layer_cases
from benchmarks.coded_cases import FORMATS, LINEARS_8B, TINY_LINEARS, coded_cases
from benchmarks.common import checkpoint, nano_vllm_workload
from benchmarks.expert_cases import (
    TINY_FORMS,
    TINY_MIXTURE,
    WEIGHT_FORMS,
    MixtureShape,
    expert_cases,
    routing_case,
)
from benchmarks.gpu.comparator_names import readiness_key
from benchmarks.gpu.comparators import COMPARATORS, Skip, adapt
from benchmarks.shapes import AttentionShape, attention_shapes, tiny_shapes
from benchmarks.timing import Limits, device_name, measure_limits, time_call
from paged.kernels.backend import load_kernels

Row = dict[str, Any]
# Weight of each section in the remaining time; unused time goes to the sections after it.
WEIGHTS = {
    "ceilings": 1,
    "engine": 14,
    "decode": 6,
    "skewed": 2,
    "long": 2,
    "quantized": 2,
    "prefill": 10,
    "layers": 2,
    "coded_linear": 6,
    "experts": 4,
}
# Make and load a random checkpoint, compile the kernels, generate 134 thousand tokens.
_ENGINE_SECONDS = 90
# What graphs and a second step in flight are worth.
_ENGINES: dict[str, dict[str, Any]] = {
    "": {},
    ", one step in flight": {"async_scheduling": False},
    ", no CUDA graphs": {"enforce_eager": True},
}


class Worker:
    """Runs sections one after another, each within its share of the time."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.tiny: bool = options["tiny"]
        self.deadline: float = options["deadline"]
        self.not_ready: dict[str, str] = options["not_ready"]
        self.path = Path(options["events"])
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float16
        self.kernels = load_kernels("triton")
        known = options["limits"]
        self.limits = Limits(**known) if known else None
        self.until = self.deadline

    def run(self, sections: list[str]) -> None:
        """Run these. An exception ends its section; one that breaks the device ends the process."""
        self.tell({"device": self.describe()})
        for i, name in enumerate(sections):
            share = WEIGHTS[name] / sum(WEIGHTS[later] for later in sections[i:])
            started = time.time()
            self.until = started + (self.deadline - started) * share
            run: Callable[[], Iterator[Row]] = getattr(self, name, partial(self.attention, name))
            error = None
            try:
                for row in run():
                    self.tell({"section": name, "row": row})
            except Exception:  # recorded; the next section still runs
                error = traceback.format_exc()
                print(error, file=sys.stderr)
            self.tell({"section": name, "error": error, "seconds": time.time() - started})
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.synchronize()  # raises after an illegal access: nothing would work in this process

    def tell(self, event: dict[str, Any]) -> None:
        """Write one line for benchmarks.gpu, and print a short one."""
        with self.path.open("a") as file:
            file.write(json.dumps(event) + "\n")
        row = event.get("row")
        if row is not None and "us" in row:
            print(f"  {row['case']}: {row['us']:,.1f} us, {row['of_limit']:.0%} of the limit", flush=True)
        elif row is not None:
            print(f"  {row}", flush=True)
        elif "section" in event:
            print(f"{event['section']}: {event['seconds']:.0f} s", flush=True)

    def describe(self) -> dict[str, Any]:
        """Describe the device and the libraries."""
        import triton

        described = {
            "name": device_name(self.device),
            "kind": self.device.type,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda or torch.version.hip,
            "python": platform.python_version(),
        }
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            described["sms"] = properties.multi_processor_count
            described["memory_gib"] = round(properties.total_memory / 2**30, 1)
        return described

    def ceilings(self) -> Iterator[Row]:
        """Measure a large copy and a large matrix product, the limits of all other sections."""
        self.limits = measure_limits(self.device, self.dtype, tiny=self.tiny)
        yield {"case": "ceilings", **vars(self.limits)}

    def attention(self, section: str) -> Iterator[Row]:
        """Measure every batch of a section, with our kernel and the comparators."""
        for shape in tiny_shapes() if self.tiny else attention_shapes():
            if shape.section == section:
                yield self.attention_row(shape)

    def attention_row(self, shape: AttentionShape) -> Row:
        """Check and time our kernel on one batch, then every comparator that supports it."""
        if time.time() > self.until:
            return {"case": shape.name, "skipped": "out of time"}
        if shape.cache == "float8_e4m3fn" and not _has_e4m3(self.device):
            return {"case": shape.name, "skipped": "this GPU has no e4m3"}
        torch.manual_seed(len(shape.seq_lens))
        case = attention_case(shape, self.dtype, self.device)
        row = self.row(case)
        row |= {"section": shape.section, "head_dim": shape.head_dim, "block_size": shape.block_size}
        row |= {"batch": len(shape.seq_lens), "context": max(shape.seq_lens)}
        row["comparators"] = {name: self.compare(name, shape, case, row["us"]) for name in COMPARATORS}
        return row

    def compare(self, name: str, shape: AttentionShape, case: Case, ours: float) -> Row:
        """Return a comparator's time and its ratio to ours, or the reason why there is none."""
        try:
            if time.time() > self.until:
                raise Skip("out of time")
            if (key := readiness_key(name, shape.head_dim)) in self.not_ready:
                raise Skip(self.not_ready[key])
            call = adapt(name, shape, case)
            timing = time_call(call, self.device, tiny=self.tiny)
        except Skip as skip:
            return {"skipped": str(skip)}
        except RuntimeError as error:  # torch: a kernel that ran once and then failed
            return {"skipped": str(error).strip().splitlines()[0][:200]}
        us = timing.seconds * 1e6
        return {"us": us, "theirs_over_ours": us / ours, "graph": timing.graph}

    def layers(self) -> Iterator[Row]:
        """Measure the kernels around attention."""
        shape, sizes = (TINY_LAYER, (16,)) if self.tiny else (LayerShape(), (64, 4096))
        for num_tokens in sizes:
            for case in layer_cases(shape, num_tokens, self.dtype, self.device):
                if time.time() > self.until:
                    yield {"case": case.name, "skipped": "out of time"}
                else:
                    yield self.row(case)

    def coded_linear(self) -> Iterator[Row]:
        """Measure products with weights in codes, beside torch's of the same weights in floats."""
        linears, row_counts = (TINY_LINEARS, (1, 20)) if self.tiny else (LINEARS_8B, (1, 16, 512, 4096))
        for linear, shape in linears.items():
            for name in FORMATS:
                if time.time() > self.until:
                    yield {"case": f"{name}, {linear}", "skipped": "out of time"}
                    continue
                for case in coded_cases(linear, *shape, name, row_counts, self.dtype, self.device):
                    row = self.measure(case.name, case.cost, case.check, case.run)
                    yield row | {"floats": self.beside(case.run_floats, row["us"])}

    def experts(self) -> Iterator[Row]:
        """Measure routing, and products of experts beside torch's of the same weights in floats."""
        shape, token_counts = (TINY_MIXTURE, (5,)) if self.tiny else (MixtureShape(), (1, 64, 4096))
        x_of = partial(torch.randn, dtype=self.dtype, device=self.device)
        for num_tokens in token_counts:
            routing = routing_case(shape, num_tokens, self.kernels, x_of)
            yield self.measure(routing.name, routing.cost, routing.check, routing.run)
        for form in TINY_FORMS if self.tiny else WEIGHT_FORMS:
            if time.time() > self.until:
                yield {"case": f"{form} of experts", "skipped": "out of time"}
                continue
            for case in expert_cases(shape, form, token_counts, self.kernels, x_of):
                row = self.measure(case.name, case.cost, case.check, case.run)
                others = {name: self.beside(call, row["us"]) for name, call in case.others().items()}
                yield row | {"others": others}

    def beside(self, call: Callable[[], Any], ours: float) -> Row:
        """Return the time of what torch has for the same, or the reason why it has nothing."""
        try:
            timing = time_call(call, self.device, tiny=self.tiny)
        except (AttributeError, RuntimeError) as error:
            return {"skipped": str(error).strip().splitlines()[0][:200]}
        us = timing.seconds * 1e6
        return {"us": us, "theirs_over_ours": us / ours, "graph": timing.graph}

    def row(self, case: Case) -> Row:
        """Compare one of our kernels with the reference, then time it against its limit."""
        return self.measure(
            case.name, case.cost, partial(case.check, self.kernels), partial(case.run, self.kernels)
        )

    def measure(
        self, name: str, cost: tuple[int, int], check: Callable[[], float], run: Callable[[], Any]
    ) -> Row:
        """Check one of our kernels, then time it against its limit."""
        assert self.limits is not None, "the ceilings were not measured"
        with _poisoned():
            error = check()
        timing = time_call(run, self.device, tiny=self.tiny)
        moved, flops = cost
        limit = self.limits.seconds(moved, flops)
        return {
            "case": name,
            "us": timing.seconds * 1e6,
            "call_us": timing.call_seconds * 1e6,
            "runs": timing.runs,
            "graph": timing.graph,
            "bytes": moved,
            "flops": flops,
            "gb_per_s": moved / timing.seconds / 1e9,
            "tflops": flops / timing.seconds / 1e12,
            "limit_us": limit * 1e6,
            "of_limit": limit / timing.seconds,
            "relative_error": error,
        }

    def engine(self) -> Iterator[Row]:
        """Run nano-vllm's benchmark: 256 ragged requests at once, random weights in Qwen3-0.6B's shape."""
        name = "demo" if self.tiny else "qwen3-0.6b"
        left = self.deadline - time.time()
        if not self.tiny and left < _ENGINE_SECONDS:
            yield {"case": f"engine, {name}", "skipped": f"{left:.0f} s left, it takes {_ENGINE_SECONDS}"}
            return
        for what, options in _ENGINES.items():
            if time.time() > self.until:
                yield {"case": f"engine, {name}{what}", "skipped": "out of time"}
            elif what and self.device.type == "cpu":
                yield {"case": f"engine, {name}{what}", "skipped": "needs a GPU"}
            else:
                yield self.engine_row(name, what, options)
                gc.collect()  # the next engine takes as much of the memory
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()

    def engine_row(self, name: str, what: str, options: dict[str, Any]) -> Row:
        """Run the benchmark with an engine of these options."""
        from paged import LLMEngine, SamplingParams

        directory = checkpoint(name)
        vocab_size = json.loads((Path(directory) / "config.json").read_text())["vocab_size"]
        workload = (
            nano_vllm_workload(3, 0.02, vocab_size) if self.tiny else nano_vllm_workload(256, 1.0, vocab_size)
        )
        started = time.perf_counter()
        engine = LLMEngine(
            directory,
            max_model_len=None if self.tiny else 4096,
            skip_tokenizer_init=True,
            num_blocks=64 if self.tiny else None,
            **options,
        )
        start_s = time.perf_counter() - started
        warm_up = SamplingParams(temperature=0.6, max_tokens=4, ignore_eos=True)
        engine.generate([list(range(50)), [1, 2, 3]], warm_up, use_tqdm=False)
        params = [SamplingParams(temperature=0.6, max_tokens=n, ignore_eos=True) for n in workload.max_tokens]
        before = engine.stats().num_steps
        started = time.perf_counter()
        outputs = engine.generate(workload.prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        assert [len(output.outputs[0].token_ids) for output in outputs] == workload.max_tokens
        num_graphs, graph_bytes, graph_s = engine.runner.graph_costs
        return {
            "case": f"engine, {name}, {len(workload.prompts)} requests{what}",
            "seconds": seconds,
            "start_s": start_s,
            "steps": engine.stats().num_steps - before,
            "output_tokens": workload.num_output_tokens,
            "prompt_tokens": sum(map(len, workload.prompts)),
            "tokens_per_s": workload.num_output_tokens / seconds,
            "graphs": num_graphs,
            "graph_mib": graph_bytes / 2**20,
            "graph_s": graph_s,
        }


class _poisoned:  # noqa: N801  (used as a function)
    """Context in which new memory is NaN, so that reading uninitialised memory shows in the result."""

    def __enter__(self) -> None:
        self.made = torch.empty, torch.empty_like, torch.Tensor.new_empty
        torch.empty, torch.empty_like, torch.Tensor.new_empty = map(_filled_with_nan, self.made)  # type: ignore

    def __exit__(self, *_: object) -> None:
        torch.empty, torch.empty_like, torch.Tensor.new_empty = self.made  # type: ignore


def _filled_with_nan(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.dtype.is_floating_point else tensor

    return made


def _has_e4m3(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    if not given["tiny"] and not torch.cuda.is_available():
        sys.exit("torch.cuda sees no GPU: `python -m benchmarks.gpu --tiny` runs in Triton's interpreter")
    Worker(given).run(given["sections"])
