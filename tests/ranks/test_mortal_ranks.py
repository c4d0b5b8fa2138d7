"""Ranks in threads end at random moments, many times: the tokens are those of one process."""

from __future__ import annotations

import pytest

from paged import LLMEngine
from tests.rank_deaths import OPTIONS, add_requests, finish
from tests.support.mortal_ranks import mortal_engine


@pytest.mark.parametrize(("num_stages", "num_shards"), [(3, 1), (1, 2)], ids=["stages", "shards"])
def test_tokens_are_those_of_one_process_wherever_ranks_end(num_stages, num_shards):
    sizes = {"pipeline_parallel_size": num_stages, "tensor_parallel_size": num_shards}
    single = LLMEngine("demo", **OPTIONS)
    mean_sends = 40 if num_stages > 1 else 400  # shards exchange more
    with mortal_engine("demo", 1, mean_sends, **OPTIONS, **sizes) as engine:
        for seed in range(3):
            add_requests(single, seed)
            add_requests(engine, seed)
            assert finish(engine) == finish(single)
            engine.block_manager.check()
        assert engine.stats().num_rank_restarts > 8
        assert engine.stats().num_swap_preemptions > 0
