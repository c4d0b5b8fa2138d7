"""The cache of machine code: kernels are compiled once, and loaded by LLVM alone."""

import importlib
import os
import platform
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
from paged.kernels.cpu.compiled import kernels
from paged.kernels.cpu.compiled.loading import place_by_llvm
from paged.kernels.cpu.launch import code_cache, compiled_files, machine_code

SCRIPT = """
    import ctypes, sys
    from paged.kernels.cpu.launch import code_cache, machine_code

    class Record(ctypes.Structure):
        _fields_ = [("x", ctypes.c_int64), ("out", ctypes.c_int64)]

    is_compiled = code_cache.find("test.seventh") is None
    if is_compiled:
        from numba import carray
        from numpy import dtype
        from paged.kernels.cpu.compiled.kernels import kernel
        FIELDS = dtype([("x", "i8"), ("out", "i8")])

        @kernel("test.seventh")
        def seventh(record):
            args = carray(record, 1, FIELDS)
            args[0].out = 7 // args[0].x

    code = machine_code.machine_code("test.seventh")
    record = Record(2, 0)
    code.call(ctypes.byref(record))
    how = "compiled" if is_compiled else "loaded"
    print(record.out, how, "with" if "numba" in sys.modules else "without")
    if len(sys.argv) > 1:
        sys.stdout.flush()
        code.call(ctypes.byref(Record(0, 0)))
"""


@pytest.fixture
def run(tmp_path):
    def run():
        command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout

    return run


def files(directory, suffix=".o"):
    return {file for file in directory.iterdir() if file.suffix == suffix}


def test_code_is_compiled_once_and_loaded_without_numba(run, tmp_path):
    assert run() == "3 compiled with\n"
    (file,) = files(tmp_path)
    assert run() == "3 loaded without\n"
    # A damaged file is compiled again; of other sources the newest are kept.
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    others = [file.with_name(file.name.replace(file.name[-18:], f"{i:016}.o")) for i in range(5)]
    for age, other in enumerate(others):
        other.write_bytes(b"of other sources")
        os.utime(other, (10**9 - age, 10**9 - age))
    assert run() == "3 compiled with\n"
    assert files(tmp_path) == {file, *others[:3]}
    assert run() == "3 loaded without\n"
    # What LLVM said of this CPU is asked again where its file is damaged.
    (target,) = files(tmp_path, ".json")
    for damaged in (b'["x", 3, true, true, true]', target.read_bytes()[:-1]):
        target.write_bytes(damaged)
        assert run() == "3 loaded with\n"
        assert run() == "3 loaded without\n"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere LLVM loads the code")
def test_a_kernel_that_raises_ends_the_process(tmp_path):
    """Its results would be wrong. None raises on purpose."""
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), "raise"]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (ended.stdout, ended.returncode) == ("3 compiled with\n", -signal.SIGABRT)
    assert "a CPU kernel raised an exception" in ended.stderr


def test_llvm_and_the_loader_place_the_same_code():
    """Each relocation of every kernel gives what LLVM's loader gives, relative to where the code lies."""
    compiling.compile_ahead()
    for name in compiling.SECONDS:
        symbol, code = code_cache.find(name)
        for place in (machine_code.place, place_by_llvm):
            address, owner = place(symbol, code)
            assert address
            assert owner is not None


@pytest.mark.parametrize("damage", [b"", b"\x7fELF", b"MZ" * 40, b"\x7fELF\x02\x01\x01" + bytes(80)], ids=len)
def test_another_kind_of_object_file_is_left_to_llvm(damage):
    with pytest.raises(machine_code.UnknownRelocationError):
        machine_code.place("symbol", damage)


def test_code_that_others_may_have_written_is_not_run(run, tmp_path):
    assert run() == "3 compiled with\n"
    (file,) = files(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o644
    file.chmod(0o666)
    assert run() == "3 compiled with\n"
    assert file.stat().st_mode & 0o777 == 0o644
    assert run() == "3 loaded without\n"
    if os.geteuid() == 0:
        os.chown(file, 12345, -1)
        assert run() == "3 compiled with\n"
        assert file.stat().st_uid == 0


COPY = """
    from paged.kernels.cpu import compiling
    from paged.kernels.cpu.compiled import kernels
    def compile_kernel(name):
        raise SystemExit(f"{name} is compiled")
    kernels.compile_kernel = compile_kernel
    compiling.MOST_PROCESSES = 0
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
    for name in compiling.SECONDS:
        shutil.copyfile(directory / code_cache.file_name(name), cached / code_cache.file_name(name))
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
    from paged.kernels.cpu.compiled import kernels
    from paged.kernels.cpu.launch import code_cache
    from paged.runner.compile_bar import compile_bar

    def make(number):
        def increase(record):
            number + 1
        return increase

    for i in range(6):
        kernels.kernel(f"test.kernel{i}")(make(i))
    compile, compiled = kernels.compile_kernel, []

    def compile_kernel(name):
        compiled.append(name.removeprefix("test."))
        open(f"{os.environ['MEETING']}/{os.getpid()}", "w").close()
        while len(os.listdir(os.environ["MEETING"])) < int(os.environ["NUM_MEETING"]):
            time.sleep(0.01)  # so that each of them compiles some
        compile(name)

    kernels.compile_kernel = compile_kernel
    code_cache.SECONDS.clear()
    code_cache.SECONDS.update({f"test.kernel{i}": 0.5 for i in range(6)})
    compiling.MOST_PROCESSES = 0
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
    assert "compiling 6 kernels for this CPU, once\n" in told
    assert "\ncompiled 6 of 6 kernels" in told
    assert sorted(file.suffix for file in (tmp_path / "cache").iterdir()) == [
        ".json",
        *[".o"] * 6,
    ]  # no lock is left
    for line in ("\n", "terminal\n"):
        assert start(tmp_path).communicate(line, timeout=180) == ("\n", "")


def test_a_terminal_gets_a_bar(tmp_path):
    _, told = start(tmp_path).communicate("terminal\n", timeout=180)
    assert "compiling 6 kernels for this CPU, once |" in told
    assert "| 6/6 in 0" in told
    assert "compiled" not in told


def test_a_claim_ends_with_its_process(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    script = """
        from paged.kernels.cpu.launch import compiled_files
        with compiled_files.claimed("k") as ours:
            print(ours, flush=True)
            input()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "True\n"
        with compiled_files.claimed("k") as ours:
            assert not ours
        process.send_signal(signal.SIGKILL)
    with compiled_files.claimed("k") as ours:
        assert ours
    assert files(tmp_path, ".lock") == set()


def test_the_kernels_of_the_list_are_those_of_the_modules():
    """A kernel that is not in the list would be compiled at its first launch, in a step."""
    for file in (Path(kernels.__file__).parent).rglob("*.py"):
        name = ".".join(file.relative_to(Path(kernels.__file__).parent).with_suffix("").parts)
        importlib.import_module(f"paged.kernels.cpu.compiled.{name}")
    names = {name for name in kernels.KERNELS if not name.startswith("test.")}
    assert set(compiling.SECONDS) == names
