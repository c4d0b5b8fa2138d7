"""Requests that end their engine, at once, after a time or after tokens, beside good streams:

    python -m tests.poisons [ROUNDS] [--seed S]      # engines of this process, as in CI
    python -m tests.poisons 8 --processes            # real processes: one, two replicas, two ranks

Each round sends one to eight of them beside eight good streams, together or one after the other. The good
streams must be those of a run without poisons, each poison is refused by name, and a further request is
answered, with the default of --max-restarts.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from paged import LLMEngine, RequestKillsEngineError, RequestOutput, SamplingParams
from paged.server import launcher
from paged.server.engine_client import EngineClient
from tests.deaths import OPTIONS, read
from tests.support.mortal_engines import MortalEngines
from tests.support.poisoned_process import is_due, poison_id

NUM_GOOD = 8
LONG = SamplingParams(temperature=0.8, max_tokens=150, ignore_eos=True)
ENDLESS = replace(LONG, max_tokens=2000, seed=1)
KINDS = [("at once", 0), ("seconds", 0.03), ("seconds", 0.1), ("tokens", 1), ("tokens", 5), ("tokens", 40)]
FLAVOURS: dict[str, dict[str, Any]] = {
    "one engine": {},
    "two replicas": {"replicas": 2, "router": "round-robin"},
    "two ranks": {"pipeline_parallel_size": 2},
}


def expected_of(engine: LLMEngine) -> list[RequestOutput]:
    """Return the outputs of the good requests, as an undisturbed engine makes them."""
    return engine.generate([*map(str, range(NUM_GOOD))], [*map(_good, range(NUM_GOOD))], use_tqdm=False)


def _good(i: int) -> SamplingParams:
    return replace(LONG, seed=i)


async def check(client: EngineClient, expected: list[RequestOutput], seed: int) -> list[str]:
    """Send poisons beside good streams, and check how all of them end. Return the ids of the poisons."""
    rng = random.Random(seed)
    num_poisons = 1 + seed % 8
    pause_s = rng.choice([0.0, 0.0, 0.05])
    names = [poison_id(i, *rng.choice(KINDS)) for i in range(num_poisons)]
    is_early = rng.random() < 0.3
    good = [asyncio.create_task(read(client.generate(str(i), _good(i)), 0.0)) for i in range(NUM_GOOD)]
    if not is_early:
        await asyncio.sleep(rng.choice([0.0, 0.05]))
    poisons = []
    for name in names:
        poisons.append(asyncio.create_task(read(client.generate("x", ENDLESS, name), 0.0)))
        await asyncio.sleep(pause_s)
    for name, outcome in zip(names, await asyncio.gather(*poisons, return_exceptions=True), strict=True):
        assert isinstance(outcome, RequestKillsEngineError), f"{name} gave {str(outcome)[:200]}"
        assert "the last 2 nothing else" in str(outcome)
    for outputs, whole in zip(await asyncio.gather(*good), expected, strict=True):
        assert outputs[-1].outputs == whole.outputs, "a good stream differs"
    (late,) = (await read(client.generate("0", _good(0)), 0.0))[-1].outputs
    assert late == expected[0].outputs[0], "the server does not live"
    supervisor = client._supervisor
    assert (supervisor._requests, supervisor._waiting, supervisor._alone) == ({}, {}, None)
    return names


def run_round(engines: list[LLMEngine], expected: list[RequestOutput], seed: int) -> list[str]:
    """Run a round on engines of this process. Return the ids of its poisons."""
    lives = MortalEngines(engines, seed, None)
    lives.is_fatal = is_due

    async def main() -> list[str]:
        async with EngineClient("demo", **{**OPTIONS, "device": "auto"}, replicas=len(engines)) as client:
            return await asyncio.wait_for(check(client, expected, seed), 300)

    with lives.installed():
        return asyncio.run(main())


@contextmanager
def _hooked() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "ENGINE_PROCESS", "tests.support.poisoned_process")
        yield


def run_processes(flavour: str, expected: list[RequestOutput], seed: int) -> tuple[list[str], int]:
    """Run a round on real processes. Return the ids of its poisons, and the number of restarts."""

    async def main() -> tuple[list[str], int]:
        options = {**OPTIONS, "device": "auto", **FLAVOURS[flavour]}
        async with EngineClient("demo", **options) as client:
            names = await asyncio.wait_for(check(client, expected, seed), 1200)
            return names, (await client.stats()).num_restarts

    with _hooked():
        return asyncio.run(main())


def main() -> None:
    """Run rounds, and print what each had."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rounds", type=int, nargs="?", default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", action="store_true", help="run real processes")
    args = parser.parse_args()
    engines = [LLMEngine("demo", **OPTIONS) for _ in range(2)]
    expected = expected_of(engines[0])
    for seed in range(args.seed, args.seed + args.rounds):
        started = time.monotonic()
        if args.processes:
            for flavour in FLAVOURS:
                started = time.monotonic()
                names, num = run_processes(flavour, expected, seed)
                print(f"round {seed}, {flavour}: {num} restarts, {time.monotonic() - started:.0f} s, {names}")
        else:
            names = run_round(engines[: 1 + seed % 2], expected, seed)
            print(f"round {seed}: {time.monotonic() - started:.1f} s, {names}", flush=True)


if __name__ == "__main__":
    main()
