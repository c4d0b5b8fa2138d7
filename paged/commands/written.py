"""How the user wrote the options of a command, which errors about them say: a flag, a variable, or a line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from ..base.errors import PagedError

# By the names of options; the command's flags, until it reads the environment and a file.
_WRITTEN: ContextVar[dict[str, str]] = ContextVar("_WRITTEN")
_NAME = re.compile(r"\w+")
_OTHER_NAME = re.compile(r"(?<= )\w+(?=[ ,;\[]|$)")  # a part of a path is none


def note_written(written: Mapping[str, str]) -> None:
    """Remember how options are written that no flag gives."""
    known = _WRITTEN.get(None)
    if known is not None:
        known.update({name: how for name, how in written.items() if name not in known})


@contextmanager
def options_as_written(flags: Mapping[str, str]) -> Iterator[None]:
    """Have an error whose message begins with the name of an option begin with how the user wrote it."""
    token = _WRITTEN.set({**flags})
    try:
        yield
    except PagedError as error:
        error.args = (_as_written(str(error), _WRITTEN.get()),)
        raise
    finally:
        _WRITTEN.reset(token)


def _as_written(message: str, written: Mapping[str, str]) -> str:
    name = _NAME.match(message)
    if name is None or name[0] not in written:
        return message

    def replaced(other: re.Match[str]) -> str:
        # A name of one word, such as device, may be no name here.
        return written[other[0]].rpartition(": ")[2] if "_" in other[0] and other[0] in written else other[0]

    return written[name[0]] + _OTHER_NAME.sub(replaced, message[name.end() :])
