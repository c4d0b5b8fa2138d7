"""What held on one Python alone, and which Pythons are supported. Needs no torch: make test-other-python."""

import dataclasses
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from paged.base.docstrings import docstring_of, field_texts
from paged.commands.cli import app
from paged.options.config import EngineConfig
from paged.options.sampling_params import SamplingParams, StructuredOutputsParams
from paged.options.speculative_config import SpeculativeConfig
from paged.protocol.fields.sampling import SAMPLING_FIELDS
from paged.server.options import ServeOptions
from tests.support.pythons import supported
from tests.support.requirements import KINDS, LEFT_OUT, declared, requirements

ROOT = Path(__file__).parents[1]
OWNERS = (EngineConfig, SamplingParams, StructuredOutputsParams, ServeOptions, SpeculativeConfig)


def texts():
    """Return every text of the help of commands, of the fields of requests, and of options."""
    found = {
        f"{owner.__name__}.{name}": text for owner in OWNERS for name, text in field_texts(owner).items()
    }
    found |= {field.name: field.meaning for field in SAMPLING_FIELDS}
    commands = [("paged", get_command(app))]
    while commands:
        path, command = commands.pop()
        found[path] = command.help
        found |= {f"{path} {each.name}": each.help for each in command.params if hasattr(each, "help")}
        if hasattr(command, "list_commands"):
            names = command.list_commands(None)
            commands += [(f"{path} {name}", command.get_command(None, name)) for name in names]
    return found


def test_everything_has_its_text():
    found = texts()
    assert not [name for name, text in found.items() if not text]
    assert {
        f"{owner.__name__}.{field.name}" for owner in OWNERS for field in dataclasses.fields(owner)
    } <= set(found)
    assert "paged bench throughput model" in found


@pytest.mark.parametrize("owner", OWNERS, ids=lambda owner: owner.__name__)
def test_texts_do_not_depend_on_the_indentation_of_docstrings(owner):
    """Since Python 3.13 the compiler strips it."""
    stripped = type(owner.__name__, (), {"__doc__": inspect.cleandoc(owner.__doc__)})
    indented = type(owner.__name__, (), {"__doc__": re.sub("\n(?=.)", "\n    ", stripped.__doc__)})
    assert field_texts(stripped) == field_texts(indented) == field_texts(owner)
    assert docstring_of(stripped) == docstring_of(indented)


def test_texts_are_the_same_without_docstrings():
    script = "import json; from tests.test_pythons import texts; print(json.dumps(texts()))"
    printed = subprocess.check_output([sys.executable, "-OO", "-c", script], cwd=ROOT, text=True)
    assert json.loads(printed) == texts()


def test_pyproject_readme_and_the_refusal_name_the_same_pythons():
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert [int(minor) for minor in re.findall(r":: Python :: 3\.(\d+)", pyproject)] == [*supported()]
    least, *_, most = supported()
    assert f"Python 3.{least} to 3.{most}" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f'python_version = "3.{least}"' in pyproject
    assert f'target-version = "py3{least}"' in pyproject


@pytest.mark.parametrize(
    ("version", "implementation", "gil", "words"),
    [
        ((3, 10), "CPython", 0, "is Python 3.10. Name another one"),
        ((3, 99), "CPython", 0, "is Python 3.99. Name another one"),
        ((4, 12), "CPython", 0, "is Python 4.12. Name another one"),
        ((3, 12), "PyPy", 0, "is PyPy 3.12"),
        ((3, 13), "CPython", 1, "is Python 3.13 without the GIL"),
        ((3, 14), "CPython", 0, None),
    ],
)
def test_a_python_without_wheels_is_refused_by_name(version, implementation, gil, words, monkeypatch):
    pythons = importlib.import_module("tests.support.pythons")
    monkeypatch.setattr("sys.version_info", version)
    monkeypatch.setattr("platform.python_implementation", lambda: implementation)
    monkeypatch.setattr("sysconfig.get_config_var", lambda _: gil)
    refusal = pythons.refusal()
    assert (words in refusal and sys.executable in refusal) if words else refusal is None


def test_other_pythons_are_found_on_the_path_and_one_that_only_refuses_is_passed_over(tmp_path):
    """As pyenv's programs do, whose versions are not chosen."""
    least, *_, most = [minor for minor in supported() if minor != sys.version_info[1]]
    for minor, line in ((most, "exit 127"), (least, "exit 0")):
        program = tmp_path / f"python3.{minor}"
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
    command = [sys.executable, "-m", "tests.support.pythons", "others"]
    printed = subprocess.check_output(command, env={**os.environ, "PATH": str(tmp_path)}, cwd=ROOT, text=True)
    assert printed.split() == [str(tmp_path / f"python3.{least}")]


@pytest.mark.parametrize("share", LEFT_OUT)
def test_every_dependency_of_pyproject_is_required(share):
    names = [name for name, *_ in declared() if name not in LEFT_OUT[share]]
    for kind in KINDS:
        lines = requirements(f"{kind}-{share}".rstrip("-"))
        assert [re.split("[<>=]", line)[0] for line in lines] == names
        assert all(
            ("==" in line) == (kind == "oldest") for line in (line.partition(";")[0] for line in lines)
        )
