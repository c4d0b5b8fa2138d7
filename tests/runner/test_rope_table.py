"""The table of the rotary embedding covers what sequences reach, not what config.json promises."""

from __future__ import annotations

import shutil

import psutil
import pytest
from torch import Tensor

from paged import LLMEngine, SamplingParams
from paged.runner import sizes
from tests.support.checkpoints import checkpoint, edit_json, new_engine

# Of 16 tokens each; one sequence may fill all of them.
NUM_BLOCKS = 64
# Only a window lets a sequence be longer than the cache. A table of 2²⁴ positions would take 1 GiB.
REACHED = {"llama": 1024, "llama-linear": 1024, "llama-llama3": 1024, "llama-dynamic": 0, "mistral": 0}


def table_of(engine: LLMEngine) -> tuple[Tensor, Tensor] | None:
    table = engine.runner.model.rotary[0]._table
    return None if table is None else (table.cos, table.sin)


def tokens_of(engine: LLMEngine) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=40)
    return [output.outputs[0].token_ids for output in engine.generate([[1], [5] * 90], params)]


@pytest.mark.parametrize("name", REACHED)
def test_it_covers_what_a_sequence_can_reach(tmp_path, name):
    shutil.copytree(checkpoint(name), tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / "config.json", max_position_embeddings=2**24)
    usual = new_engine(checkpoint(name), num_blocks=NUM_BLOCKS)
    before = psutil.Process().memory_info().rss
    long = new_engine(tmp_path, num_blocks=NUM_BLOCKS)
    assert psutil.Process().memory_info().rss - before < 64 * 2**20
    assert long.max_model_len >= 2**24
    table = table_of(long)
    assert (0 if table is None else len(table[0])) == REACHED[name]
    if name != "llama-dynamic":  # whose values depend on max_position_embeddings
        assert tokens_of(long) == tokens_of(usual)


def test_max_model_len_bounds_it():
    table = table_of(new_engine(checkpoint("llama"), max_model_len=33))
    assert table is not None
    assert [len(part) for part in table] == [33, 33]


def test_queries_have_factors_only_where_positions_need_them():
    """Within the trained context of 16 tokens all factors are 1."""
    for max_model_len, has_factors in ((16, False), (17, True)):
        engine = new_engine(checkpoint("ministral3"), max_model_len=max_model_len)
        table = engine.runner.model.rotary[0]._table
        assert table is not None
        assert (table.query_factors is not None) == has_factors


def test_tokens_are_the_same_without_it(monkeypatch):
    """With factors of queries, which each step then computes."""
    expected = tokens_of(new_engine(checkpoint("ministral3")))
    monkeypatch.setattr(sizes, "MAX_ROPE_TABLE_BYTES", 0)
    engine = new_engine(checkpoint("ministral3"))
    assert table_of(engine) is None
    assert tokens_of(engine) == expected


def test_its_values_do_not_depend_on_its_length():
    long, short = (table_of(new_engine(checkpoint("llama"), max_model_len=n)) for n in (511, 33))
    assert long is not None
    assert short is not None
    for more, fewer in zip(long, short, strict=True):
        assert more[:33].equal(fewer)


def test_it_does_not_move():
    engine = new_engine(checkpoint("llama"))
    with pytest.raises(AssertionError, match="must not move"):
        engine.runner.model.rotary[0].tabulate(512)
