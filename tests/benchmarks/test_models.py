"""benchmarks.models on tiny shapes. No time is asserted."""

import json
from pathlib import Path

import pytest

from benchmarks import common
from benchmarks.models import __main__ as models
from benchmarks.models import starts, ways
from benchmarks.models.counts import assert_equal_cost, assert_within_windows, counts
from benchmarks.peers.process import Worker
from tests.support.worker_here import WorkerHere

ROOT = Path(__file__).parents[2]


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


def other_checkout(folder):
    """Write a checkout whose engine answers that it is another one, to every call and start."""
    for package in ("paged", "benchmarks", "benchmarks/peers"):
        (folder / package).mkdir()
        (folder / package / "__init__.py").touch()
    (folder / "benchmarks/peers/worker.py").write_text(
        'import json, paged\ninput()\nprint(json.dumps({"value": paged.__file__}), flush=True)\ninput()\n'
    )
    (folder / "benchmarks/common.py").write_text("def peak_rss_mib(): raise SystemExit('another checkout')")
    return folder


def test_another_checkout_runs_its_own_engine(tmp_path):
    other = other_checkout(tmp_path)
    with Worker("paged", threads=1, root=other) as worker:
        assert worker.call("load") == str(other / "paged/__init__.py")
    with pytest.raises(RuntimeError, match="another checkout"):
        starts.start("demo", other, 1)


class Scripted:
    """Workers of two checkouts, of which the earlier one takes half the time."""

    calls: list = []  # noqa: RUF012  (of all workers)

    def __init__(self, system, *, threads, root=ROOT):
        self.root, self.system, self.threads = root, system, threads

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def call(self, name, **arguments):
        self.calls.append((self.system, self.root, name))
        if name == "judge":
            return [0.0]
        tokens = [[1] * n for n in arguments.get("max_tokens", ())]
        return {"tokens": tokens, "seconds": 2.0 if self.root == ROOT else 1.0}


def test_ratio_to_an_earlier_commit(monkeypatch, capsys, tmp_path):
    other = other_checkout(tmp_path)
    monkeypatch.setattr(ways, "Worker", Scripted)
    phases = [{"phase": "start", "seconds": 1.0, "peak MiB": 5.0, "more MiB": 5.0}]
    monkeypatch.setattr(models, "start", lambda *_: {"phases": phases})
    models.main(["--quick", "--section", "before", "--before", str(other)])
    rows = last_line(capsys)["rows"]
    assert [row["ratio"] for row in rows["before"]] == [0.5, 0.5]
    assert [row["phase"] for row in rows["starts"]] == ["start", "all"]
    runs = [root for system, root, name in Scripted.calls if (system, name) == ("paged", "run")]
    assert runs.count(ROOT) == runs.count(other) == 1 + (1 + 2 * 8) + (1 + 2 * 2), (
        "the proof; a warm-up, and 2 rounds of 8 turns with 1 request and of 2 with 3"
    )


def test_before_needs_a_checkout(tmp_path, capsys):
    for options, said in {
        ("--section", "before"): "--section before and --before PATH go together",
        ("--before", str(tmp_path)): "has no paged/__init__.py",
    }.items():
        with pytest.raises(SystemExit):
            models.parse_args([*options])
        assert said in capsys.readouterr().err


def test_native_start_imports_no_model_class():
    found = starts.start("demo", ROOT, 1, classes=True)
    starts.check_native_start(found)
    assert [row["phase"] for row in starts.medians([found])][1:] == [
        "import paged",
        "start",
        "first token",
        "model class",
    ]
    found["modules"]["native"].append("transformers.models.phi3.modeling_phi3")
    with pytest.raises(AssertionError, match="imports model classes of transformers"):
        starts.check_native_start(found)
