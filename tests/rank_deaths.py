"""Ranks end or hang at random moments under requests: every answer is that of one process.

python -m tests.rank_deaths                    # 200 deaths of real processes, about 15 minutes
python -m tests.rank_deaths --num-deaths 20 --stages 3
python -m tests.rank_deaths --server           # ranks of an engine process, and that process, end in turn
python -m tests.rank_deaths --engines 20       # so many engines start at once
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from paged import LLMEngine, RankError, SamplingParams
from paged.ranks import local_rank
from paged.ranks.heartbeat import DIRECTORY_PREFIX
from paged.ranks.supervision import Ranks
from paged.server.engine_client import EngineClient
from tests.support import failing_rank

WAYS = ("SIGKILL", "SIGSTOP", "exception", "memory")
MOMENTS = ("prompt", "decode", "swap")
# Blocks are scarce, so that requests are preempted; some are swapped.
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "num_threads": 1,
    "num_blocks": 14,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 32,
    "preemption_mode": "swap",
    "swap_space": 0.01,
    "skip_tokenizer_init": True,
}
TIMEOUT_S = 2.0


def new_ranked_engine(directory: Path, **options: Any) -> LLMEngine:
    """Return an engine whose ranks fail when `end_rank` tells them to."""
    environment = {failing_rank.VARIABLE: str(directory / "failure")}
    with (
        mock.patch.object(local_rank, "RANK_PROCESS", "tests.support.failing_rank"),
        mock.patch.dict(os.environ, environment),
    ):
        return LLMEngine("demo", **{**OPTIONS, "rank_timeout_s": TIMEOUT_S, **options})


def ranks_of(engine: LLMEngine) -> Ranks:
    """Return the processes of an engine."""
    ranks = engine.runner._supervision  # type: ignore[attr-defined]
    assert isinstance(ranks, Ranks)
    return ranks


@contextlib.contextmanager
def failing_restarts(directory: Path) -> Iterator[None]:
    """Have the ranks that are started within fail, too, when they are told to."""
    environment = {failing_rank.VARIABLE: str(directory / "failure")}
    with (
        mock.patch.object(local_rank, "RANK_PROCESS", "tests.support.failing_rank"),
        mock.patch.dict(os.environ, environment),
    ):
        yield


def end_rank(engine: LLMEngine, rank: int, way: str, directory: Path) -> None:
    """End a rank, at once or at its next step."""
    if way.startswith("SIG"):
        os.kill(ranks_of(engine)._local[rank].pid, getattr(signal, way))
    else:
        partial = directory / "partial"
        partial.write_text(f"{rank} {way}")
        partial.rename(directory / "failure")


@contextlib.contextmanager
def noting_errors() -> Iterator[list[float]]:
    """Yield a list to which the time is added whenever a driver notices that a rank is lost."""
    times: list[float] = []
    recover = Ranks.recover

    def noted(self: Ranks, error: BaseException) -> RankError | None:
        times.append(time.perf_counter())
        return recover(self, error)

    with mock.patch.object(Ranks, "recover", noted):
        yield times


def summary(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return the median and the most of each way."""
    return {
        way: {"median": round(statistics.median(each), 3), "most": round(max(each), 3)}
        for way, each in seconds.items()
        if each
    }


def add_requests(engine: LLMEngine, seed: int, num_requests: int = 6) -> None:
    """Add requests of random lengths with the ids of this seed."""
    choose = random.Random(seed)
    for number in range(num_requests):
        prompt = [choose.randrange(1, 1000) for _ in range(choose.randrange(4, 60))]
        params = SamplingParams(
            temperature=choose.choice((0.0, 0.8)),
            max_tokens=choose.randrange(8, 40),
            ignore_eos=True,
            detokenize=False,
        )
        engine.add_request(f"{seed}-{number}", {"prompt_token_ids": prompt}, params)


def finish(engine: LLMEngine) -> dict[str, list[int]]:
    """Step until all requests are done. Return their tokens by id."""
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = [*output.outputs[0].token_ids]
    return found


def run_to(engine: LLMEngine, moment: str) -> dict[str, list[int]]:
    """Step until a prompt, a decode or a swap has just been computed. Return what was done before."""
    found = {}
    counters = engine.scheduler.counters
    swapped = counters.num_swapped
    reached = {
        "prompt": lambda: counters.step_prefill_tokens > 0,
        "decode": lambda: counters.step_decode_tokens > 0 and not counters.step_prefill_tokens,
        "swap": lambda: counters.num_swapped > swapped,
    }[moment]
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = [*output.outputs[0].token_ids]
        if reached():
            break
    return found


def left_behind() -> list[str]:
    """Return the private directories of ranks on this machine."""
    return [str(each) for each in Path(tempfile.gettempdir()).glob(f"{DIRECTORY_PREFIX}*")]


async def run_server(num_deaths: int) -> None:
    """End ranks of an engine process and that process in turn, under streams."""
    params = SamplingParams(temperature=0.8, max_tokens=200, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": [5, 6, 7]}
    options = {name: value for name, value in OPTIONS.items() if name != "skip_tokenizer_init"}
    single = LLMEngine("demo", **options)
    (expected,) = single.generate([prompt], replace(params, seed=1), use_tqdm=False)
    ranked = {**options, "pipeline_parallel_size": 2, "rank_restarts": num_deaths}
    async with EngineClient("demo", **ranked, max_restarts=2 * num_deaths) as client:
        for death in range(num_deaths):
            stream = client.generate(prompt, replace(params, seed=1))
            outputs = [await anext(stream) for _ in range(3)]
            engine = psutil.Process(client._supervisor.replicas[0].connection._process.pid)
            (rank,) = engine.children()
            os.kill((rank, engine)[death % 2].pid, signal.SIGKILL)
            outputs += [output async for output in stream]
            assert outputs[-1].outputs[0].token_ids == expected.outputs[0].token_ids
            assert await client.troubles() == []
            if death % 2:
                assert not psutil.pid_exists(rank.pid) or rank.status() == psutil.STATUS_ZOMBIE
        stats = await client.stats()
    print(f"{num_deaths} deaths: {stats.num_rank_restarts} ranks and {stats.num_restarts} engines replaced")


def start_engine() -> None:
    """Start an engine of two ranks, and print its answers."""
    engine = LLMEngine("demo", **{**OPTIONS, "pipeline_parallel_size": 2, "num_blocks": 32})
    add_requests(engine, 0)
    print(sorted(finish(engine).items()))


def start_engines(count: int) -> None:
    """Start engines of two ranks at once, each from a process of its own, which answers."""
    command = [sys.executable, "-c", "from tests.rank_deaths import start_engine; start_engine()"]
    started = time.perf_counter()
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    answers = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0] * count
    assert len(answers) == 1
    seconds = time.perf_counter() - started
    print(f"{count} engines of two ranks have started at once and answered alike within {seconds:.1f} s")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-deaths", type=int, default=200)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server", action="store_true")
    parser.add_argument("--engines", type=int)
    args = parser.parse_args()
    if args.server:
        asyncio.run(run_server(args.num_deaths))
        return
    if args.engines:
        start_engines(args.engines)
        return
    choose = random.Random(args.seed)
    before = left_behind()
    single = LLMEngine("demo", **OPTIONS)
    to_error: dict[str, list[float]] = {way: [] for way in WAYS}
    to_token: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name, failing_restarts(Path(name)), noting_errors() as errors:
        directory = Path(name)
        engine = new_ranked_engine(
            directory, pipeline_parallel_size=args.stages, rank_restarts=2 * args.num_deaths
        )
        for death in range(args.num_deaths):
            way, moment = choose.choice(WAYS), choose.choice(MOMENTS)
            rank = choose.randrange(1, args.stages)
            add_requests(single, death)
            add_requests(engine, death)
            expected = finish(single)
            found = run_to(engine, moment)
            end_rank(engine, rank, way, directory)
            started = time.perf_counter()
            num_before = engine.stats().num_rank_restarts
            errors.clear()
            while engine.has_unfinished_requests():
                outputs = engine.step()
                found |= {
                    output.request_id: [*output.outputs[0].token_ids] for output in outputs if output.finished
                }
                # Otherwise it is noticed by the next requests.
                if outputs and engine.stats().num_rank_restarts > num_before:
                    to_error[way].append(errors[0] - started)
                    to_token[way].append(time.perf_counter() - started)
                    break
            found |= finish(engine)
            assert found == expected, f"death {death}: {way} of rank {rank} in a {moment}"
            (directory / "failure").unlink(missing_ok=True)  # the requests were done before
            engine.scheduler.block_manager.check()
        num_restarts = engine.stats().num_rank_restarts
        engine.runner.close()
    assert left_behind() == before
    print(
        f"{args.num_deaths} deaths of {args.stages - 1} processes, {num_restarts} restarts: all tokens are "
        "those of one process, nothing is left"
    )
    figures = {"seconds_to_error": summary(to_error), "seconds_to_next_token": summary(to_token)}
    print(json.dumps({"num_deaths": args.num_deaths, "num_restarts": num_restarts, **figures}))


if __name__ == "__main__":
    main()
