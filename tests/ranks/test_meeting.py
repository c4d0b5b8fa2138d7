"""How ranks meet, what they must have in common, and what the environment tells each of them."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

import paged
from paged import CheckpointError, ConfigError, EngineConfig, LLMEngine, PagedError, RankError
from paged.checkpoints.model_directory import resolve
from paged.device import threads
from paged.ranks import heartbeat
from paged.ranks.facts import OF_ONE_RANK, facts_of, header_hash, plain_options
from paged.ranks.heartbeat import HeartbeatFile, find_troubles
from paged.ranks.meeting import Meeting, post_failure, require_equal
from paged.ranks.membership import failing_together
from paged.ranks.place import Torchrun, follows, share_of

NAMES = ["rank 0", "rank 1", "rank 2"]
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def fail_together(store: Any, torchrun: Torchrun) -> Exception:
    """Return what a rank raises when it finds that another one sends nothing."""
    with pytest.raises(PagedError) as raised, failing_together(store, torchrun):
        raise RankError("rank 2 sends nothing")
    return raised.value


def test_all_ranks_learn_the_values_of_all_or_the_same_error():
    store = HashStore()
    meetings = [Meeting(store, rank, NAMES) for rank in range(3)]
    with ThreadPoolExecutor(3) as threads:
        found = [*threads.map(lambda each: each.gather("x", each._rank * 2), meetings)]
        assert found == [[0, 2, 4]] * 3
        post_failure(store, 2, ConfigError("no room"))
        post_failure(store, 1, ConfigError("a later one"))
        for waiting in [threads.submit(each.gather, "y", 1) for each in meetings[:2]]:
            with pytest.raises(ConfigError, match=r"^rank 2 on \S+: no room$"):
                waiting.result()
    torchrun = Torchrun.of(EngineConfig("demo", pipeline_parallel_size=2), TORCHRUN)
    assert torchrun is not None
    # The first one has the store, and ends only when the others know.
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(fail_together, store, replace(torchrun, rank=0))
        with pytest.raises(TimeoutError):
            first.result(0.05)
        for error in (fail_together(store, torchrun), first.result()):
            assert type(error) is ConfigError
            assert re.fullmatch(r"rank 2 on \S+: no room", str(error))


def test_a_rank_that_never_comes_is_named():
    with pytest.raises(RankError, match=r"^rank 1; rank 2: has not come within 0\.05 s$"):
        Meeting(HashStore(), 0, NAMES).gather("x", None, 0.05)


def test_a_rank_that_ends_is_noticed_by_those_that_wait():
    def check() -> None:
        raise RankError("rank 1, was ended by SIGKILL")

    with pytest.raises(RankError, match="SIGKILL"):
        Meeting(HashStore(), 0, NAMES, check).gather("x", None)


def test_versions_options_and_checkpoints_are_compared(tmp_path):
    config = EngineConfig("demo", pipeline_parallel_size=2)
    demo = resolve("demo")
    facts = facts_of(config, demo)
    require_equal([facts, facts_of(EngineConfig("demo", pipeline_parallel_size=2, seed=5), demo)], NAMES)
    other = facts_of(EngineConfig("demo", pipeline_parallel_size=2, dtype="bfloat16"), demo)
    with pytest.raises(
        RankError, match=r"^rank 1 has dtype bfloat16, and the driver has auto; all ranks need "
    ):
        require_equal([facts, other, facts], NAMES)
    with pytest.raises(RankError, match=r"rank 1 has torch's version 0\.1, and the driver has"):
        require_equal([facts, facts | {"torch's version": "0.1"}], NAMES)
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in demo.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert header_hash(copy) == header_hash(demo)
    images = copy / "preprocessor_config.json"
    images.write_text("{}")
    assert header_hash(copy) != header_hash(demo)
    images.unlink()
    weights = next(copy.glob("*.safetensors"))
    changed = bytearray(weights.read_bytes())
    changed[20] ^= 1  # of the header
    weights.write_bytes(changed)
    with pytest.raises(RankError, match="rank 1 has a checkpoint whose headers have the hash"):
        require_equal([facts, facts_of(config, copy)], NAMES)
    weights.unlink()
    with pytest.raises(CheckpointError):
        facts_of(config, copy)


def test_options_cross_as_json_whatever_they_are():
    options = {
        "speculative_config": {"method": "ngram"},
        "pipeline_layers": (2, 2),
        "tenant_weights": {"a": 2},
    }
    config = EngineConfig("demo", pipeline_parallel_size=2, scheduling_policy="fair", **options)
    assert EngineConfig(**plain_options(config)) == EngineConfig(
        "demo", pipeline_parallel_size=2, scheduling_policy="fair", **{**options, "pipeline_layers": [2, 2]}
    )
    assert plain_options(config).keys() > OF_ONE_RANK


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MASTER_ADDR": ""}, "RANK is set and MASTER_ADDR is not"),
        ({"WORLD_SIZE": "3"}, "torchrun has started 3 processes, and pipeline_parallel_size 2 with"),
        ({"RANK": "x"}, "must be as torchrun sets them"),
        ({"RANK": "2"}, "RANK must be from 0 to 1, with WORLD_SIZE 2, got 2"),
    ],
    ids=str,
)
def test_an_environment_that_fits_no_ranks_is_refused(changes, message):
    config = EngineConfig("demo", pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match=message):
        Torchrun.of(config, TORCHRUN | changes)


def test_an_environment_of_torchrun_is_read(monkeypatch):
    config = EngineConfig("demo", pipeline_parallel_size=2)
    found = Torchrun.of(config, TORCHRUN)
    assert found is not None
    assert (found.rank, found.num_local, found.own_address()) == (1, 1, "127.0.0.1")
    with suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        other = Torchrun.of(config, TORCHRUN | {"MASTER_ADDR": "::1"})
        assert other is not None
        assert other.own_address() == "::1"
    assert Torchrun.of(config, {}) is None
    assert Torchrun.of(EngineConfig("demo"), TORCHRUN) is None  # one process does not ask
    assert not follows(config)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankError, match="torchrun's process 1, and process 0 alone makes an engine"):
        LLMEngine("demo", pipeline_parallel_size=2, device="cpu")


def test_ranks_of_a_machine_take_a_thread_for_each_core_of_their_share(monkeypatch):
    """A follower is bound to its share before that, so what it may use is not divided again."""
    config = EngineConfig("demo", device="cpu", pipeline_parallel_size=2, cpu_memory_utilization=0.8)
    monkeypatch.setattr(threads, "_is_chosen", lambda _: False)
    monkeypatch.setattr(threads, "usable_cores", lambda: 4)
    first = share_of(config, 0, 2)
    assert (first.num_threads, first.cpu_memory_utilization) == (2, 0.4)
    monkeypatch.setattr(threads, "usable_cores", lambda: 1)
    if sys.platform == "linux":  # elsewhere none is bound
        assert share_of(config, 1, 2).num_threads == 1
    with pytest.raises(ConfigError, match="2 processes of a model need as many CPU cores; there are 1"):
        share_of(config, 0, 2)


def test_a_probe_tells_ranks_that_hang_or_have_ended(tmp_path, monkeypatch):
    private = tmp_path / f"{heartbeat.DIRECTORY_PREFIX}x"
    private.mkdir()
    now = [1000.0]
    assert find_troubles(tmp_path) == (0, [])
    ranks = [HeartbeatFile(private, rank, 3.0, clock=lambda: now[0]) for rank in range(2)]
    assert find_troubles(tmp_path, 5000.0) == (2, [])  # they load
    for rank in ranks:
        rank.loaded()
    now[0] += 2
    ranks[0].beat(7)
    now[0] += 0.5
    ranks[0].beat(8)  # too soon to be written
    assert find_troubles(tmp_path, 1004.0) == (2, [])
    now[0] += 2
    ranks[0].beat()
    own = os.getpid()
    assert find_troubles(tmp_path, 1006.0) == (
        2,
        [f"rank 1 (process {own}) has written nothing for 6 s, since step 0"],
    )
    monkeypatch.setattr(os, "getpid", lambda: 2**22 + 1)  # no process has it
    ended = HeartbeatFile(private, 1, 3.0)
    assert find_troubles(tmp_path, 1005.0) == (2, [f"rank 1 (process {2**22 + 1}) has ended"])
    HeartbeatFile(private, 0, 3.0)
    assert find_troubles(tmp_path, 1005.0) == (0, [])  # left by ranks that were all killed
    assert ended.path.exists()
    state = {**json.loads(ended.path.read_text()), "pid": own, "started": "1"}
    ended.path.write_text(json.dumps(state))
    assert find_troubles(tmp_path, 5000.0) == (0, [])  # another process has the number now


def test_the_probe_imports_no_torch(tmp_path):
    code = (
        "import sys; from paged.ranks.__main__ import main; code = main(['alive'])\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules; sys.exit(code)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(paged.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "no rank runs here\n"), done.stderr
