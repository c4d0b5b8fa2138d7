"""The cache of machine code: kernels are compiled once, and loaded by LLVM alone."""

import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("numba")

SCRIPT = """
    import sys
    import numpy as np
    from numba import carray
    from paged.kernels.cpu.launch import machine_code as own

    RECORD = np.dtype([("x", "i8"), ("out", "i8")])

    def seventh(record):
        args = carray(record, 1, RECORD)
        args[0].out = 7 // args[0].x

    compile, compiled = own._compile, []
    own._compile = lambda function: compiled.append(function) or compile(function)
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
    # A damaged file is compiled again; code of other sources is deleted.
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    file.with_name(file.name.replace(file.name[-18:], "0" * 16 + ".o")).write_bytes(b"of other sources")
    assert run() == "3 3 compiled with\n"
    assert [*tmp_path.iterdir()] == [file]
    assert run() == "3 3 loaded without\n"
