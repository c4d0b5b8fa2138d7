"""vLLM's API: what is accepted here without effect, what is refused, and why. The tables are in vllm.toml.

Names that are neither there nor here are unknown.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from .errors import PagedError
from .validation import shown

logger = logging.getLogger(__name__)

SECRETS = ("hf_token",)  # are in no message
_EMPTY: tuple[Any, ...] = (None, "", [], {}, set())
# What the log says of an argument that is True.
_NOTES = {
    "trust_remote_code": "trust_remote_code=True has no effect: no code of the checkpoint runs. A native "
    "architecture needs none, and any other is refused"
}


class Neutral(NamedTuple):
    """The values of an argument of vLLM that change nothing here, and why other values are refused."""

    values: tuple[Any, ...]
    reason: str


@cache
def _tables() -> dict[str, Any]:
    """Read vllm.toml, which takes 20 ms: only when a name is asked for that does not exist here."""
    import tomllib

    return tomllib.loads(Path(__file__).with_name("vllm.toml").read_text(encoding="utf-8"))


def _reason(key: str) -> str:
    text: str = _tables()["reasons"].get(key, key)
    return text


@cache
def neutral_of(owner: str) -> Mapping[str, Neutral]:
    """Return the arguments of vLLM that have no effect here, by name.

    owner: the class that has the arguments; "serve" for options that only `vllm serve` has, "calls" for
        arguments of methods.
    """
    found: dict[str, Neutral] = {}
    for key, arguments in _tables()[owner].items():
        for name, values in arguments.items():
            if name == "empty":
                found |= dict.fromkeys(values, Neutral(_EMPTY, _reason(key)))
            else:
                listed = values if isinstance(values, list) else [values]
                found[name] = Neutral((None, *listed), _reason(key))
    return found


@cache
def missing_of(owner: str) -> Mapping[str, str]:
    """Return what to use instead of the names that vLLM's class or package has and `owner` lacks."""
    names = _tables()["missing"].get(owner, {})
    return {name: _reason(key) for key, listed in names.items() for name in listed}


def without_neutral(
    owner: str,
    given: Mapping[str, Any],
    neutral: Mapping[str, Neutral],
    error: type[PagedError],
    written: str | None = None,
) -> dict[str, Any]:
    """Return the given arguments without vLLM's arguments that have a neutral value.

    written: the argument as the user wrote it, for messages; by default name=value.

    Raises `error` for any other value of vLLM's arguments. The message names the argument and what to do; of
    several, it names a switch that is on, else the first.
    """
    theirs = [name for name in given if name in neutral]
    # A switch first: enable_lora is the reason why there is a max_lora_rank.
    for name in sorted(theirs, key=lambda name: given[name] is not True):
        value = given[name]
        values, reason = neutral[name]
        if not any(_is_same(value, v) for v in values):
            if written is None:
                written = name if name in SECRETS else f"{name}={shown(value)}"
            raise error(f"{owner} got {written}: {reason}")
        if value is True and name in _NOTES:
            logger.warning(_NOTES[name])
    return {name: value for name, value in given.items() if name not in neutral}


def _is_same(value: object, neutral: object) -> bool:
    """Return whether two values are equal: 0.0 is 0, but False is not. A member of an enum is its value."""
    value = value.value if isinstance(value, Enum) else value
    is_number = {type(value), type(neutral)} == {int, float}
    return value is neutral or ((is_number or type(value) is type(neutral)) and value == neutral)


def missing(owner: str, name: str) -> str:
    """Return the message for a missing name. For a name of vLLM it says what to use instead."""
    # Python asks classes for many names with underscores, of which vLLM has none.
    reason = None if name.startswith("_") else missing_of(owner).get(name)
    return f"{owner} has no {name!r}" + (f": {reason}" if reason else "")
