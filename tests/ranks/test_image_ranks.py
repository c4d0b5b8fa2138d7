"""Images in a model over several processes: the first stage has the tower, and the bits are those of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import pytest
import torch

from paged import EngineConfig, LLMEngine
from paged.base.errors import DivisionError
from paged.images.reading import read_seeing
from paged.model.part import ModelPart
from paged.ranks import pixels
from paged.ranks.follower import FollowerRunner
from paged.ranks.layout import RankLayout
from paged.runner.footprint import model_sizes
from paged.runner.load import new_kernels
from paged.runner.sizes import Sizes
from tests.engine.test_images import Prompt, completed, given, greedy, preempting, prompts_of
from tests.support.checkpoints import assert_all_free, new_engine
from tests.support.images import seeing
from tests.support.ranks import ranked_engines

# Tokens that see each other; three positions and features of further layers; inputs of layers, in shards; and
# neither of them.
MODELS = [("gemma3", 2, 1), ("qwen3_vl", 2, 1), ("qwen3_vl", 1, 2), ("gemma4", 2, 2), ("mistral3", 2, 2)]


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


def tokens_of(engine: LLMEngine, prompts: list[Prompt], *, fails: bool) -> list[list[int]]:
    """Complete prompts. If `fails`, every fifth of the first steps raises on the driver."""
    tokens: dict[str, list[int]] = {}
    run = engine.runner._run
    calls = 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if fails and calls % 5 == 2 and calls < 23:
            raise ValueError("planted")
        return run(*args)

    with mock.patch.object(engine.runner, "_run", failing):
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), given(prompt), greedy(5))
        while engine.has_unfinished_requests():
            with suppress(ValueError):
                tokens |= {o.request_id: o.outputs[0].token_ids for o in engine.step()}
    assert_all_free(engine)
    assert calls > 22 or not fails
    return [tokens[str(i)] for i in range(len(prompts))]


@pytest.mark.parametrize(("name", "num_stages", "num_shards"), MODELS, ids=str)
def test_images_have_the_bits_of_one_process(name, num_stages, num_shards, monkeypatch):
    """In chunks, beside others, preempted, with layers of the tower in several steps, pixels that are sent
    again, and steps that fail.
    """
    prompts = prompts_of(name)
    expected = completed(new_engine(seeing(name)), prompts, monkeypatch)
    monkeypatch.setattr(pixels, "MOST_PIXEL_BYTES", 5000)  # two images or three
    with followers() as ranks, ranked_engines(num_stages, num_shards) as worlds:
        engine = new_engine(seeing(name), max_num_batched_tokens=16, block_size=8)
        towers = [rank for rank in ranks if rank.model.tower is not None]
        assert len(towers) == num_shards - (num_stages == 1)
        assert (engine.runner.model.tower is None) is (num_stages > 1)
        for tower in (rank.model.tower for rank in towers):
            assert tower.num_kv_heads * num_shards == tower.spec.num_kv_heads
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
        fails = num_shards == 1  # shards wait for each other within a step
        assert tokens_of(engine, prompts[::-1], fails=fails) == [r.token_ids for r in expected[::-1]]
    assert max(map(len, worlds[0].sent)) < 4000  # no pixels


def test_the_first_stage_alone_has_the_tower_and_the_layers_of_its_features():
    directory = seeing("qwen3_vl")
    model = read_seeing(EngineConfig(str(directory)), directory)
    layout = RankLayout.of(EngineConfig(str(directory), pipeline_parallel_size=2), model)
    device = torch.device("cpu")
    found = []
    for layers in layout.layers:
        part = ModelPart(layers, model.num_layers)
        sizes = Sizes(EngineConfig(str(directory)), model, "cpu", "float32", part=part)
        kernels = new_kernels(sizes, device, checked=False)
        found.append(model_sizes(sizes, device, directory, kernels).by_part["vision tower"])
    assert (found[0] > 50_000, found[1]) == (True, 0)
    cut = EngineConfig(str(directory), pipeline_parallel_size=2, pipeline_layers=[1, 3])
    with pytest.raises(DivisionError, match=r"part layer 1 from .* adds features of images; .* at 2, 3"):
        RankLayout.of(cut, model)
    with pytest.raises(DivisionError, match=r"features of images stay .* at most 3 stages"):
        RankLayout.of(EngineConfig(str(directory), pipeline_parallel_size=4), model)
