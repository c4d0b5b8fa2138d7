"""Ranks end or hang at random moments under requests: every answer is that of one process.

python -m tests.rank_deaths                    # 200 deaths of real processes, about 20 minutes
python -m tests.rank_deaths --num-deaths 20 --stages 3
python -m tests.rank_deaths --server           # ranks of an engine process, and that process
python -m tests.rank_deaths --engines 20       # so many engines start at once

In the library an engine that has lost a rank is dead, and a new one goes on with its unfinished requests.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from paged import EngineDeadError, LLMEngine, RankError, RequestOutput, SamplingParams
from paged.ranks import local_rank
from paged.ranks.heartbeat import DIRECTORY_PREFIX
from paged.ranks.supervision import Ranks
from paged.server import launcher
from paged.server.engine_client import EngineClient
from tests.support import failing_rank

WAYS = ("SIGKILL", "SIGSTOP", "exception", "memory", "hang")
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


def ranks_of(engine: LLMEngine) -> Ranks:
    """Return the processes of an engine."""
    ranks = engine.runner._supervision  # type: ignore[attr-defined]
    assert isinstance(ranks, Ranks)
    return ranks


@contextlib.contextmanager
def failing_ranks(directory: Path) -> Iterator[None]:
    """Within, engines and engine processes start ranks that fail when `end_rank` tells them to."""
    environment = {failing_rank.VARIABLE: str(directory / "failure")}
    with (
        mock.patch.object(local_rank, "RANK_PROCESS", "tests.support.failing_rank"),
        mock.patch.object(launcher, "ENGINE_PROCESS", "tests.support.failing_ranks_process"),
        mock.patch.dict(os.environ, environment),
    ):
        yield


def end_rank(pid: int, rank: int, way: str, directory: Path) -> None:
    """End a rank, at once or at its next step."""
    if way.startswith("SIG"):
        os.kill(pid, getattr(signal, way))
    else:
        partial = directory / "partial"
        partial.write_text(f"{rank} {way}")
        partial.rename(directory / "failure")


def summary(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return the median and the most of each way."""
    return {
        way: {"median": round(statistics.median(each), 3), "most": round(max(each), 3)}
        for way, each in seconds.items()
        if each
    }


def requests_of(seed: int, num_requests: int = 6) -> dict[str, tuple[list[int], SamplingParams]]:
    """Return requests of random lengths by the ids of this seed."""
    choose = random.Random(seed)
    found = {}
    for number in range(num_requests):
        prompt = [choose.randrange(1, 1000) for _ in range(choose.randrange(4, 60))]
        params = SamplingParams(
            temperature=choose.choice((0.0, 0.8)),
            max_tokens=choose.randrange(8, 40),
            ignore_eos=True,
            detokenize=False,
        )
        found[f"{seed}-{number}"] = prompt, params
    return found


def add_requests(engine: LLMEngine, seed: int, num_requests: int = 6) -> None:
    """Add requests of random lengths with the ids of this seed."""
    for request_id, (prompt, params) in requests_of(seed, num_requests).items():
        engine.add_request(request_id, {"prompt_token_ids": prompt}, params)


def go_on(engine: LLMEngine, unfinished: Sequence[RequestOutput], seed: int) -> None:
    """Let an engine go on with what another one has not finished, each request from its tokens."""
    requests = requests_of(seed)
    for output in unfinished:
        prompt, params = requests[output.request_id]
        tokens = [*(output.prompt_token_ids or ()), *output.outputs[0].token_ids]
        params = replace(params, max_tokens=params.max_tokens - (len(tokens) - len(prompt)))
        engine.add_request(output.request_id, {"prompt_token_ids": tokens}, params)


def step(engine: LLMEngine, found: dict[str, list[int]]) -> None:
    """Run a step. Add the prompt and the tokens of the requests that finish, by id."""
    for output in engine.step():
        if output.finished:
            found[output.request_id] = [*output.prompt_token_ids, *output.outputs[0].token_ids]


def finish(engine: LLMEngine, found: dict[str, list[int]] | None = None) -> dict[str, list[int]]:
    """Step until all requests are done. Return the prompt and tokens of each by id, beside those found."""
    found = {} if found is None else found
    while engine.has_unfinished_requests():
        step(engine, found)
    return found


def finish_dead(engine: LLMEngine, found: dict[str, list[int]]) -> list[RequestOutput]:
    """Take what a dead engine had finished. Return what it had not."""
    with contextlib.suppress(EngineDeadError):
        step(engine, found)
    return engine.unfinished()


def run_to(engine: LLMEngine, moment: str, found: dict[str, list[int]]) -> None:
    """Step until a prompt, a decode or a swap has just been computed. Add what is finished before."""
    counters = engine.scheduler.counters
    swapped = counters.num_swapped
    reached = {
        "prompt": lambda: counters.step_prefill_tokens > 0,
        "decode": lambda: counters.step_decode_tokens > 0 and not counters.step_prefill_tokens,
        "swap": lambda: counters.num_swapped > swapped,
    }[moment]
    while engine.has_unfinished_requests():
        step(engine, found)
        if reached():
            break


def left_behind() -> list[str]:
    """Return the private directories of ranks on this machine."""
    return [str(each) for each in Path(tempfile.gettempdir()).glob(f"{DIRECTORY_PREFIX}*")]


async def run_server(ways: Sequence[str], sizes: Mapping[str, int], directory: Path) -> None:
    """End a rank of an engine process in each of these ways, under a stream. "engine" ends that process."""
    params = SamplingParams(temperature=0.8, max_tokens=40, ignore_eos=True, detokenize=False, seed=1)
    prompt = {"prompt_token_ids": [5, 6, 7]}
    options = {name: value for name, value in OPTIONS.items() if name != "skip_tokenizer_init"}
    (expected,) = LLMEngine("demo", **options).generate([prompt], params, use_tqdm=False)
    ranked = {**options, **sizes, "rank_timeout_s": TIMEOUT_S}
    async with EngineClient("demo", **ranked, max_restarts=10 * len(ways)) as client:
        for way in ways:
            num_restarts = (await client.stats()).num_restarts
            stream = client.generate(prompt, params)
            outputs = [await anext(stream)]  # a busy reader may get many tokens, even all, in one
            engine = psutil.Process(client._supervisor.replicas[0].connection._process.pid)
            ranks = engine.children()
            if way == "engine":
                engine.kill()
            else:
                end_rank(ranks[0].pid, 1, way, directory)
            while True:
                outputs += [output async for output in stream]
                assert outputs[-1].outputs[0].token_ids == expected.outputs[0].token_ids, way
                if (await client.stats()).num_restarts > num_restarts:
                    break
                stream = client.generate(prompt, params)  # the last one was done before
            assert await client.troubles() == []
            for each in (engine, *ranks):
                assert not each.is_running() or each.status() == psutil.STATUS_ZOMBIE, way


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


def run_library(
    num_deaths: int, sizes: Mapping[str, int], choose: random.Random, directory: Path
) -> dict[str, Any]:
    """End ranks of engines in this process, and have others go on. Return seconds of what they took."""
    single = LLMEngine("demo", **OPTIONS)
    to_error: dict[str, list[float]] = {way: [] for way in WAYS}
    to_token: dict[str, list[float]] = {way: [] for way in WAYS}
    ranked = {**OPTIONS, **sizes, "rank_timeout_s": TIMEOUT_S}
    engine = LLMEngine("demo", **ranked)
    for death in range(num_deaths):
        way, moment = choose.choice(WAYS), choose.choice(MOMENTS)
        rank = choose.randrange(1, engine.config.num_ranks)
        add_requests(single, death)
        add_requests(engine, death)
        found: dict[str, list[int]] = {}
        started = time.perf_counter()
        try:
            run_to(engine, moment, found)
            started = time.perf_counter()
            end_rank(ranks_of(engine)._local[rank].pid, rank, way, directory)
            finish(engine, found)
        except EngineDeadError as error:
            if not isinstance(error.__cause__, RankError):
                raise
            to_error[way].append(time.perf_counter() - started)
            left = finish_dead(engine, found)
            engine = LLMEngine("demo", **ranked)
            go_on(engine, left, death)
            step(engine, found)
            to_token[way].append(time.perf_counter() - started)
        # Otherwise the requests were done before, and a rank that has ended is noticed by the next ones.
        (directory / "failure").unlink(missing_ok=True)
        assert finish(engine, found) == finish(single), f"death {death}: {way} of rank {rank} in a {moment}"
        engine.scheduler.block_manager.check()
    engine.shutdown()
    num_lost = sum(map(len, to_error.values()))
    seconds = {"seconds_to_error": summary(to_error), "seconds_to_next_token": summary(to_token)}
    return {"num_deaths": num_deaths, "num_lost": num_lost, **seconds}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-deaths", type=int, default=200)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server", action="store_true")
    parser.add_argument("--engines", type=int)
    args = parser.parse_args()
    if args.engines:
        start_engines(args.engines)
        return
    choose = random.Random(args.seed)
    sizes = {"pipeline_parallel_size": args.stages, "tensor_parallel_size": args.shards}
    before = left_behind()
    with tempfile.TemporaryDirectory() as name, failing_ranks(Path(name)):
        if args.server:
            ways = [choose.choice((*WAYS, "engine")) for _ in range(args.num_deaths)]
            asyncio.run(run_server(ways, sizes, Path(name)))
            figures: dict[str, Any] = {"num_deaths": len(ways)}
        else:
            figures = run_library(args.num_deaths, sizes, choose, Path(name))
    assert left_behind() == before
    print(f"{args.num_deaths} deaths: all tokens are those of one process, and nothing is left")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
