"""Ctrl-C at any moment of a command ends it, with its processes, and without a traceback."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paged.commands import top
from paged.ranks.local_rank import LocalRank

pytest.importorskip("msgspec")

from paged.server.launcher import start_process

ROOT = Path(__file__).parents[2]
# Sends Ctrl-C to its own process where a module is first imported.
HOOK = """
import os, signal, sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == os.environ["INTERRUPTED_AT"]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
"""
SCRIPT = "import sys\nfrom paged.__main__ import main\nsys.exit(main())\n"  # as pip writes it
MODULES = ["paged.base.missing_names", "typer", "paged.commands.cli", "paged.commands.top"]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("start", ["paged", "-m paged"])
def test_ctrl_c_while_the_command_is_imported(tmp_path, start, module):
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    script = tmp_path / "paged-bin" / "paged"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    command = ["-m", "paged"] if start == "-m paged" else [script]
    paths = os.pathsep.join(map(str, (tmp_path, ROOT)))
    ended = subprocess.run(
        [sys.executable, *command, "top", "--help"],
        env={**os.environ, "PYTHONPATH": paths, "INTERRUPTED_AT": module},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_leaves_the_importing_process_of_a_library_alone():
    """Unlike the command, a program that imports this package may have something to clean up."""
    code = "import signal, paged; print(signal.getsignal(signal.SIGINT) is not signal.SIG_DFL)"
    assert subprocess.check_output([sys.executable, "-c", code, "-m", "paged"], cwd=ROOT) == b"True\n"


def start_engine():
    connection, process = start_process()
    return process.pid, lambda: (process.kill(), process.wait(60), connection.close())


def start_rank():
    rank = LocalRank(1, "rank 1", {}, on_end=lambda: None)
    return rank.pid, rank.kill


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("start", [start_engine, start_rank])
def test_processes_get_no_signal_of_their_group_while_they_start(start):
    """From their first instruction on: they end when their parent does."""
    pid, end = start()
    try:
        masks = re.findall(r"^Sig(?:Blk|Ign):\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    finally:
        end()
    kept = int(masks[0], 16) | int(masks[1], 16)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        assert kept & 1 << number - 1, number
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGINT, signal.SIGTERM}


def test_ctrl_c_before_the_first_view(run, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(top, "_views", lambda *_: map(interrupt, [None]))
    assert run("top") == (0, "", "")


HELD = """
import asyncio, os, signal, time
import uvloop
from paged.server.drain import Drain

async def main():
    def hold():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.001)
        time.sleep(20)
        os._exit(3)
    with Drain(None, None, delay_s=60, timeout_s=60):
        asyncio.get_running_loop().call_soon(hold)
        await asyncio.sleep(60)

uvloop.run(main())
"""


def test_a_second_signal_ends_a_server_whose_loop_is_held():
    ended = subprocess.run([sys.executable, "-c", HELD], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
