"""vLLM's spellings of flags: underscores, and the parts of an object as flags of their own."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..base.errors import ConfigError


def spelled_out(args: Sequence[str], takes_value: Mapping[str, bool], objects: Collection[str]) -> list[str]:
    """Return arguments with flags as they are declared: --a_b is --a-b, and --a-b.c 1 is --a-b={"c": 1}.

    takes_value: whether a value follows each known flag. objects: the flags of objects.
    Arguments after -- and values of flags stay as they are, and so do unknown flags.

    Raises ConfigError.
    """
    result: list[str] = []
    parts: dict[str, dict[str, Any]] = {}
    rest = [*args]
    while rest:
        written = rest.pop(0)
        if written == "--":
            rest.insert(0, written)
            break
        text, equals, value = written.partition("=")
        flag, dot, path = text.partition(".")
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        if dot and flag in objects:
            if not equals and not rest:
                raise ConfigError(f"{text} needs a value")
            _put(parts.setdefault(flag, {}), path.split("."), value if equals else rest.pop(0), text)
            continue
        if dot or flag not in takes_value:
            result.append(written)
            continue
        result.append(f"{flag}{equals}{value}")
        if takes_value[flag] and not equals and rest:
            result.append(rest.pop(0))
    for flag in parts:
        if any(text.partition("=")[0] == flag for text in result):
            raise ConfigError(f"{flag} is given as a whole and by its keys; give one of them")
    return [*result, *(f"{flag}={json.dumps(value)}" for flag, value in parts.items()), *rest]


def _put(whole: dict[str, Any], path: Sequence[str], text: str, flag: str) -> None:
    """Set a part of an object, by the keys that lead to it. Raises ConfigError."""
    *outer, key = path
    for each in outer:
        whole = whole.setdefault(each, {})
        if not isinstance(whole, dict):
            raise ConfigError(f"{flag} is a part of a value that is given already")
    if not all(path) or key in whole:
        raise ConfigError(f"{flag} {'is given twice' if all(path) else 'has an empty key'}")
    try:
        whole[key] = json.loads(text)
    except (ValueError, RecursionError):
        whole[key] = text
