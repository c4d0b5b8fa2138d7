"""The threads of the CPU kernels: who takes part in a launch, whom the caller waits for, when they sleep."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from paged.kernels.cpu.compiled.kernels import each_unit
from paged.kernels.cpu.compiled.simd.memory import claim, pause, seen
from paged.kernels.cpu.launch import threads as module
from paged.kernels.cpu.launch.graph import Graph, Recorder
from paged.kernels.cpu.launch.tasks import NEXT_THREAD, Task
from paged.kernels.cpu.launch.threads import Threads, threads
from tests.support.kernel_cases import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="these kernels are for a CPU, tensors are on a GPU")

LOOKS = 10**8  # some seconds
COUNT = Task("test.count", ("counts", "entered", "timeouts"), ("num_expected",))


@each_unit(COUNT)
def _count(args, unit, _scratch):
    """Count the unit, then wait until so many units are being worked on, but not for ever."""
    claim(args.counts + 8 * unit)
    claim(args.entered)
    for _ in range(LOOKS):
        if seen(args.entered) >= args.num_expected:
            return
        pause()
    claim(args.timeouts)


@pytest.fixture(scope="module", autouse=True)
def _compiled(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        assert COUNT.code


@pytest.fixture
def four_threads(monkeypatch) -> Threads:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    return threads()


def count(num_units: int, num_expected: int = 0, times: int = 1) -> list[int]:
    """Return how often each unit was done, and last how often a unit waited for others in vain."""
    counts, timeouts = np.zeros(num_units, np.int64), np.zeros(1, np.int64)
    for _ in range(times):
        entered = np.zeros(1, np.int64)
        places = {"counts": counts, "entered": entered, "timeouts": timeouts}
        addresses = {name: place.ctypes.data for name, place in places.items()}
        COUNT.run(num_units, **addresses, num_expected=num_expected)
    return [*counts.tolist(), *timeouts.tolist()]


@pytest.mark.usefixtures("four_threads")
def test_all_threads_take_part():
    assert count(4, num_expected=4, times=20) == [20] * 4 + [0]


@pytest.mark.usefixtures("four_threads")
def test_no_more_threads_take_part_than_a_launch_wants():
    """It has allocated scratch memory for so many."""
    for num_units in (4, 2, 3, 2):
        for _ in range(200):
            count(num_units)
            num_threads = np.frombuffer(COUNT._local.record, np.int64)[NEXT_THREAD // 8]
            assert num_threads <= num_units


def test_launches_of_many_callers_do_each_unit_once(four_threads):
    wrong = []

    def work(seed: int) -> None:
        for num_units in np.random.default_rng(seed).integers(2, 40, 50).tolist():
            done = count(num_units, times=20)
            if done != [20] * num_units + [0]:
                wrong.append(done)

    callers = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong
    assert four_threads._memory[[module.ACTIVE // 8, module.CALLERS // 8]].tolist() == [0, 0]


@pytest.mark.usefixtures("four_threads")
def test_a_replay_of_many_kernels_does_each_unit_once():
    counts, entered = torch.zeros(2, 20, dtype=torch.int64)
    with Recorder() as recorder:
        timeouts = torch.empty(1, dtype=torch.int64)
        for num_units in (1, 2, 19, 3, 7) * 8:
            COUNT.run(num_units, counts=counts, entered=entered, timeouts=timeouts, num_expected=0)
    graph = Graph(recorder, [], [timeouts], num_threads=4)
    graph.use_memory(torch.zeros(graph.num_bytes, dtype=torch.uint8))
    for _ in range(200):
        graph.replay()
    assert counts.tolist() == [200 * 8 * sum(n > unit for n in (1, 2, 19, 3, 7)) for unit in range(20)]


def test_caller_does_not_wait_for_threads_that_have_no_core(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    own = Threads()
    monkeypatch.setattr("paged.kernels.cpu.launch.tasks.threads", lambda: own)
    own._helpers = [threading.Thread() for _ in range(2)]  # they never run
    assert count(30, times=10) == [10] * 30 + [0]


def test_threads_sleep_between_launches(four_threads):
    count(4)
    helpers = [helper.native_id for helper in four_threads._helpers]
    assert len(helpers) >= 3

    def states() -> set[str]:
        files = [Path(f"/proc/self/task/{helper}/stat") for helper in helpers]
        return {file.read_text().rpartition(")")[2].split()[0] for file in files}

    deadline = time.monotonic() + 60
    while states() != {"S"} and time.monotonic() < deadline:
        time.sleep(0.01)
    assert states() == {"S"}
    assert four_threads._memory[module.IDLE // 8] == len(helpers)


def test_without_a_system_call_to_sleep_an_executor_gives_the_same(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(module.platform, "machine", lambda: "unknown")
    own = Threads()
    monkeypatch.setattr("paged.kernels.cpu.launch.tasks.threads", lambda: own)
    assert count(3, num_expected=3) == [1, 1, 1, 0]
    assert len(own._executor._threads) == 2, "the caller is one of the three"
    assert not own._helpers


SCRIPT = """
import os, sys
from paged import LLMEngine, SamplingParams
engine = LLMEngine("demo", device="cpu", num_threads=min(2, os.cpu_count()), num_blocks=64)
params = SamplingParams(temperature=0.0, max_tokens=20)
def tokens():
    return [o.outputs[0].token_ids for o in engine.generate([[1], [5] * 40], params, use_tqdm=False)]
expected = tokens()
child = os.fork()
same = tokens() == expected
if child == 0:
    os._exit(0 if same else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if same else 4)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_threads_of_its_own_and_both_end():
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
