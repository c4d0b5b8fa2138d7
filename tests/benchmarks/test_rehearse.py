"""benchmarks.rehearse: no benchmark is forgotten, and what it runs is small."""

import argparse
import sys

import pytest

from benchmarks.common import parse_args
from benchmarks.rehearse import FOLDER, LONG, NO_BENCHMARKS, benchmarks, main, programs, rehearse


def test_every_program_is_rehearsed_or_belongs_to_another():
    assert set(NO_BENCHMARKS) < set(programs())
    assert set(benchmarks()) > LONG
    for name in benchmarks():
        # throughput is benchmarks.peers with other defaults.
        assert name == "throughput" or "--rehearse" in _source(name) or "parse_args(parser" in _source(name)


def test_a_rehearsal_changes_the_defaults_alone():
    def parsed(*argv):
        parser = argparse.ArgumentParser()
        parser.add_argument("--steps", type=int, default=100)
        parser.add_argument("--rounds", type=int, default=5)
        return vars(parse_args(parser, argv, steps=2, rounds=1))

    assert parsed() == {"steps": 100, "rounds": 5, "rehearse": False}
    assert parsed("--rehearse", "--steps", "7") == {"steps": 7, "rounds": 1, "rehearse": True}


def test_a_benchmark_that_fails_is_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", "false")
    assert rehearse("linear")["exit code"] == 1
    assert "linear: 0 s, failed" in capsys.readouterr().out


def test_all_are_run_and_the_long_ones_may_be_left_out(monkeypatch, capsys):
    def run(*argv):
        monkeypatch.setattr(sys, "argv", ["rehearse", *argv])
        with pytest.raises(SystemExit) as exited:
            main()
        lines = capsys.readouterr().out.splitlines()
        return exited.value.code, {line.split(":")[0] for line in lines if line.endswith(" s")}

    monkeypatch.setattr(sys, "executable", "true")
    assert run() == (0, set(benchmarks()))
    assert run("--short", "--jobs", "3") == (0, set(benchmarks()) - LONG)
    assert run("moe", "peers") == (0, {"moe", "peers"})


def _source(name):
    path = FOLDER.joinpath(*name.split("."))
    return (path / "__main__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
