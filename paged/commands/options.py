"""Fields of the API as options of the command line: one default, one help text, in one place."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from types import UnionType
from typing import Annotated, Any, get_args, get_origin

import typer

# How the command line writes a mapping.
FORMS = {"logit_bias": " As ID=BIAS.", "tenant_weights": " As a=1,b=2."}


def option(owner: type[Any], name: str, *flags: str) -> Any:
    """A field of a config as an option: its default stays in `owner` alone, its help is the docstring's.

    flags: how it is written, if not --name, or --name/--no-name where the default is True.
    """
    found = re.search(rf"^    {name}: (.*?)(?=^    \w+: |^$)", owner.__doc__ or "", re.DOTALL | re.MULTILINE)
    text = (" ".join(found[1].split()) if found else "") + FORMS.get(name, "")
    (default,) = (field.default for field in fields(owner) if field.name == name)
    if _is_list(typing.get_type_hints(owner)[name]):
        text += " May be given several times."
    if default not in (None, MISSING, ()) and not isinstance(default, bool):
        shown = " ".join(map(repr, default)) if isinstance(default, tuple) else default
        text += f" [default: {shown}]"
    flag = name.replace("_", "-")
    flags = flags or (f"--{flag}/--no-{flag}" if default is True else f"--{flag}",)
    return typer.Option(*flags, help=text, show_default=default is MISSING)


def with_options(
    *given: tuple[type[Any], Iterable[str]],
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command that takes **options these fields of these classes as options of its own.

    Fields that hold several values are lists of texts or ints; nothing given is None, or an empty list.
    """
    added = [_parameter(owner, name) for owner, names in given for name in names]

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        # What typer looks at:
        command.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        return command

    return decorate


def _parameter(owner: type[Any], name: str) -> inspect.Parameter:
    hint = typing.get_type_hints(owner)[name]
    if _is_list(hint):
        kind: Any = list[int] if any(get_args(member) == (int,) for member in _members(hint)) else list[str]
    else:
        (kind,) = (member for member in _members(hint) if member is not type(None))
        kind = str if get_origin(kind) is typing.Literal else kind
    annotation = Annotated[kind | None, option(owner, name)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (UnionType, typing.Union) else (hint,)


def _is_list(hint: Any) -> bool:
    """Whether it takes several values, which the command line has as a flag given several times."""
    return any(get_origin(member) in (Sequence, Mapping) for member in _members(hint))
