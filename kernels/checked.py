"""Operations whose calls are checked first; the first check imports `arguments`, which has them all."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from .checks import is_trusted

P = ParamSpec("P")
T = TypeVar("T")
_BARE: dict[Callable[..., Any], Callable[..., Any]] = {}  # the operation that each `checked` one calls


def checked(operation: Callable[P, T]) -> Callable[P, T]:
    """Decorate an operation so that calls outside `TrustedContents` are checked first."""
    check = checked_as(operation.__name__)(operation)

    @wraps(operation)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return operation(*args, **kwargs) if is_trusted() else check(*args, **kwargs)

    _BARE[call] = operation
    return call


def checked_as(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function with the parameters of the operation `name`: every call is checked first."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            from .arguments import check_call

            try:
                given = inspect.signature(function).bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{name}(): {error}") from None
            given.apply_defaults()
            check_call(name, given.arguments)
            return function(*args, **kwargs)

        return call

    return decorate


def unchecked(operation: Callable[P, T]) -> Callable[P, T]:
    """Return an operation without the check of `checked`, for callers that guarantee their arguments."""
    return _BARE.get(operation, operation)
