"""Which layers and shards each rank holds, and which sizes are refused."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from paged import ConfigError, EngineConfig
from paged.architectures.hf_config import read_config
from paged.checkpoints.model_directory import resolve
from paged.ranks.layout import RankLayout, cut_layers, split_evenly


@pytest.fixture(scope="module")
def demo():
    return read_config(resolve("demo"))


def layout_of(model, **options) -> RankLayout:
    return RankLayout.of(EngineConfig("demo", **options), model)


def test_cuts_are_the_best_of_all_that_part_no_joined_layers():
    choose = random.Random(0)
    for _ in range(200):
        costs = [choose.randint(1, 9) for _ in range(choose.randint(1, 8))]
        pairs = [sorted(choose.choices(range(len(costs)), k=2)) for _ in range(choose.randint(0, 2))]
        joined = [(a, b) for a, b in pairs if a < b]
        num_stages = choose.randint(1, len(costs))
        possible = []
        for cuts in itertools.combinations(range(1, len(costs)), num_stages - 1):
            if not any(a < cut <= b for a, b in joined for cut in cuts):
                stages = itertools.pairwise([0, *cuts, len(costs)])
                possible.append(max(sum(costs[a:b]) for a, b in stages))
        if not possible:
            with pytest.raises(ConfigError, match="can be cut into at most"):
                cut_layers(costs, num_stages, joined)
            continue
        found = cut_layers(costs, num_stages, joined)
        assert [layer for stage in found for layer in stage] == [*range(len(costs))]
        assert len(found) == num_stages
        assert not any((a in stage) != (b in stage) for a, b in joined for stage in found)
        assert max(sum(costs[i] for i in stage) for stage in found) == min(possible)


def test_rank_0_is_the_first_shard_of_the_last_stage(demo):
    layout = layout_of(demo, pipeline_parallel_size=2, tensor_parallel_size=2)
    assert [(layout.stage_of(rank), layout.shard_of(rank)) for rank in range(4)] == [
        (1, 0),
        (1, 1),
        (0, 0),
        (0, 1),
    ]
    for rank in range(layout.num_ranks):
        assert layout.rank_of(layout.stage_of(rank), layout.shard_of(rank)) == rank
        assert rank in layout.ranks_of_stage(layout.stage_of(rank))
    assert layout.describe(1) == f"layers {layout.layers[1][0]} to {layout.layers[1][-1]}, shard 1 of 2"


def test_sizes_that_do_not_fit_are_refused_with_those_that_do(demo):
    assert demo.num_heads == 8  # which 3 does not divide
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size 3 does not divide .*; these numbers do: 2, 4, 8"
    ):
        layout_of(demo, tensor_parallel_size=3)
    most = demo.num_layers
    with pytest.raises(ConfigError, match=f"{most + 1} is more than the {most} layers"):
        layout_of(demo, pipeline_parallel_size=most + 1)
    with pytest.raises(ConfigError, match=rf"\[1, {most}\] are {most + 1} layers, and the model has {most}"):
        layout_of(demo, pipeline_parallel_size=2, pipeline_layers=[1, most])
    assert layout_of(demo, pipeline_parallel_size=2, pipeline_layers=[1, most - 1]).layers == (
        range(1),
        range(1, most),
    )


def test_readers_stay_with_their_sources(demo):
    """As the last layers of Gemma 4, which read K and V of earlier ones."""
    layers = [*demo.layers]
    layers[-1] = replace(layers[-1], attention=replace(layers[-1].attention, source=demo.num_layers - 2))
    shared = replace(demo, layers=tuple(layers))
    last = demo.num_layers - 1
    with pytest.raises(ConfigError, match=f"part layer {last} from layer {last - 1}, whose K and V it reads"):
        layout_of(shared, pipeline_parallel_size=2, pipeline_layers=[last, 1])
    with pytest.raises(ConfigError, match=f"at most {last} stages"):
        layout_of(shared, pipeline_parallel_size=last + 1)


def test_cores_are_divided_whole():
    cores = [[0, 4], [1, 5], [2, 6], [3, 7]]  # numbered as Linux numbers hardware threads
    assert [split_evenly(cores, i, 2) for i in range(2)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [split_evenly(cores, i, 3) for i in range(3)] == [[0, 4], [1, 5], [2, 6]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be from 1 to 1024, got 0"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size must be an int"),
        ({"pipeline_layers": "2,4"}, r"pipeline_layers must be a list of ints such as \[12, 10\]"),
        ({"pipeline_layers": [2, 4]}, "a number for each of the 1 stages"),
        ({"pipeline_parallel_size": 2, "pipeline_layers": [2, 0]}, "pipeline_layers must be at least 1"),
        ({"pipeline_parallel_size": 2, "device": "cuda:1"}, "'cuda:1' is one device"),
        ({"rank_timeout_s": 0.5}, "rank_timeout_s must be at least 1"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig("demo", **options)
