"""The number of CPU threads: the cores of this process, unless the user has set another."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from paged import ConfigError
from paged.device import threads
from paged.device.threads import cpu_quota, num_cores, set_threads, share_threads
from paged.options.config import EngineConfig

V1_SHELL = "5:cpuset:/\n2:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n"
CGROUPS = {
    "nothing-mounted": ("0::/\n", {}, math.inf),
    "no-limit": ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
    "one-and-a-half": ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
    "own-group": ("0::/a/b\n", {"a/b/cpu.max": "50000 100000\n", "a/cpu.max": "max 100000\n"}, 0.5),
    "group-above": ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, 3.0),
    "lowest-of-all": ("0::/a\n", {"a/cpu.max": "400000 100000\n", "cpu.max": "200000 100000\n"}, 2.0),
    "container": ("0::/../../outside\n", {"cpu.max": "200000 100000\n"}, 2.0),
    "another's": ("0::/a\n", {"b/cpu.max": "100000 100000\n"}, math.inf),
    "v1-no-limit": (
        V1_SHELL,
        {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
        math.inf,
    ),
    "v1-container": (
        V1_SHELL,
        {"cpu,cpuacct/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
        2.5,
    ),
    "v1-own-group": (
        V1_SHELL,
        {"cpu/docker/abc/cpu.cfs_quota_us": "10000\n", "cpu/docker/abc/cpu.cfs_period_us": "50000\n"},
        0.2,
    ),
    "hybrid": ("1:cpu:/\n0::/a\n", {"unified/a/cpu.max": "100000 100000\n"}, 1.0),
    "odd": ("0::/a\n", {"a/cpu.max": "lots\n", "cpu.max": "100000 0\n"}, math.inf),
}


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize("case", CGROUPS)
def test_quota_of_control_groups(case, tmp_path):
    memberships, files, quota = CGROUPS[case]
    assert cpu_quota(written(tmp_path, files), memberships) == quota


def test_hardware_threads_of_a_core_count_once(tmp_path):
    siblings = {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"}
    files = {f"cpu{cpu}/topology/thread_siblings_list": f"{text}\n" for cpu, text in siblings.items()}
    written(tmp_path, files)
    assert num_cores({0, 1, 4, 5}, tmp_path) == 2
    assert num_cores({0, 4}, tmp_path) == 1
    assert num_cores({0, 1}, tmp_path) == 2
    assert num_cores({0, 2}, tmp_path) is None


@pytest.mark.parametrize(
    ("cores", "num_cpus", "quota", "usable"),
    [
        (8, 16, math.inf, 8),
        (8, 4, math.inf, 4),
        (1, 2, math.inf, 1),
        (8, 16, 1.5, 2),
        (8, 16, 0.2, 1),
        (2, 2, 64.0, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("says", ["system", "psutil"])
def test_usable_cores(monkeypatch, says, cores, num_cpus, quota, usable):
    monkeypatch.setattr(threads, "_affinity", lambda: {*range(num_cpus)})
    monkeypatch.setattr(threads, "cpu_quota", lambda *_: quota)
    monkeypatch.setattr(
        threads, "num_cores", lambda cpus, _: min(cores, len(cpus)) if says == "system" else None
    )
    monkeypatch.setattr(threads.psutil, "cpu_count", lambda **_: cores)
    assert threads.usable_cores() == usable


def test_unknown_cores_are_as_many_as_cpus(monkeypatch):
    monkeypatch.setattr(threads, "_affinity", lambda: {0, 1, 2})
    monkeypatch.setattr(threads, "cpu_quota", lambda *_: math.inf)
    monkeypatch.setattr(threads, "num_cores", lambda *_: None)
    monkeypatch.setattr(threads.psutil, "cpu_count", lambda **_: None)
    assert threads.usable_cores() == 3


class Engine:
    """Owner of a number of threads."""


@pytest.fixture
def machine(monkeypatch):
    """Pretend to have 8 CPUs in 4 cores, 3 of them usable, and no engine yet. Returns torch's threads."""
    state = {"threads": 8}
    monkeypatch.setattr(torch, "get_num_threads", lambda: state["threads"])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: state.update(threads=n))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(threads, "_affinity", lambda: {*range(8)})
    monkeypatch.setattr(threads, "_num_cores", lambda _: 4)
    monkeypatch.setattr(threads, "cpu_quota", lambda *_: 2.5)
    monkeypatch.setattr(threads, "_threads_of", weakref.WeakKeyDictionary())
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return state


@pytest.mark.parametrize(("now", "then"), [(8, 3), (4, 3), (1, 1), (5, 5), (64, 64)], ids=str)
def test_torchs_own_choice_is_replaced_and_a_users_is_kept(machine, now, then):
    machine["threads"] = now
    assert (set_threads(Engine(), None), machine["threads"]) == (then, then)


@pytest.mark.parametrize("name", threads.VARIABLES)
def test_num_threads_overrides_the_environment_and_that_the_cores(machine, name, monkeypatch):
    monkeypatch.setenv(name, "8")
    assert set_threads(Engine(), None) == 8
    assert (set_threads(Engine(), 2), machine["threads"]) == (2, 2)


def test_engines_alive_at_the_same_time_share_threads(machine):
    first = Engine()
    assert set_threads(first, 2) == 2
    machine["threads"] = 8  # what a thread sees that used torch before
    second, third = Engine(), Engine()
    assert (set_threads(second, None), machine["threads"]) == (2, 2)
    assert set_threads(third, 2) == 2
    with pytest.raises(ConfigError, match="num_threads 4: another engine of this process has 2"):
        set_threads(Engine(), 4)
    del first, second, third
    assert set_threads(Engine(), 4) == 4


def test_more_threads_than_cpus_are_refused(machine):
    with pytest.raises(ConfigError, match="num_threads must be at most 8, the CPUs of this machine, got 9"):
        set_threads(Engine(), 9)
    assert machine["threads"] == 8


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2", 2**63], ids=str)
def test_num_threads_is_a_count(value):
    with pytest.raises(ConfigError, match="num_threads must be"):
        EngineConfig(model="demo", num_threads=value)


SCRIPT = """
import json, torch
from paged import LLMEngine
before = torch.get_num_threads()
engine = LLMEngine("demo", num_blocks=32, device="cpu", skip_tokenizer_init=True)
print(json.dumps([before, torch.get_num_threads(), engine.describe()]))
"""


def test_processes_respect_the_environment_and_describe_their_threads():
    environment = {k: v for k, v in os.environ.items() if k not in threads.VARIABLES}
    environment["OMP_NUM_THREADS"] = "1"
    run = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    before, after, line = json.loads(run.stdout)
    assert before == after == 1
    assert "on cpu with 1 thread" in line


def test_busy_processes_share_the_threads_of_each(machine):
    share_threads(2)  # on a GPU, where no engine has set a number
    assert machine["threads"] == 8
    engine = Engine()
    assert set_threads(engine, None) == 3
    for num_sharing, num_threads in ((2, 1), (5, 1), (1, 3)):
        share_threads(num_sharing)
        assert machine["threads"] == num_threads
