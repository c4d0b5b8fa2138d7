"""Ranks in threads end at random moments, many times: the tokens are those of one process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from paged import AsyncLLMEngine, EngineDeadError, LLMEngine, RankError
from paged.errors import dead_engine
from tests.rank_deaths import OPTIONS, add_requests, finish
from tests.support.mortal_ranks import mortal_engine


@pytest.fixture(scope="module")
def single() -> LLMEngine:
    return LLMEngine("demo", **OPTIONS)


@pytest.mark.parametrize(("num_stages", "num_shards"), [(3, 1), (1, 2)], ids=["stages", "shards"])
def test_tokens_are_those_of_one_process_wherever_ranks_end(num_stages, num_shards, single):
    sizes = {"pipeline_parallel_size": num_stages, "tensor_parallel_size": num_shards}
    mean_sends = 40 if num_stages > 1 else 400  # shards exchange more
    with mortal_engine("demo", 1, mean_sends, **OPTIONS, **sizes) as engine:
        for seed in range(2):
            add_requests(single, seed)
            add_requests(engine, seed)
            assert finish(engine) == finish(single)
            engine.block_manager.check()
        assert engine.stats().num_rank_restarts > 2
        assert engine.stats().num_swap_preemptions > 0


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
