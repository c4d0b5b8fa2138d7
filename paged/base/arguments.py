"""Constructors that refuse unknown keywords, and accept those of vLLM that change nothing here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError, fields
from typing import Any, Concatenate, ParamSpec, TypeVar

from .errors import PagedError, RequestError, UnknownArgumentError, reject_unknown
from .validation import shown

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def strict(
    owner: type[T],
    vllm: str | None = None,
    error: type[PagedError] = RequestError,
    name: str | None = None,
    *,
    assignable: bool = False,
) -> type[T]:
    """Make a frozen dataclass refuse unknown keywords and assignments, with a message that says what to do.

    vllm: a class of vLLM. Its keywords are accepted with values that change nothing here; other values raise
        `error`.
    name: the name of the constructor in messages.
    assignable: whether fields may be assigned to. All fields are then checked and converted as by the
        constructor, and keep their values if a check raises.
    """
    known = {field.name for field in fields(owner)}  # type: ignore[arg-type]
    name = name or owner.__name__
    generated: Callable[..., None] = owner.__init__

    @functools.wraps(generated)
    def init(self: Any, *args: Any, **given: Any) -> None:
        if not given.keys() <= known:
            from .from_vllm import neutral_of, without_neutral

            neutral = neutral_of(vllm) if vllm else {}
            given = without_neutral(name, given, neutral, error)
            reject_unknown(name, given, known, neutral)
        generated(self, *args, **given)

    def refuse(_: Any, attribute: str, value: Any) -> None:
        call = f"dataclasses.replace(old, {attribute}={shown(value)})"
        raise FrozenInstanceError(f"{owner.__name__} is immutable: {call} returns a changed copy")

    def assign(self: Any, attribute: str, value: Any) -> None:
        changed = owner(**{**{field: getattr(self, field) for field in known}, attribute: value})
        for field in known:
            object.__setattr__(self, field, getattr(changed, field))

    owner.__init__ = init  # type: ignore[method-assign]
    owner.__setattr__ = assign if assignable else refuse  # type: ignore[method-assign]
    if assignable:  # what can change must not be the key of a dict
        owner.__hash__ = None  # type: ignore[assignment]
    return owner


def with_arguments_of(
    config: Callable[P, Any],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Give a method the signature of a config's constructor, for editors, type checkers and `help`."""

    def decorate(method: Callable[..., R]) -> Callable[Concatenate[Any, P], R]:
        show_arguments_of(config, method)
        return method

    return decorate


def show_arguments_of(config: Callable[..., Any], method: Callable[..., Any]) -> None:
    """Give `method`, which passes its keywords to `config`, the parameters and documentation of `config`."""
    own = [p for p in inspect.signature(method).parameters.values() if p.kind is not p.VAR_KEYWORD]
    names = {p.name for p in own}
    more = [p for p in inspect.signature(config).parameters.values() if p.name not in names]
    parameters = sorted([*own, *more], key=lambda p: p.kind)
    method.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    method.__doc__ = method.__doc__ or config.__doc__


def check_call(method: str, unnamed: Mapping[str, Any], **neutral: Any) -> None:
    """Refuse unknown arguments of a call, and vLLM's arguments with unsupported values.

    unnamed: keywords that are not in the method's signature.
    neutral: arguments of vLLM that are in the signature and have no effect here.

    Raises RequestError for an argument of vLLM with an unsupported value, and UnknownArgumentError for an
    unknown one.
    """
    given = {**{name: value for name, value in neutral.items() if value is not None}, **unnamed}
    if not given:
        return
    from .from_vllm import neutral_of, without_neutral

    for name in without_neutral(method, given, neutral_of("calls"), RequestError):
        raise UnknownArgumentError(f"{method} got an unknown argument {name!r}; see help(LLMEngine.{method})")
