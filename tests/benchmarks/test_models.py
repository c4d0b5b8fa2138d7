"""benchmarks.models on tiny shapes. No time is asserted."""

import json

import pytest

from benchmarks import common
from benchmarks.models import __main__ as models
from benchmarks.models import ways
from benchmarks.models.counts import assert_equal_cost, assert_within_windows, counts
from tests.support.worker_here import WorkerHere


@pytest.fixture(autouse=True)
def checkpoints(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "CHECKPOINTS", tmp_path / "checkpoints")


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_families_are_compared_with_an_equal_llama_and_with_generate(monkeypatch, capsys):
    monkeypatch.setattr(ways, "Worker", WorkerHere)
    models.main(["--quick", "--section", "llama", "generate", "--threads", "1"])
    rows = last_line(capsys)["rows"]
    assert [(row["shape"], row["batch"]) for row in rows["llama"]] == [
        ("gemma3-tiny", 1),
        ("gemma3-tiny", 2),
        ("phi3-tiny", 1),
        ("phi3-tiny", 2),
    ]
    assert [(row["shape"], row["batch"]) for row in rows["generate"]] == [
        ("gemma3-tiny", 2),
        ("phi3-tiny", 2),
    ]
    for row in rows["generate"]:
        assert row["ratio"] == pytest.approx(row["native tokens/s"] / row["generate tokens/s"])


@pytest.mark.parametrize("key", ["num_hidden_layers", "intermediate_size", "num_key_value_heads"])
def test_shape_of_another_cost_is_refused(key, monkeypatch):
    monkeypatch.setitem(
        common.SHAPES,
        "other",
        {**common.SHAPES["phi3-tiny-as-llama"], key: common.SHAPES["phi3-tiny"][key] // 2},
    )
    work = common.Workload([[1, 2, 3]], [4])
    ours, twin, other = (
        counts(name, common.checkpoint(name), work, "float32")
        for name in ("phi3-tiny", "phi3-tiny-as-llama", "other")
    )
    assert_equal_cost(ours, twin)
    with pytest.raises(AssertionError, match=r"of phi3-tiny, [\d,]+ of other"):
        assert_equal_cost(ours, other)


def test_request_that_outgrows_a_window_is_refused():
    directory = common.checkpoint("gemma3-tiny")
    assert_within_windows(directory, 512)
    with pytest.raises(AssertionError, match=r"513 tokens, and windows of \[512\]"):
        assert_within_windows(directory, 513)


def test_tokens_that_are_not_the_model_s_are_refused():
    ways.check("native", "bfloat16", [0.0, 0.3])
    with pytest.raises(AssertionError, match=r"native: its tokens are not the model's, 0\.5"):
        ways.check("native", "bfloat16", [0.0, 1.0])
