"""Command-line options from the fields of config dataclasses, which hold the only default and help text."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from types import UnionType
from typing import Annotated, Any, get_args, get_origin

import typer

# Added to the help of fields that are mappings: how the command line writes one.
FORMS = {"logit_bias": " As ID=BIAS.", "tenant_weights": " As a=1,b=2."}


def option(owner: type[Any], name: str, *flags: str) -> Any:
    """Return the option of a config's field. Its help is read from the docstring of `owner`.

    flags: default to --name, and to --name/--no-name where the field's default is True.
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
    """Decorate a command that takes **options: add an option for each named field of each class.

    The value of a field that is a sequence or mapping is a list of strings or ints. An option that is not
    given is None or an empty list.
    """
    added = [_parameter(owner, name) for owner, names in given for name in names]

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        # Typer reads this attribute.
        command.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        return command

    return decorate


def option_type(owner: type[Any], name: str) -> Any:
    """Return the type that the command line gives the values of a field."""
    hint = typing.get_type_hints(owner)[name]
    if _is_list(hint):
        return list[int] if any(get_args(member) == (int,) for member in _members(hint)) else list[str]
    # Of several types, such as a policy's name or object, the command line gives the first.
    kind = next(member for member in _members(hint) if member is not type(None))
    return str if get_origin(kind) is typing.Literal else kind


def _parameter(owner: type[Any], name: str) -> inspect.Parameter:
    kind: Any = option_type(owner, name)
    annotation = Annotated[kind | None, option(owner, name)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (UnionType, typing.Union) else (hint,)


def _is_list(hint: Any) -> bool:
    """Return whether a field holds several values, so that its option may be given several times."""
    return any(get_origin(member) in (Sequence, Mapping) for member in _members(hint))
