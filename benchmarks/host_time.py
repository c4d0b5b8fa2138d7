"""What does the host do in a step on a GPU? Decode steps of Qwen3-0.6B's shape, without the device's work.

    python -m benchmarks.host_time

Needs no GPU. The engine, the launchers and Triton's dispatch run as they do on one, up to `kernel.run`, which
does nothing; linear layers return memory as it is. Every figure is thread CPU time, the 10th percentile of
many steps, in microseconds:

schedule  the scheduler chooses what the step computes
upload    one upload and the batch that is made of it, the draw, and one download: `ModelRunner.execute`
          without the model
launch    the model: its launchers, Triton's dispatch, and torch's allocations and views
update    tokens are recorded
device    the time of the step on an H200 by the roofline of `paged simulate`
waits     how long that device waits for the host in each step if launches take no time, as with CUDA graphs:
          all of the host's time with one step in flight; with two (--depth 2) as `paged simulate` finds

With two steps in flight the next one is scheduled before the last one's tokens are known, and taking the
download is part of `update`.

Each number of requests is timed by launches, then by the replay of a CUDA graph in the place of the model
and the draw, which takes no time here.

Not in it: the driver's calls (some 2.5 µs a launch or copy), cuBLAS's dispatch in linear layers, and the
time between steps. The vocabulary has 1,024 tokens, as the host's work does not depend on it, but the few
operations of torch on logits, which really run here, do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported

import torch
from torch import Tensor, nn
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

from benchmarks.common import SHAPES, parse_args, print_json, print_table
from paged import EngineConfig, LLMEngine, SamplingParams
from paged.device.cuda_graphs import Cost
from paged.device.transfers import Transfers
from paged.kernels.backend import load_kernels
from paged.kernels.checks import TrustedContents
from paged.model.decoder import Decoder
from paged.model.layers.linear import Linear
from paged.runner.decode_graphs import DecodeGraphs
from paged.runner.sizes import Sizes
from paged.sampling.row_penalties import RowPenalties
from paged.simulate.cost import decode_work, window_shares
from paged.simulate.fleet import Fleet, FleetConfig
from paged.simulate.model import read_model
from paged.simulate.pipeline import rank_sizes
from paged.simulate.workload import Workload
from tests.support.absent_gpu import TARGETS, AbsentGPU

VOCAB_SIZE, MAX_MODEL_LEN, MAX_NEW_TOKENS = 1024, 4096, 2000
LARGE = 64 * 2**20  # bytes that only the KV cache takes
PARTS = ("schedule", "upload", "launch", "update")
_empty = torch.empty


def main() -> None:
    """Time steps of each number of requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--num-requests", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--context", type=int, default=500, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--target", choices=TARGETS, default="sm_90")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--depth", type=int, choices=(1, 2), default=1, help="steps in flight")
    args = parse_args(parser, num_requests=[1, 2], context=20, steps=2)
    rows = []
    with absent_gpu(args.target) as launched:
        for num_requests in args.num_requests:
            engine = engine_of(num_requests, args.context + MAX_NEW_TOKENS, args.block_size, args.depth)
            for by in ("launches", "replay"):
                if by == "replay":
                    capture_graphs(engine, num_requests)
                times = time_steps(engine, num_requests, args, launched)
                device, waits = device_waits(num_requests, times["outside launches"], args)
                rows.append({"requests": num_requests, "by": by, **times, "device": device, "waits": waits})
            print_table(rows[-2:])
            del engine
    print_table(rows)
    print("Not in it: the driver's calls (some 2.5 µs a launch or copy) and cuBLAS's dispatch.")
    print_json({"benchmark": "host_time", "rows": rows, **vars(args)})


def time_steps(
    engine: LLMEngine, num_requests: int, args: argparse.Namespace, launched: Counter[str]
) -> dict[str, Any]:
    """Return the microseconds of each part of a decode step, and its launches of Triton's kernels."""
    params = SamplingParams(temperature=args.temperature, ignore_eos=True, max_tokens=MAX_NEW_TOKENS)
    if not engine.has_unfinished_requests():
        for i in range(num_requests):
            engine.add_request(str(i), [i % VOCAB_SIZE] * args.context, params)
    while any(r.num_output_tokens < 2 for r in (*engine.scheduler.running, *engine.scheduler.waiting())):
        engine.core.step()
    clock = Clock()
    clock.watch(engine.scheduler, "schedule")
    for part in ("execute", "plan", "launch", "compute"):
        clock.watch(engine.runner, part)
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(args.steps):
        launched.clear()
        clock.spent.clear()
        started = time.thread_time()
        engine.core.step()
        whole = time.thread_time() - started
        spent = clock.spent
        times["schedule"].append(spent["schedule"])
        executed = spent["execute"] or spent["plan"] + spent["launch"]
        times["upload"].append(executed - spent["compute"])
        times["launch"].append(spent["compute"])
        times["update"].append(whole - spent["schedule"] - executed)
    assert len(engine.scheduler.running) == num_requests, "a request has ended"
    microseconds = {part: sorted(seconds)[len(seconds) // 10] * 1e6 for part, seconds in times.items()}
    outside = sum(microseconds.values()) - microseconds["launch"]
    return {**microseconds, "outside launches": outside, "launches": launched.total()}


def capture_graphs(engine: LLMEngine, num_requests: int) -> None:
    """Give the engine graphs of decodes of so many requests, whose replays do nothing."""
    runner = engine.runner
    sampler = runner.sampler
    sampler.row_penalties = RowPenalties(sampler.history, runner.batches.capacity, runner.device)
    with mock.patch("paged.runner.graph_store.GraphPool", _NoGraphs):
        graphs = runner.decode_graphs = DecodeGraphs(
            *(runner.model, runner.batches, sampler.of_seats, sampler.row_penalties, runner.device),
            [num_requests],
            VOCAB_SIZE,
            is_always_short=False,
        )
        with TrustedContents():
            graphs.capture(runner.kv_cache)


class _NoGraphs:
    """A pool of graphs that hold nothing."""

    def __init__(self, _: torch.device) -> None: ...

    def renew(self) -> None: ...

    def capture(self, compute: Callable[[], Any]) -> tuple[SimpleNamespace, Any]:
        return SimpleNamespace(replay=lambda: None), compute()

    def measure(self, capture: Callable[[], object]) -> Cost:
        capture()
        return Cost(0, 0.0)


def device_waits(num_requests: int, host_us: float, args: argparse.Namespace) -> tuple[float, float]:
    """Simulate steps on an H200 with this time of the host. Return the microseconds of the device's part of a
    decode step, and for how many of each it waits for the host.
    """
    with tempfile.TemporaryDirectory() as folder:
        shape = {**SHAPES["qwen3-0.6b"], "architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16"}
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        options = {"max_num_seqs": num_requests, "max_model_len": MAX_MODEL_LEN, "swap_space": 0.0}
        config = EngineConfig(folder, async_scheduling=args.depth > 1, **options)
        hardware = FleetConfig(gpu="H200", step_overhead=host_us / 1e3)
        fleet = Fleet(hardware, config)
        sizes = rank_sizes(config, read_model(folder), "sm_90")[-1]
    alone = replace(hardware, step_overhead=0.0).roofline(sizes)
    device = alone.seconds(decode_work(num_requests, args.context, window_shares(sizes.model))) * 1e6
    if args.depth == 1:
        return device, host_us
    workload = Workload(
        requests=num_requests, rate=1e9, input_len=f"fixed:{args.context}", output_len=f"fixed:{args.steps}"
    )
    statistics = fleet.run(workload.open()[1])
    return device, fleet.replicas[0].waited_s / statistics.summary()["steps"] * 1e6


class Clock:
    """The thread's CPU time in methods, since `spent` was cleared."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()

    def watch(self, owner: Any, name: str) -> None:
        """Count the time in this method of this object."""
        method: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.spent[name] += time.thread_time() - started  # type: ignore[assignment]

        setattr(owner, name, timed)


# A GPU that is not here


@contextlib.contextmanager
def absent_gpu(target: str) -> Iterator[Counter[str]]:
    """Inside, kernels are specialised and launched for this target, and do nothing. Yields their launches."""
    launched: Counter[str] = Counter()
    patches = {
        "triton.runtime.JITFunction._do_compile": _compile_nothing(launched),
        "torch.empty": _empty_or_zeros,
        "paged.runner.part_runner.load_model": _load_stubbed,
    }
    patches["paged.runner.part_runner.Transfers"] = partial(Transfers, in_place=False)
    patches["torch.cuda.Event"] = _Happened
    driver.set_active(AbsentGPU(target))
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        for name, replacement in patches.items():
            stack.enter_context(mock.patch(name, replacement))
        yield launched


class _Happened:
    """An event of a stream that has come so far."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Launched(CompiledKernel):  # type: ignore[misc]  (untyped)
    """A compiled kernel that does nothing."""

    module = None
    function = 0
    packed_metadata = ()
    n_regs = 128
    metadata = SimpleNamespace(shared=64 * 1024, num_warps=4)

    def __init__(self, name: str, launched: Counter[str]) -> None:
        self.name = name
        self._launched = launched

    def launch_metadata(self, *_: Any) -> None: ...

    def run(self, *_: Any) -> None:  # type: ignore[override]
        self._launched[self.name] += 1


def _compile_nothing(launched: Counter[str]) -> Callable[..., _Launched]:
    def compile_nothing(self: JITFunction, key: Any, _: Any, device: int, *__: Any) -> _Launched:
        kernel = self.device_caches[device][0][key] = _Launched(self.fn.__name__, launched)
        return kernel

    return compile_nothing


def _empty_or_zeros(*size: Any, **options: Any) -> Tensor:
    """Allocate as torch.empty. Zero numbers that the host reads, or torch as an index: no kernel writes them.

    The KV cache, which no kernel reads, may be larger than this machine's memory. No memory is pinned.
    """
    options.pop("pin_memory", None)
    sizes = size[0] if isinstance(size[0], (tuple, list)) else size
    if len(sizes) == 1 or options.get("dtype") in (torch.int64, torch.int32, torch.bool):
        return torch.zeros(*size, **options)
    dtype = options.get("dtype", torch.get_default_dtype())
    num_bytes = torch.Size(sizes).numel() * dtype.itemsize
    if num_bytes > LARGE:
        with tempfile.TemporaryFile() as file:  # of which no byte is ever written
            file.truncate(num_bytes)
            return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=dtype).view(sizes)
    return _empty(*size, **options)


# A model without weights


class _Stub:
    """A linear layer's weight that multiplies nothing."""

    gated = False

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self._size = size
        self._dtype = dtype

    def __call__(self, x: Tensor, _: Tensor | None) -> Tensor:
        return x.new_empty(x.shape[0], self._size, dtype=self._dtype)

    def rows(self, indices: Tensor) -> Tensor:
        return _empty(indices.shape[0], self._size, dtype=self._dtype)


class _Logits(_Stub):
    def __call__(self, x: Tensor, _: Tensor | None) -> Tensor:
        return x.new_zeros(x.shape[0], self._size, dtype=torch.float32)


def _load_stubbed(sizes: Sizes, *_: Any) -> Decoder:
    """Make the model with Triton's launchers, though the device is a CPU here, and without weights."""
    model = Decoder(sizes.model, load_kernels("triton"))
    dtype: torch.dtype = getattr(torch, sizes.dtype)
    for module in model.modules():
        if isinstance(module, Linear):
            module.form = _Stub(module.weight.shape[0] if hasattr(module, "weight") else 0, dtype)
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() == 1:
                setattr(
                    module, name, nn.Parameter(torch.ones_like(parameter, dtype=dtype), requires_grad=False)
                )
    model.embedding.form = _Stub(sizes.model.hidden_size, dtype)
    model.head.form = _Logits(sizes.model.vocab_size, dtype)
    return model


def engine_of(num_requests: int, max_tokens: int, block_size: int, depth: int = 1) -> LLMEngine:
    """Make an engine of Qwen3-0.6B's shape with room for so many requests of so many tokens.

    depth: how many steps are in flight.
    """
    with mock.patch("paged.engine.engine._steps_in_flight", return_value=depth):
        return _engine_of(num_requests, max_tokens, block_size)


def _engine_of(num_requests: int, max_tokens: int, block_size: int) -> LLMEngine:
    shape = {**SHAPES["qwen3-0.6b"], "vocab_size": VOCAB_SIZE, "architectures": ["Qwen3ForCausalLM"]}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        (Path(folder) / "model.safetensors").touch()  # whose size is looked at
        return LLMEngine(
            folder,
            device="cpu",
            dtype="bfloat16",
            skip_tokenizer_init=True,
            preemption_mode="recompute",
            block_size=block_size,
            num_blocks=num_requests * -(-max_tokens // block_size),
            max_num_seqs=num_requests,
            max_num_batched_tokens=16384,
            max_model_len=MAX_MODEL_LEN,
        )


if __name__ == "__main__":
    main()
