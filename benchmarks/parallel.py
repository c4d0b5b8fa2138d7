"""What do two stages, or two shards, cost beside one process? Their steps, messages and links with a delay.

    python -m benchmarks.parallel                        # the 15M shape
    python -m benchmarks.parallel --split shards         # of each layer, in place of stages
    python -m benchmarks.parallel --model tinyllama-1.1b --batches 1 16
    python -m benchmarks.parallel --links 0.2 5 50       # milliseconds that everything takes on its way

One process with all threads, and two processes with a share of them. Each batch first gives the same tokens
in both, then decodes in interleaved rounds: medians, and by what share of them the rounds differ.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import FileStore

from benchmarks.common import checkpoint, parse_args, print_json, print_table
from paged import LLMEngine, SamplingParams
from paged.architectures.config import ModelConfig
from paged.architectures.hf_config import read_config
from paged.engine import engine as engine_module
from paged.options.config import EngineConfig
from paged.ranks import follower as follower_module
from paged.ranks.driver import DriverRunner
from paged.ranks.follower import FollowerRunner
from paged.ranks.layout import RankLayout
from paged.ranks.transport import GlooTransport

SPLITS = {"stages": "pipeline_parallel_size", "shards": "tensor_parallel_size"}
TIMEOUT_S = 120.0
CLOCK = time.CLOCK_MONOTONIC  # the same in all processes of a machine


class TimedTransport(GlooTransport):
    """Sends everything with its time, and lets nothing arrive before a delay is over.

    first_kernels: the seconds from the sending of each step's message to the first kernel of a follower.
    """

    delay_s = 0.0
    sent_at = 0.0  # of the last message that came

    def send_message(self, data: bytes) -> None:
        """Send a message behind the time."""
        super().send_message(_now() + data)

    def receive_message(self) -> bytes:
        """Wait for a message, and until it may be there."""
        data = super().receive_message()
        self.sent_at = _time(data[:8])
        self._wait(self.sent_at)
        return data[8:]

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a tensor behind the time."""
        now = torch.frombuffer(bytearray(_now()), dtype=torch.uint8)
        super().send(torch.cat([now, tensor.reshape(-1).view(torch.uint8)]), rank)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> Tensor:
        """Wait for a tensor, and until it may be there."""
        size = torch.Size(shape).numel() * dtype.itemsize
        found = super().receive((8 + size,), torch.uint8, rank)
        self._wait(_time(found[:8].numpy().tobytes()))
        return found[8:].clone().view(dtype).view(tuple(shape))

    def _wait(self, sent_at: float) -> None:
        left = sent_at + self.delay_s - time.clock_gettime(CLOCK)
        if left > 0:
            time.sleep(left)


def _now() -> bytes:
    return time.clock_gettime_ns(CLOCK).to_bytes(8, "little")


def _time(data: bytes) -> float:
    return int.from_bytes(data, "little") / 1e9


class Place:
    """A rank of two, which meet in a directory. Its `Peers`."""

    def __init__(self, directory: Path, rank: int, delay_s: float) -> None:
        self.directory = directory
        self.rank = rank
        self.transport = TimedTransport(2, rank, timeout_s=TIMEOUT_S, host="127.0.0.1")
        self.transport.delay_s = delay_s

    def loaded(self, _: int) -> None:
        """Meet the other one."""
        store = FileStore(str(self.directory / "store"), 2)
        store.set_timeout(timedelta(seconds=TIMEOUT_S))
        self.transport.connect(store)

    def least(self, num_blocks: int, num_host_blocks: int) -> tuple[int, int]:
        """Return the same: both were told how many."""
        return num_blocks, num_host_blocks


def follow(directory: Path, delay_s: float, options: dict[str, Any]) -> None:
    """Be the other rank. Write when the first kernel of each step began, after its message was sent."""
    config = EngineConfig(**{**options, "num_threads": _share(options["num_threads"])})
    model_config = read_config(Path(config.model))
    place = Place(directory, 1, delay_s)
    layout = RankLayout.of(config, model_config)
    common: dict[str, Any] = {"layout": layout, "transport": place.transport, "peers": place}
    runner = FollowerRunner(config, model_config, Path(config.model), rank=1, **common)
    began: list[float] = []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            began.append(time.clock_gettime(CLOCK) - place.transport.sent_at)
            return function(*args)

        return call

    # A stage computes a part, another shard of the driver's stage all that the driver does.
    functions = {name: timed(getattr(follower_module, name)) for name in ("compute_part", "compute")}
    with mock.patch.multiple(follower_module, **functions):
        runner.run()
    (directory / "began").write_text(json.dumps(began))


@contextmanager
def two_ranks(delay_s: float, options: dict[str, Any]) -> Iterator[tuple[LLMEngine, list[float]]]:
    """Yield an engine of two ranks, and a list that has the followers' times at the end."""
    times: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        follower = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.parallel",
                "--follow",
                name,
                repr(delay_s),
                json.dumps(options),
            ]
        )
        place = Place(directory, 0, delay_s)
        made: list[DriverRunner] = []

        def new_driver(config: EngineConfig, model_config: ModelConfig, path: Path, _: Any) -> DriverRunner:
            layout = RankLayout.of(config, model_config)
            common: dict[str, Any] = {"layout": layout, "transport": place.transport, "peers": place}
            made.append(DriverRunner(config, model_config, path, **common))
            return made[0]

        try:
            with mock.patch.object(engine_module, "_new_executor", new_driver):
                engine = LLMEngine(**options)
            yield engine, times
            made[0].end()
            follower.wait(TIMEOUT_S)
            times += json.loads((directory / "began").read_text())
        finally:
            follower.kill()


def _share(num_threads: int) -> int:
    return max(1, num_threads // 2)


def tokens_of(engine: LLMEngine, batch: int, num_tokens: int) -> tuple[list[list[int]], float]:
    """Decode. Return the tokens, and the tokens of a second without the prompts' step."""
    num_threads = engine.config.num_threads or 1
    # Engines of one process are made with the same number.
    torch.set_num_threads(_share(num_threads) if engine.config.num_ranks > 1 else num_threads)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    names = [str(i) for i in range(batch)]
    for i, name in enumerate(names):
        engine.add_request(name, [5 + i, *range(20, 51)], params)
    found: dict[str, list[int]] = {}
    engine.step()
    started = time.perf_counter()
    while engine.has_unfinished_requests():
        found |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
    seconds = time.perf_counter() - started
    return [found[name] for name in names], batch * (num_tokens - 1) / seconds


def compare(options: dict[str, Any], delay_s: float, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each batch: tokens per second of one process and of two ranks."""
    rows = []
    one = LLMEngine(**{name: value for name, value in options.items() if name != SPLITS[args.split]})
    with two_ranks(delay_s, options) as (two, times):
        sizes: list[int] = []
        send = two.runner._transport.send_message
        two.runner._transport.send_message = lambda data: (sizes.append(len(data)), send(data))  # type: ignore[method-assign]
        for batch in args.batches:
            alone, _ = tokens_of(one, batch, args.tokens)
            divided, _ = tokens_of(two, batch, args.tokens)
            assert alone == divided, f"the tokens of two {args.split} are others"
            sizes.clear()
            rounds = [
                [tokens_of(engine, batch, args.tokens)[1] for engine in (one, two)]
                for _ in range(args.rounds)
            ]
            first, second = ([each[i] for each in rounds] for i in range(2))
            rows.append(
                {
                    "link ms": delay_s * 1e3,
                    "batch": batch,
                    "one process, tokens/s": statistics.median(first),
                    f"two {args.split}, tokens/s": statistics.median(second),
                    "ratio": statistics.median(second) / statistics.median(first),
                    "spread": max(
                        (max(each) - min(each)) / statistics.median(each) for each in (first, second)
                    ),
                    "message, bytes": statistics.median(sizes),
                }
            )
    first_kernel = statistics.median(times) * 1e3
    return [{**row, "to first kernel, ms": first_kernel} for row in rows]


def main() -> None:
    """Compare, or be the other rank of a comparison."""
    if sys.argv[1:2] == ["--follow"]:
        directory, delay_s, options = sys.argv[2:]
        follow(Path(directory), float(delay_s), json.loads(options))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="llama-15m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--split", choices=SPLITS, default="stages")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=32, help="of each request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of one process; two divide them")
    parser.add_argument("--links", type=float, nargs="+", default=[0.0], help="delays in milliseconds")
    args = parse_args(parser, model="demo", batches=[1, 2], tokens=4, rounds=1)
    options = {
        "model": checkpoint(args.model),
        "dtype": args.dtype,
        "device": "cpu",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "num_blocks": 8 * max(args.batches) + 64,
        "max_model_len": 32 + args.tokens,
        "max_num_batched_tokens": 4096,
        SPLITS[args.split]: 2,
        "num_threads": args.threads,
    }
    rows = [row for delay in args.links for row in compare(options, delay / 1e3, args)]
    print_table(rows)
    print_json({"benchmark": "parallel", "rows": rows, **vars(args)})


if __name__ == "__main__":
    main()
