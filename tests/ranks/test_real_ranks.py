"""Ranks as processes: equal tokens, and what is done when one ends, hangs or cannot compute."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest import mock

import psutil
import pytest

from paged import EngineConfig, EngineDeadError, LLMEngine, RankError, SamplingParams
from paged.ranks import local_rank, supervision
from paged.ranks.heartbeat import DIRECTORY_PREFIX, _states_in, find_troubles
from tests import rank_deaths
from tests.rank_deaths import OPTIONS, add_requests, failing_ranks, finish, go_on, left_behind, ranks_of
from tests.support.served import PATIENCE_S, eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are processes that Linux can end")
TIMEOUT_S = 3.0


def unused_port() -> int:
    """Return a port that nothing listens on, of those that the system gives to no connection."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(first_given // 2, first_given)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@pytest.fixture(scope="module", autouse=True)
def _own_temporary_files(tmp_path_factory) -> Iterator[None]:
    """Keep apart the ranks that other tests start on this machine meanwhile, which a probe would count."""
    with mock.patch.object(tempfile, "tempdir", str(tmp_path_factory.mktemp("ranks"))):
        yield


@pytest.fixture(scope="module")
def single() -> LLMEngine:
    return LLMEngine("demo", **OPTIONS)


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    """Yield an engine of two ranks, of which the last test that has it ends one."""
    engine = LLMEngine("demo", pipeline_parallel_size=2, rank_timeout_s=TIMEOUT_S, **OPTIONS)
    yield engine
    engine.shutdown()


def expected(single: LLMEngine, seed: int) -> dict[str, list[int]]:
    add_requests(single, seed)
    return finish(single)


def test_answers_after_a_timeout_without_work(engine, single):
    """Meanwhile the ranks wait without computing, and nothing listens but on loopback."""
    add_requests(engine, 0)
    assert finish(engine) == expected(single, 0)
    (rank,) = ranks_of(engine)._local.values()
    process = psutil.Process(rank.pid)
    used = sum(process.cpu_times()[:2])
    time.sleep(1.5 * TIMEOUT_S)
    assert sum(process.cpu_times()[:2]) - used < 0.15 * TIMEOUT_S  # a loop without a wait takes all of it
    assert find_troubles() == (2, [])
    for each in (process, psutil.Process()):
        addresses = {found.laddr.ip for found in each.net_connections("inet") if found.status == "LISTEN"}
        assert addresses <= {"127.0.0.1"}
    add_requests(engine, 1)
    assert finish(engine) == expected(single, 1)
    assert engine.stats().exchange_seconds > 0


def test_another_engine_goes_on_when_a_rank_has_ended(engine, single):
    whole = expected(single, 7)
    (rank,) = ranks_of(engine)._local.values()
    private = ranks_of(engine)._private
    add_requests(engine, 7)
    found: dict[str, list[int]] = {}
    rank_deaths.run_to(engine, "decode", found)
    os.kill(rank.pid, signal.SIGKILL)
    with pytest.raises(
        EngineDeadError,
        match=rf"^rank 1 \(stage 0 of 2, layers 0 to 1, on {socket.gethostname()}\), process "
        rf"{rank.pid}, was ended by SIGKILL.* engine.unfinished\(\) returns",
    ) as error:
        finish(engine, found)
    assert isinstance(error.value.__cause__, RankError)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        engine.step()
    assert not private.exists()
    left = engine.unfinished()
    assert len(left) == 6
    go_on(single, left, 7)
    assert finish(single, found) == whole


@pytest.mark.parametrize(
    ("sizes", "ways"),
    [
        ({"pipeline_parallel_size": 2}, ["SIGKILL", "hang"]),
        ({"tensor_parallel_size": 2}, ["SIGSTOP"]),
    ],
    ids=["stages", "shards"],
)
def test_a_server_goes_on_when_a_rank_ends_or_hangs(sizes, ways, tmp_path):
    before = left_behind()
    with failing_ranks(tmp_path):
        asyncio.run(rank_deaths.run_server(ways, sizes, tmp_path))
    assert left_behind() == before


def test_a_rank_that_ends_while_it_loads_is_named(monkeypatch):
    launch = local_rank.LocalRank.__init__

    def launch_and_end(self: local_rank.LocalRank, *arguments: object, **named: object) -> None:
        launch(self, *arguments, **named)
        os.kill(self.pid, signal.SIGKILL)

    before = left_behind()
    monkeypatch.setattr(local_rank.LocalRank, "__init__", launch_and_end)
    with pytest.raises(RankError, match=r"^rank 1 \(.*\), process \d+, was ended by SIGKILL"):
        LLMEngine("demo", pipeline_parallel_size=2, **OPTIONS)
    gc.collect()
    assert left_behind() == before


def test_ranks_end_with_the_process_that_has_started_them(tmp_path):
    """However it ends: here by SIGKILL, while the rank loads."""
    code = (
        "import sys, time; from pathlib import Path\n"
        "from paged.ranks.local_rank import LocalRank\n"
        "options = {'model': 'demo', 'pipeline_parallel_size': 2}\n"
        "start = {'rank': 1, 'options': options, 'directory': '/', 'private': sys.argv[1], 'num_local': 2}\n"
        "print(LocalRank(1, 'rank 1', start, on_end=print).pid, flush=True); time.sleep(600)\n"
    )
    private = tmp_path / "private"
    private.mkdir()
    with subprocess.Popen([sys.executable, "-c", code, private], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pid = int(driver.stdout.readline())
        eventually(lambda: (private / "rank-1.json").exists())
        driver.kill()
    eventually(lambda: not psutil.pid_exists(pid))
    eventually(lambda: not private.exists())


def _has_loaded(files: Path, pid: int) -> bool:
    states = [state for folder in files.glob(f"{DIRECTORY_PREFIX}*") for state in _states_in(folder)]
    return any(state.pid == pid and state.timeout_s is not None for state in states)


def test_processes_of_torchrun_compute_for_the_first():
    """Two nodes of one process each, with the environment that torchrun gives them.

    The second one's torchrun sends SIGTERM, as a pod's does that ends with the first one's: it goes on.
    """
    command = [sys.executable, "-m", "paged", "generate", "def add(a, b):", "--temperature", "0"]
    sizes = ["--max-tokens", "200", "--num-blocks", "64", "--num-threads", "1", "--device", "cpu"]
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(unused_port()),
    }

    def run(rank: int, *more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*command, *sizes, "--pipeline-parallel-size", "2", *more],
            env={**environment, "RANK": str(rank), "TMPDIR": tempfile.gettempdir()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    nodes = [run(0), run(1)]
    files = Path(tempfile.gettempdir())
    eventually(lambda: _has_loaded(files, nodes[1].pid) or nodes[1].poll() is not None)
    nodes[1].send_signal(signal.SIGTERM)
    out, err = nodes[0].communicate(timeout=240)
    assert nodes[1].communicate(timeout=240)[0] == ""
    assert [node.returncode for node in nodes] == [0, 0], err
    assert "rank 0 (stage 1 of 2" in err
    engine = LLMEngine("demo", device="cpu", num_threads=1, num_blocks=64)
    (output,) = engine.generate(
        ["def add(a, b):"], SamplingParams(temperature=0, max_tokens=200), use_tqdm=False
    )
    assert out == f"def add(a, b):{output.outputs[0].text}\n"


def test_torchrun_ends_a_rank_that_waits_and_no_file_is_left(tmp_path):
    """By SIGTERM, as when another one of its machine has ended."""
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    command = [sys.executable, "-m", "paged", "generate", "x", "--pipeline-parallel-size", "2"]
    environment = {**os.environ, **place, "TMPDIR": str(tmp_path)}
    root = Path(__file__).parents[2]
    with subprocess.Popen([*command, "--device", "cpu"], env=environment, cwd=root) as process:
        eventually(lambda: any(tmp_path.glob(f"{DIRECTORY_PREFIX}*")))
        process.terminate()
        assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert not [*tmp_path.glob(f"*{DIRECTORY_PREFIX}*")]


def test_a_rank_that_hangs_is_killed_before_the_others_are_waited_for(tmp_path):
    """So that the error comes when rank_timeout_s has passed: it would not end when it is told to."""
    ranks = object.__new__(supervision.Ranks)
    hangs, waits = mock.Mock(), mock.Mock()
    calls = mock.Mock()
    calls.attach_mock(hangs, "hangs")
    calls.attach_mock(waits, "waits")
    ranks._config = EngineConfig("demo", pipeline_parallel_size=3)
    ranks._torchrun, ranks._is_closed = None, False
    ranks._changed, ranks.transport = threading.Event(), mock.Mock()
    ranks._local, ranks._private = {1: hangs, 2: waits}, tmp_path / "private"
    with mock.patch.object(supervision.Ranks, "_find_troubles", return_value={1: "rank 1: it hangs"}):
        error = ranks.end_after(RankError("rank 1 sends nothing"))
    assert str(error) == "rank 1: it hangs"
    names = [name for name, _, _ in calls.mock_calls]
    assert names.index("hangs.kill") < names.index("waits.wait")
    assert "waits.kill" not in names
