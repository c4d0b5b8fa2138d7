"""Random deaths of engines, at random frames:

    python -m tests.deaths [ROUNDS] [--requests N] [--seed S]
    python -m tests.deaths --processes 100         # real processes, killed and stopped so often
    python -m tests.deaths --processes 100 --ray   # those of a local Ray cluster, and their actors

Each round sends requests of all kinds to a client of one or two engines that end again and again: killed in
the middle of a frame, by a step that raises, or hanging; in every fourth round one leaves and comes, too. All
requests must end with the tokens, the text, the log-probabilities and the reasons of a run without deaths,
and nothing is left over. CI runs small rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import string
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import psutil
import pytest

from paged import LLMEngine, RequestOutput, RequestOutputKind, SamplingParams
from paged import StructuredOutputsParams as Structured
from paged.commands.common import launcher_of
from paged.server import supervised_engine
from paged.server.engine_client import EngineClient
from paged.server.launcher import ENGINE_PROCESS
from tests.support.mortal_engines import LEAVING, MortalEngines
from tests.support.own_processes import processes_of

OPTIONS: dict[str, Any] = {"num_blocks": 512, "num_threads": 1, "max_num_seqs": 64, "device": "cpu"}
CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
SEEDED = SamplingParams(temperature=0.9, max_tokens=40)
# High temperatures make bytes of characters, which are held back; short stop strings may begin at each token.
VARIANTS = [
    replace(SEEDED, temperature=0.0),
    SEEDED,
    replace(SEEDED, temperature=3.0, ignore_eos=True),
    replace(SEEDED, n=3, stop=["e", "(s"], logprobs=2, max_tokens=60),
    replace(SEEDED, n=2, best_of=3, max_tokens=9),
    replace(SEEDED, prompt_logprobs=1, logprobs=0, stop=["\n\n\n", "self.x"]),
    replace(SEEDED, stop=["return x", "ret", "    "], include_stop_str_in_output=True, min_tokens=5),
    replace(SEEDED, structured_outputs=Structured(regex="[a-z ]{20,30}(end|stop)")),
    replace(SEEDED, structured_outputs=Structured(json={"type": "array", "items": {"type": "integer"}})),
    replace(SEEDED, repetition_penalty=1.3, presence_penalty=0.4, logit_bias={9: 2.0}),
    replace(SEEDED, dry_multiplier=0.8, bad_words=["the"], n=2),
    replace(SEEDED, stop_token_ids=[10, 12], detokenize=False, logprobs=1),
    replace(SEEDED, timeout_s=600.0, ignore_eos=True, max_tokens=90),
]
# Each character may begin one, so that the newest one is always held back.
HOLDING_BACK = [f"{character}\0" for character in string.printable]
PROMPTS = ["def f(", "import os\n", "class A:\n    ", "x = [1, 2, 3]\n" * 12, "# café\n"]


def whole_of(outputs: list[RequestOutput], kind: RequestOutputKind) -> list[Any]:
    """Return all of each sample that a stream of outputs of this kind tells."""
    last = outputs[-1]
    assert last.finished
    told = outputs if kind is DELTA else [last]
    found: list[Any] = []
    for i, sample in enumerate(last.outputs):
        parts = [output.outputs[i] for output in told if output.outputs]
        assert all(part.index == i for part in parts)
        places = (
            None if sample.logprobs is None else [place for part in parts for place in part.logprobs or ()]
        )
        text = "".join(part.text for part in parts)
        token_ids = [token for part in parts for token in part.token_ids]
        found.append(
            (text, token_ids, places, sample.finish_reason, sample.stop_reason, sample.cumulative_logprob)
        )
    return [found, last.prompt_token_ids, last.prompt_logprobs]


def requests(rng: random.Random, num: int) -> list[tuple[str, SamplingParams]]:
    """Return prompts and parameters of all kinds."""
    found = []
    for i in range(num):
        params = replace(VARIANTS[i % len(VARIANTS)], seed=rng.randrange(1000))
        more: dict[str, Any] = {"output_kind": rng.choice([DELTA, DELTA, CUMULATIVE, FINAL_ONLY])}
        if rng.random() < 0.4 and params.detokenize:
            more["stop"] = [*params.stop, *HOLDING_BACK]
        if rng.random() < 0.3:
            more["prompt_logprobs"] = 1
        if rng.random() < 0.3:
            more["logprobs"] = 1
        found.append((rng.choice(PROMPTS), replace(params, **more)))
    return found


async def read(stream: AsyncIterator[RequestOutput], delay_s: float) -> list[RequestOutput]:
    """Return all outputs. A reader that is slow gets them merged."""
    outputs = []
    async for output in stream:
        outputs.append(output)
        await asyncio.sleep(delay_s)
    return outputs


async def embedding_and_score(client: EngineClient) -> tuple[Any, Any]:
    """Return reports on prompts, which are computed anew after a death."""
    embedded = await client.encode(PROMPTS[3])
    return embedded.outputs.embedding, await client.score(PROMPTS[1], ["a, b", "self"])


async def check(
    client: EngineClient, asked: list[tuple[str, SamplingParams]], expected: list[RequestOutput], seed: int
) -> None:
    """Compare all outputs with those of a run without deaths, and look for what is left over."""
    rng = random.Random(seed)
    endless = replace(SEEDED, max_tokens=500, ignore_eos=True)
    leaving = [client.generate("x", endless, f"{LEAVING} {i}") for i in range(3)]
    readers = [asyncio.create_task(read(stream, 0.0)) for stream in leaving]
    delays = [rng.choice([0.0, 0.0, 0.01]) for _ in asked]
    jobs = [read(client.generate(*each), delay) for each, delay in zip(asked, delays, strict=True)]
    reports = asyncio.create_task(embedding_and_score(client))
    found = asyncio.gather(*jobs)
    for reader in readers:
        await asyncio.sleep(rng.random() * 0.2)
        reader.cancel()
    for i, (outputs, whole, (_, params)) in enumerate(zip(await found, expected, asked, strict=True)):
        what = f"request {i}, {params.output_kind.value}, of variant {i % len(VARIANTS)} differs"
        assert whole_of(outputs, params.output_kind) == whole_of([whole], FINAL_ONLY), what
        assert len({output.metrics.arrival_time for output in outputs}) == 1, "the clock changed"
        times = outputs[-1].metrics
        known = [times.arrival_time, times.first_scheduled_time, times.first_token_time, times.finished_time]
        assert known == sorted(known), known
    await reports
    await asyncio.gather(*readers, return_exceptions=True)
    for stream in leaving:
        await stream.aclose()
    supervisor = client._supervisor
    assert (supervisor._requests, supervisor._waiting) == ({}, {})
    for replica in supervisor.replicas:
        assert (replica.connection.requests, replica.connection.load) == ({}, 0)


async def _resize(client: EngineClient, rng: random.Random, most: int) -> None:
    """Let engines leave and come again, on and on."""
    while True:
        for num in (1, most):
            await asyncio.sleep(rng.uniform(0.02, 0.2))
            await client.resize(num)


def run_round(
    engines: list[LLMEngine], seed: int, num_requests: int, mean_frames: int, *, resizes: bool = False
) -> int:
    """Run requests while engines end, and perhaps leave and come. Return how many others began."""
    rng = random.Random(seed)
    asked = requests(rng, num_requests)
    prompts, params = zip(*asked, strict=True)
    expected = engines[0].generate([*prompts], [*params], use_tqdm=False)
    mortal = MortalEngines(engines, seed, mean_frames)

    async def main() -> None:
        client = EngineClient(
            "demo",
            replicas=len(engines),
            router="round-robin",
            stream_interval_s=0.0,
            max_restarts=10**6,
            **{**OPTIONS, "device": "auto"},
        )
        async with client:
            resizing = asyncio.create_task(_resize(client, random.Random(seed), len(engines)))
            if not resizes:
                resizing.cancel()
            await asyncio.wait_for(check(client, asked, expected, seed), 300)
            if resizes:
                assert not resizing.done(), resizing.exception()
                resizing.cancel()
                return
            num_lives = len(mortal.lives)  # another may begin meanwhile
            stats = await client.stats()
            assert stats.num_restarts >= num_lives - len(engines)
            assert stats.num_generated_tokens >= sum(
                len(sample.token_ids) for whole in expected for sample in whole.outputs
            )

    with mortal.installed():
        asyncio.run(main())
    return len(mortal.lives) - len(engines)


async def _end_processes(client: EngineClient, rng: random.Random, num: int) -> None:
    """End engine processes, sometimes both at once, each while none computes a request alone."""
    supervisor = client._supervisor
    while num:
        await asyncio.sleep(rng.uniform(0.1, 0.8))
        busy = [each for each in supervisor.replicas if each.is_up and each.connection.requests]
        if not busy or supervisor._alone is not None:
            continue
        rng.shuffle(busy)
        chosen = [each.connection for each in busy[: rng.choice([1, 1, 1, 2])][:num]]
        for connection in chosen:
            _end_process(connection._process.pid, rng)
        num -= len(chosen)
        while any(each.connection in chosen for each in supervisor.replicas):
            await asyncio.sleep(0.01)


def _end_process(pid: int, rng: random.Random) -> None:
    """Kill or stop an engine process, or kill its actor."""
    own = psutil.Process(pid)
    parent = own.parent()
    if parent is not None and parent.pid != os.getpid() and rng.random() < 0.4:
        parent.kill()
    else:
        own.send_signal(rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]))


def run_processes(
    engine: LLMEngine, num_deaths: int, num_requests: int, seed: int, ray: str | None = None
) -> None:
    """Run requests on two processes that end so often, and look for what is left over.

    ray: the address of the cluster on which they run.
    """
    rng = random.Random(seed)
    me = psutil.Process()
    options = {**OPTIONS, "device": "auto"}
    launcher = launcher_of(ray, options, 2)
    before = me.num_fds(), len(me.children()), {each.pid for each in processes_of(ENGINE_PROCESS)}
    asked = requests(rng, num_requests)
    prompts, params = zip(*asked, strict=True)
    expected = engine.generate([*prompts], [*params], use_tqdm=False)

    async def main() -> None:
        client = EngineClient("demo", replicas=2, max_restarts=10**6, launcher=launcher, **options)
        async with client:
            ending = asyncio.create_task(_end_processes(client, rng, num_deaths))
            num_rounds = 0
            while not ending.done():
                await check(client, asked, expected, rng.randrange(1000))
                num_rounds += 1
            await ending
            assert (await client.stats()).num_restarts == num_deaths
            print(f"{num_deaths} deaths within {num_rounds * num_requests} requests")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervised_engine, "HANG_S", 4.0)
        asyncio.run(main())
    until = time.monotonic() + 60
    while True:
        after = me.num_fds(), len(me.children()), {each.pid for each in processes_of(ENGINE_PROCESS)}
        # Ray opens and closes files of its own.
        if after[1:] == before[1:] and (ray is not None or after == before):
            return
        assert time.monotonic() < until, f"{before} files and processes became {after}"
        time.sleep(0.1)


def main() -> None:
    """Run rounds, and print how often engines ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rounds", type=int, nargs="?", default=50)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--frames", type=int, default=60, help="that a life has on average")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, metavar="DEATHS", help="of real processes")
    parser.add_argument("--ray", action="store_true", help="run these on a local Ray cluster")
    args = parser.parse_args()
    if args.processes is not None:
        ray = "local" if args.ray else None
        run_processes(LLMEngine("demo", **OPTIONS), args.processes, args.requests, args.seed, ray)
        return
    engines = [LLMEngine("demo", **OPTIONS) for _ in range(2)]
    num = 0
    started = time.monotonic()
    for seed in range(args.seed, args.seed + args.rounds):
        num += run_round(engines[: 1 + seed % 2], seed, args.requests, args.frames, resizes=seed % 4 == 3)
        print(f"round {seed}: {num} deaths so far, {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
