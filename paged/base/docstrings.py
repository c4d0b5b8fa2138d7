"""Docstrings as data: the help of commands, and the texts on fields of dataclasses."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from typing import Any


def docstring_of(owner: type[Any] | Callable[..., Any]) -> str:
    """Return the docstring of a class or function without its indentation; "" if there is none.

    Python 3.13 and newer remove the indentation themselves; older versions keep it.
    """
    if sys.flags.optimize >= 2:
        return _docstring_in_source(owner)
    return inspect.cleandoc(owner.__doc__ or "")


def field_texts(owner: type[Any]) -> dict[str, str]:
    """Return a dataclass docstring's text about each field, joined to one line, by field name."""
    found = re.finditer(r"^(\w+): (.*?)(?=^\w+: |^$|\Z)", docstring_of(owner), re.DOTALL | re.MULTILINE)
    return {match[1]: " ".join(match[2].split()) for match in found}


def _docstring_in_source(owner: type[Any] | Callable[..., Any]) -> str:
    """Read a docstring from the source file, as `python -OO` compiles none in."""
    try:
        source = textwrap.dedent(inspect.getsource(owner))
    except (OSError, TypeError):  # there is no source, as in some frozen programs
        return ""
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    return ast.get_docstring(definition) or ""
