"""The cache of machine code: kernels are compiled once, and loaded by LLVM alone."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("numba")

import paged
from paged.kernels.cpu import compiling
from paged.kernels.cpu.launch import code_cache

SCRIPT = """
    import sys
    import numpy as np
    from numba import carray
    from paged.kernels.cpu.launch import machine_code as own

    RECORD = np.dtype([("x", "i8"), ("out", "i8")])

    def seventh(record):
        args = carray(record, 1, RECORD)
        args[0].out = 7 // args[0].x

    compile, compiled = own.compile_kernel, []
    own.compile_kernel = lambda function: compiled.append(function) or compile(function)
    code = own.machine_code(seventh)
    record, raised = np.zeros(1, RECORD), []
    sys.unraisablehook = lambda error: raised.append(error.exc_type)
    for x in (2, 0):
        record["x"] = x
        code.call(record.ctypes.data)
        print(int(record["out"][0]), end=" ")
    assert raised == [ZeroDivisionError], raised
    print("compiled" if compiled else "loaded", "with" if "numba.np.linalg" in sys.modules else "without")
"""


@pytest.fixture
def run(tmp_path):
    def run():
        command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout

    return run


def test_code_is_compiled_once_and_loaded_without_numbas_compiler(run, tmp_path):
    """Check that loaded code computes the same, and that Python still reports its errors."""
    assert run() == "3 3 compiled with\n"
    (file,) = tmp_path.iterdir()
    assert run() == "3 3 loaded without\n"
    # A damaged file is compiled again; of other sources the newest are kept.
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    others = [file.with_name(file.name.replace(file.name[-18:], f"{i:016}.o")) for i in range(5)]
    for age, other in enumerate(others):
        other.write_bytes(b"of other sources")
        os.utime(other, (10**9 - age, 10**9 - age))
    assert run() == "3 3 compiled with\n"
    assert {*tmp_path.iterdir()} == {file, *others[:3]}
    assert run() == "3 3 loaded without\n"


def test_code_that_others_may_have_written_is_not_run(run, tmp_path):
    assert run() == "3 3 compiled with\n"
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o644
    file.chmod(0o666)
    assert run() == "3 3 compiled with\n"
    assert file.stat().st_mode & 0o777 == 0o644
    assert run() == "3 3 loaded without\n"
    if os.geteuid() == 0:
        os.chown(file, 12345, -1)
        assert run() == "3 3 compiled with\n"
        assert file.stat().st_uid == 0


COPY = """
    from paged.kernels.cpu import compiling
    def compile_kernel(function):
        raise SystemExit(f"{function} is compiled")
    compiling.compile_kernel, compiling.MOST_PROCESSES = compile_kernel, 1
    report = compiling.compile_ahead()
    print(report.num_compiled, report.directory)
"""


def test_a_copy_of_the_project_compiles_nothing(tmp_path, monkeypatch):
    """The key of the cache is content: neither the paths nor the times of files are in it."""
    directory = compiling.compile_ahead().directory
    root = Path(paged.__file__).parents[1]
    copy = tmp_path / "elsewhere"
    ignored = shutil.ignore_patterns("demo", "__pycache__")
    shutil.copytree(root / "paged", copy / "paged", ignore=ignored, copy_function=shutil.copyfile)
    cached = copy / "paged" / "kernels" / "cpu" / "__pycache__"
    cached.mkdir()
    for name in compiling.KERNELS:
        shutil.copyfile(directory / code_cache._file_name(name), cached / code_cache._file_name(name))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    environment = {**os.environ, "PYTHONPATH": str(copy), "HOME": str(tmp_path), "XDG_CACHE_HOME": ""}
    command = [sys.executable, "-c", textwrap.dedent(COPY)]
    started = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert (started.stdout, started.stderr) == (f"0 {cached}\n", "")
    # Another constant that the kernels use is another content.
    source = copy / "paged" / "kernels" / "plain" / "sampling" / "sample_tokens.py"
    source.write_text(source.read_text().replace("SMALLEST", "SMALLEST_NUMBER"))
    source.write_text(source.read_text() + "\nSMALLEST = SMALLEST_NUMBER\n")
    started = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert "is compiled" in started.stderr


# A process with kernels of its own, which are quick to compile. It begins when it reads a line.
STARTING = """
    import os, time
    from paged.kernels.cpu import compiling
    from paged.runner.compile_bar import compile_bar

    def kernel(number):
        def increase(record):
            number + 1
        increase.__name__, increase.__module__ = f"kernel{number}", "paged.kernels.cpu.test"
        return increase

    compile, compiled = compiling.compile_kernel, []

    def compile_kernel(function):
        compiled.append(function.__name__)
        open(f"{os.environ['MEETING']}/{os.getpid()}", "w").close()
        while len(os.listdir(os.environ["MEETING"])) < int(os.environ["NUM_MEETING"]):
            time.sleep(0.01)  # so that each of them compiles some
        compile(function)

    compiling.compile_kernel = compile_kernel
    compiling.KERNELS.clear()
    compiling.KERNELS.update({f"test.kernel{i}": kernel(i) for i in range(6)})
    compiling.MOST_PROCESSES = 1
    print("ready", flush=True)
    is_terminal = input() == "terminal"
    compiling.compile_ahead(compile_bar if is_terminal else None)
    print(*compiled)
"""


def start(tmp_path, num_meeting=1):
    command = [sys.executable, "-c", textwrap.dedent(STARTING)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    environment |= {"MEETING": str(tmp_path / "meeting"), "NUM_MEETING": str(num_meeting)}
    (tmp_path / "meeting").mkdir(exist_ok=True)
    process = subprocess.Popen(command, **pipes, text=True, env=environment)
    assert process.stdout.readline() == "ready\n"
    return process


def test_processes_that_start_at_once_share_the_work_and_later_ones_are_silent(tmp_path):
    both = [start(tmp_path, num_meeting=2) for _ in range(2)]
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    (first, told), (second, _) = (process.communicate(timeout=180) for process in both)
    assert sorted([*first.split(), *second.split()]) == [f"kernel{i}" for i in range(6)]
    assert first.strip()
    assert second.strip()
    assert "compiling 6 kernels for this CPU, once: about 3 s\ncompiled 6 of 6 kernels" in told
    assert sorted(file.suffix for file in (tmp_path / "cache").iterdir()) == [".o"] * 6  # no lock is left
    for line in ("\n", "terminal\n"):
        assert start(tmp_path).communicate(line, timeout=180) == ("\n", "")


def test_a_terminal_gets_a_bar(tmp_path):
    _, told = start(tmp_path).communicate("terminal\n", timeout=180)
    assert "compiling 6 kernels for this CPU, once: about 3 s |" in told
    assert "| 6/6 in 0" in told
    assert "compiled" not in told


def test_a_claim_ends_with_its_process(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    script = """
        from paged.kernels.cpu.launch import code_cache
        with code_cache.claimed("k") as ours:
            print(ours, flush=True)
            input()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "True\n"
        with code_cache.claimed("k") as ours:
            assert not ours
        process.send_signal(signal.SIGKILL)
    with code_cache.claimed("k") as ours:
        assert ours
    assert [*tmp_path.iterdir()] == []


def test_kernels_that_take_long_exist():
    """Their names order the work; a name of no kernel would be of no use."""
    names = set(compiling.KERNELS) | {"linear.amx_linear.tiles_kernel"}  # on CPUs with AMX
    assert set(compiling.SECONDS) <= names
