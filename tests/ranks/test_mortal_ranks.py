"""Ranks in threads end at random moments: other engines go on, and the tokens are those of one process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from paged import AsyncLLMEngine, EngineDeadError, LLMEngine, RankError
from paged.base.errors import dead_engine
from paged.engine import async_engine
from tests.rank_deaths import OPTIONS, add_requests, finish, finish_dead, go_on
from tests.support.ranks import ranked_engines


@pytest.fixture(scope="module")
def single() -> LLMEngine:
    return LLMEngine("demo", **OPTIONS)


@contextmanager
def mortal_engine(sizes: Sequence[int], num_sends: float) -> Iterator[LLMEngine]:
    """Yield an engine of which a rank ends after so many things are sent."""
    num_left = float("inf")

    def deliver(sender: int, receiver: int, sent: Any) -> Sequence[Any]:
        nonlocal num_left
        num_left -= 1
        if num_left >= 0:
            return [sent]
        worlds[0].error = RankError(f"rank {receiver or sender} was ended")  # the driver does not end
        return []

    ranks = ranked_engines(*sizes, fault=deliver)
    worlds = ranks.__enter__()
    try:
        engine = LLMEngine("demo", **OPTIONS)
        num_left = num_sends
        yield engine
    finally:
        with suppress(RankError):  # of the rank that has ended
            ranks.__exit__(None, None, None)


# Shards exchange more.
@pytest.mark.parametrize(("sizes", "mean_sends"), [((3, 1), 80), ((1, 2), 400)], ids=["stages", "shards"])
def test_tokens_are_those_of_one_process_wherever_ranks_end(sizes, mean_sends, single):
    choose = random.Random(1)
    num_dead = num_swaps = 0
    for seed in range(2):
        add_requests(single, seed)
        found: dict[str, list[int]] = {}
        left = None
        while left is None or left:
            with mortal_engine(sizes, choose.expovariate(1 / mean_sends)) as engine:
                if left is None:
                    add_requests(engine, seed)
                else:
                    go_on(engine, left, seed)
                try:
                    finish(engine, found)
                except EngineDeadError as error:
                    assert isinstance(error.__cause__, RankError)  # noqa: PT017
                    num_dead += 1
                left = finish_dead(engine, found)
                num_swaps += engine.stats().num_swap_preemptions
        assert found == finish(single)
    assert num_dead > 2
    assert num_swaps


def test_a_rank_that_ends_while_nothing_is_computed_is_noticed(single, monkeypatch):
    watching: list[Callable[[], object]] = []
    error = RankError("rank 1, was ended by SIGKILL")

    def check() -> None:
        raise error

    monkeypatch.setattr(single.runner, "watch", watching.append)
    monkeypatch.setattr(single.runner, "check", check)
    monkeypatch.setattr(single.runner, "recover", lambda error: dead_engine(str(error), error))

    async def main() -> None:
        async with AsyncLLMEngine.from_engine(single) as engine:
            while not watching:
                await asyncio.sleep(0.01)
            assert engine.is_running
            watching[0]()
            while engine.is_running:
                await asyncio.sleep(0.01)
            with pytest.raises(EngineDeadError, match="rank 1, was ended by SIGKILL"):
                await engine.stats()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("is_own", [True, False])
def test_an_async_engine_ends_the_ranks_of_its_own_engine_alone(is_own, single, monkeypatch):
    ended: list[bool] = []
    monkeypatch.setattr(single.core, "dead", None)
    monkeypatch.setattr(single, "_end_ranks", lambda: ended.append(True))
    monkeypatch.setattr(async_engine, "LLMEngine", lambda *_, **__: single)
    engine = AsyncLLMEngine("demo") if is_own else AsyncLLMEngine.from_engine(single)
    engine.shutdown()
    assert ended == [True] * is_own
    with single:
        assert (single.core.dead is not None) == is_own
    add_requests(single, 5)
    with pytest.raises(EngineDeadError, match="the engine was shut down; make a new one"):
        single.step()
    single.abort_request([group.request_id for group in single.unfinished()])
