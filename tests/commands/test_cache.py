"""`paged cache`, `paged warmup` and the flags of the cache of packed weights."""

import json
import re

import pytest

from paged.commands import common
from paged.options.config import EngineConfig
from paged.ranks.keep import keep_parts
from paged.runner import load
from paged.simulate.cost import Coefficients
from paged.simulate.machine import Measured
from tests.support.checkpoints import checkpoint

pytest.importorskip("numba")

OPTIONS = ("--dtype", "float32", "--device", "cpu", "--max-model-len", "64")


@pytest.fixture(autouse=True)
def _keeps_any_size(monkeypatch):
    monkeypatch.setattr(load, "LEAST_KEPT_BYTES", 0)


def test_warmup_keeps_weights_and_cache_lists_and_removes_them(run, tmp_path):
    place = ("--weights-cache", tmp_path / "weights")
    assert run("cache", *place) == (0, f"0 bytes in {tmp_path / 'weights'}\n", "")
    model = checkpoint("llama")
    code, out, _ = run("warmup", model, *OPTIONS, *place)
    assert code == 0
    (path,) = (tmp_path / "weights").glob("*.weights")
    assert out.splitlines()[-1] == f"packed weights in {path}"
    assert run("warmup", model, *OPTIONS, *place, "--quantization", "int8")[0] == 0
    assert run("warmup", model, *OPTIONS, *place)[1].splitlines()[-1] == f"packed weights in {path}"
    code, out, _ = run("cache", *place)
    head, _, *rows, total = out.splitlines()
    assert (code, re.split(r"  +", head.strip())) == (0, ["name", "bytes", "last used", "weights"])
    assert [row.split()[-2:] for row in rows] == [["llama,", "float32"], ["llama,", "int8"]]
    assert {path.stem, f"{path.stat().st_size:,}"} <= set(rows[0].split())
    assert total.endswith(f" bytes in {tmp_path / 'weights'}")
    for name in ("x", ""):  # of an empty variable of a shell, too
        assert f"no packed weights are kept as {name!r}" in run.fails("cache", "rm", name, *place)
    size = f"{path.stat().st_size:,}"
    assert run("cache", "rm", path.stem[:30], *place) == (0, f"removed 1 files of {size} bytes\n", "")
    assert not path.exists()
    (other,) = (tmp_path / "weights").glob("*.weights")
    other.chmod(0o600)
    other.write_bytes(b"x")
    assert run("cache", *place)[1].splitlines()[2].endswith("damaged")
    assert run("cache", "rm", *place)[:2] == (0, "removed 1 files of 1 bytes\n")
    assert run("cache", *place)[1].startswith("0 bytes")


def test_parts_of_ranks_are_packed_one_after_the_other(run, tmp_path):
    place = ("--weights-cache", tmp_path / "weights")
    options = {"dtype": "float32", "device": "cpu", "weights_cache": str(place[1])}
    config = EngineConfig(str(checkpoint("llama")), tensor_parallel_size=2, **options)
    first, second = keep_parts(config)
    assert (first.exists(), second.exists(), first == second) == (True, True, False)
    listed = run("cache", *place)[1]
    assert all(f"llama, float32, layers 0 to 1, shard {i} of 2" in listed for i in (1, 2))


def test_flags_of_the_cache(run, monkeypatch):
    given = []
    monkeypatch.setattr(common, "start", lambda options: given.append(options) or pytest.exit())
    for flags, expected in (
        ((), {}),
        (
            ("--weights-cache", "x", "--verify-weights-cache"),
            {"weights_cache": "x", "verify_weights_cache": True},
        ),
        (("--no-weights-cache",), {"weights_cache": False}),
    ):
        with pytest.raises(pytest.exit.Exception):
            run("warmup", "demo", *flags)
        names = ("weights_cache", "verify_weights_cache")
        assert {name: given[-1][name] for name in names if name in given[-1]} == expected
    line = run.fails("warmup", "demo", "--weights-cache", "x", "--no-weights-cache")
    assert line == "paged: --weights-cache and --no-weights-cache exclude each other; give one"


def test_a_plan_says_what_a_start_takes_with_and_without(run, tmp_path, monkeypatch):
    measured = Measured(Coefficients(step_s=1.0), 1e10, 1e12)
    monkeypatch.setattr("paged.simulate.plan.measure", lambda _: measured)
    monkeypatch.setattr("paged.simulate.plan.measure_steps", lambda *_: measured.coefficients)
    place = ("--weights-cache", tmp_path / "weights")
    options = ("--dtype", "float32", "--device", "cpu", "--num-blocks", "64")
    model = checkpoint("llama")
    _, out, _ = run("plan", model, *options, *place)
    first, second = (line for line in out.splitlines() if "with packed weights" in line or "a start" in line)
    assert re.fullmatch(r"a start packs 0\.\d+ GB of files into 0\.\d MiB of its own memory;", first)
    assert second.endswith("which processes share: none are kept yet, see paged warmup")
    assert not (tmp_path / "weights").exists()
    monkeypatch.setattr("paged.checkpoints.weights_cache.content._RACY_NS", 0)
    assert run("warmup", model, *OPTIONS, *place)[0] == 0
    assert json.loads(run("plan", model, *options, *place, "--json")[1])["start"]["is_kept"]
    assert ", which took " in run("plan", model, *options, *place)[1]
