"""Images in a model over several processes: the first stage has the tower, and the bits are those of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from paged import LLMEngine
from paged.ranks import pixels
from paged.ranks.follower import FollowerRunner
from tests.engine.test_images import Prompt, completed, given, greedy, preempting, prompts_of
from tests.support.checkpoints import assert_all_free, new_engine
from tests.support.images import seeing
from tests.support.ranks import ranked_engines

# Tokens that see each other; three positions and features of further layers; inputs of layers, in shards; and
# neither of them.
MODELS = [("gemma3", 2, 1), ("qwen3_vl", 2, 1), ("qwen3_vl", 1, 2), ("gemma4", 2, 2), ("mistral3", 2, 1)]


@contextmanager
def followers() -> Iterator[list[FollowerRunner]]:
    """Yield the ranks that follow, as they are made."""
    found: list[FollowerRunner] = []
    run = FollowerRunner.run

    def recorded(runner: FollowerRunner, *args: Any) -> None:
        found.append(runner)
        run(runner, *args)

    with mock.patch.object(FollowerRunner, "run", recorded):
        yield found


def tokens_of(engine: LLMEngine, prompts: list[Prompt]) -> list[list[int]]:
    """Complete prompts with as many steps in flight as there are stages."""
    outputs = engine.generate([*map(given, prompts)], greedy(5), use_tqdm=False)
    assert_all_free(engine)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(("name", "num_stages", "num_shards"), MODELS, ids=str)
def test_images_have_the_bits_of_one_process(name, num_stages, num_shards, monkeypatch):
    """In chunks, beside others, preempted, with layers of the tower in several steps, and pixels sent again."""
    prompts = prompts_of(name)
    expected = completed(new_engine(seeing(name)), prompts, monkeypatch)
    monkeypatch.setattr(pixels, "MOST_BYTES", 5000)  # two images or three
    with followers() as ranks, ranked_engines(num_stages, num_shards) as worlds:
        engine = new_engine(seeing(name), max_num_batched_tokens=16, block_size=8)
        towers = [rank for rank in ranks if rank.model.tower is not None]
        assert len(towers) == num_shards - (num_stages == 1)
        assert (engine.runner.model.tower is None) is (num_stages > 1)
        queue = engine.scheduler.towers
        queue.costs = queue.costs._replace(linear=1e9)  # as if a layer cost as much as a step
        in_flight = engine.runner.num_in_flight
        engine.runner.num_in_flight = engine.scheduler.num_in_flight = 1
        with preempting(monkeypatch):
            assert completed(engine, prompts, monkeypatch) == expected
        assert engine.scheduler.counters.num_recomputed > 1
        assert all(rank.images.num_parts > 4 for rank in towers)
        engine.reset_prefix_cache()
        engine.runner.num_in_flight = engine.scheduler.num_in_flight = in_flight
        assert tokens_of(engine, prompts[::-1]) == [result.token_ids for result in expected[::-1]]
    assert max(map(len, worlds[0].sent)) < 4000  # no pixels
