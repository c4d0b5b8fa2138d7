"""Fields of the API as options of the command line: one default, one help text, in one place."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from typing import Any

import typer


def option(owner: type[Any], name: str, *flags: str) -> Any:
    """A field of a config as an option: its default stays in `owner` alone, its help is the docstring's.

    flags: how it is written, if not --name, or --name/--no-name where the default is True.
    """
    found = re.search(rf"^    {name}: (.*?)(?=^    \w+: |^$)", owner.__doc__ or "", re.DOTALL | re.MULTILINE)
    text = " ".join(found[1].split()) if found else ""
    (default,) = (field.default for field in fields(owner) if field.name == name)
    if default == ():
        text += " May be given several times."
    elif default not in (None, MISSING) and not isinstance(default, bool):
        text += f" [default: {default}]"
    flag = name.replace("_", "-")
    flags = flags or (f"--{flag}/--no-{flag}" if default is True else f"--{flag}",)
    return typer.Option(*flags, help=text, show_default=default is MISSING)
