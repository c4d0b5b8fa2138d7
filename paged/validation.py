"""Checks of values, shared by the classes that users fill in."""

from __future__ import annotations

import math
import sys
from dataclasses import MISSING, fields
from typing import Any

from .errors import PagedError


def check_int(
    error: type[PagedError], name: str, value: object, minimum: int, maximum: int | None = None
) -> int:
    """`value` if it is an int in [minimum, maximum], else `error`. A bool is not an int here."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise error(f"{name} must be an int, got {value!r}")
    if value < minimum or (maximum is not None and value > maximum):
        wanted = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise error(f"{name} must be {wanted}, got {value}")
    return value


def check_number(
    error: type[PagedError],
    name: str,
    value: object,
    minimum: float,
    maximum: float = math.inf,
    *,
    above: bool = False,
) -> float:
    """`value` if it is a finite number from minimum (if `above`: above it) to maximum, else `error`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise error(f"{name} must be a number, got {value!r}")
    if not -sys.float_info.max <= value <= sys.float_info.max:  # an int may be too large for a float
        raise error(f"{name} must be finite, got {value!r}")
    if value < minimum or value > maximum or (above and value == minimum):
        wanted = f"{'above' if above else 'at least'} {minimum:g}"
        if maximum < math.inf:
            wanted += f" and at most {maximum:g}"
        raise error(f"{name} must be {wanted}, got {value!r}")
    return float(value)


def check_bool(error: type[PagedError], name: str, value: object) -> bool:
    """`value` if it is True or False, else `error`."""
    if not isinstance(value, bool):
        raise error(f"{name} must be True or False, got {value!r}")
    return value


def changed(config: Any) -> list[str]:
    """The fields of a dataclass that differ from their defaults; all must have one."""
    defaults = {
        f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(config)
    }
    return [name for name, default in defaults.items() if getattr(config, name) != default]
