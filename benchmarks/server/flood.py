"""A tenant's flood: another tenant's time to first token beside it, and beside well-behaved tenants.

    python -m benchmarks.server.flood PORT NUM_AT_ONCE NUM_TENANTS      the crowd; until it is terminated

The crowd has so many requests open at all times, of one tenant, or of as many tenants with one each.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from typing import Any

from benchmarks.server.served import paged_serve
from benchmarks.server.timed import first_token_at, quantile_ms

MAX_NUM_SEQS = 64
FLOOD = 8 * MAX_NUM_SEQS
# By policy: requests that are open at once, and their tenants. 60 leave seats in the batch for the victim.
CASES = {"fair": ((0, 0), (60, 60), (MAX_NUM_SEQS, MAX_NUM_SEQS), (FLOOD, 1)), "fcfs": ((FLOOD, 1),)}
VICTIM = {"prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "user": "victim"}
BEGIN_S = 2.0  # until the crowd's requests have ended at different times


def measure(model: str, *, seconds: float, rate: float) -> list[dict[str, Any]]:
    """Measure the victim alone, beside well-behaved tenants, and beside the flood of one.

    seconds: of each row. rate: the victim's requests a second, whether answers come or not.
    """
    rows: list[dict[str, Any]] = []
    for policy, cases in CASES.items():
        flags = ["--device", "cpu", "--num-threads", 1, "--max-num-seqs", MAX_NUM_SEQS]
        flags += ["--scheduling-policy", policy]
        with paged_serve(model, *flags) as server:
            asyncio.run(_victims(server.port, 1.0, rate))  # warm-up
            for num_at_once, num_tenants in cases:
                waited = asyncio.run(_beside(server.port, num_at_once, num_tenants, seconds, rate))
                rows.append(
                    {
                        "policy": policy,
                        "requests beside": num_at_once,
                        "of tenants": num_tenants,
                        "victims": len(waited),
                        "first token p50 ms": quantile_ms(waited, 0.5),
                        "p95 ms": quantile_ms(waited, 0.95),
                    }
                )
    return rows


async def _beside(port: int, num_at_once: int, num_tenants: int, seconds: float, rate: float) -> list[float]:
    if num_at_once == 0:
        return await _victims(port, seconds, rate)
    numbers = [str(number) for number in (port, num_at_once, num_tenants)]
    crowd = await asyncio.create_subprocess_exec(sys.executable, "-m", "benchmarks.server.flood", *numbers)
    try:
        await asyncio.sleep(BEGIN_S)
        waited = await _victims(port, seconds, rate)
        assert crowd.returncode is None, "the crowd has ended"
    finally:
        crowd.terminate()
        await crowd.wait()
    await asyncio.sleep(1.0)  # what is left of the crowd's requests is aborted
    return waited


async def _victims(port: int, seconds: float, rate: float) -> list[float]:
    """Return how long each first token took."""

    async def ask() -> float:
        begun = time.monotonic()
        return await first_token_at(port, VICTIM) - begun

    tasks = []
    started = time.monotonic()
    while time.monotonic() < started + seconds:
        tasks.append(asyncio.create_task(ask()))
        await asyncio.sleep(max(0.0, started + len(tasks) / rate - time.monotonic()))
    return [*await asyncio.gather(*tasks)]


async def _crowd(port: int, num_at_once: int, num_tenants: int) -> None:
    rng = random.Random(0)

    async def client(i: int) -> None:
        while True:
            prompt = [rng.randrange(3, 4000) for _ in range(rng.randint(32, 96))]
            body = {"prompt": prompt, "max_tokens": rng.randint(32, 96), "ignore_eos": True}
            await first_token_at(port, {**body, "user": f"tenant {i % num_tenants}"})

    await asyncio.gather(*map(client, range(num_at_once)))


if __name__ == "__main__":
    asyncio.run(_crowd(*map(int, sys.argv[1:])))
