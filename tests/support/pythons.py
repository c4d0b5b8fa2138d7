"""The Pythons that paged supports. This file runs on older ones too, to refuse them by name.

python3.15 tests/support/pythons.py     # does this one go? If not, says why and exits with 1
python -m tests.support.pythons others  # prints the other supported ones of this machine, newest first
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig

PYPROJECT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "pyproject.toml")


def supported():
    """Return the minor versions of Python 3 that pyproject.toml admits."""
    with open(PYPROJECT) as file:
        least, past = re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', file.read()).groups()
    return range(int(least), int(past))


def refusal():
    """Return why this Python is not supported, or None."""
    minors = supported()
    major, minor = sys.version_info[:2]
    version = f"{major}.{minor}"
    if platform.python_implementation() != "CPython":
        wrong = f"{platform.python_implementation()} {version}"
    elif major != 3 or minor not in minors:
        wrong = f"Python {version}"
    elif sysconfig.get_config_var("Py_GIL_DISABLED"):
        wrong = f"Python {version} without the GIL"
    else:
        return None
    return (
        f"paged needs CPython 3.{minors[0]} to 3.{minors[-1]}, where torch, triton and numba have wheels; "
        f"{sys.executable} is {wrong}. Name another one, as in: make test PYTHON=python3.{minors[0]}"
    )


def others():
    """Return the executables of supported Pythons but this one, newest first: of the path, then of pyenv."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    pyenv = shutil.which("pyenv")
    if pyenv:
        root = subprocess.check_output([pyenv, "root"], universal_newlines=True).strip()
        versions = os.path.join(root, "versions")
        folders += [
            os.path.join(versions, name, "bin") for name in sorted(os.listdir(versions), reverse=True)
        ]
    found = []
    for minor in reversed(supported()):
        if minor == sys.version_info[1]:
            continue
        for folder in folders:
            program = os.path.join(folder, f"python3.{minor}")
            # pyenv's own folder of the path has programs that only say that their version is not chosen.
            if os.access(program, os.X_OK) and not subprocess.call(
                [program, os.path.abspath(__file__)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            ):
                found.append(program)
                break
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["others"]:
        print("\n".join(others()))
    elif refusal():
        sys.exit(refusal())
