"""Every error that `paged` raises on purpose.

PagedError
├── ConfigError            an engine option is wrong, or does not fit this machine
│   ├── DivisionError      the model cannot be divided among processes as the options say
│   └── ResourceError      the machine lacks what the options need: memory, cores, a GPU, a port, a package
│       └── ClusterError   the same of Ray and its cluster
├── RequestError           a prompt or sampling parameter is wrong; only that request is refused
│   ├── WorkerLostError    the process of a chat template, or a tokenizer, was ended from outside; try again
│   ├── QueueFullError     max_waiting requests, or max_queued_tokens, wait already
│   └── RequestTimeoutError    timeout_s has passed before the request reached the engine
├── UnknownArgumentError   a keyword that does not exist (also a TypeError)
├── UnsupportedModelError  a model, or a feature of its config, that is not implemented
├── CheckpointError        files that are damaged, or disagree with their config
│   └── MissingModelError  files that are missing, or a model that cannot be fetched
├── FileError              a file of prompts or results holds something else, is in use, or cannot be written
├── RequestKillsEngineError    four engine processes ended while they computed the request
├── RankError              a process of a model over several has ended or hangs, or they do not fit together
├── EngineDeadError        the async engine was shut down, a step of it raised, or a GPU failed for good
└── UsageError             a call in the wrong state, such as freeing a block twice

All are ValueErrors too, so that code written for `except ValueError` keeps working.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar


class PagedError(ValueError):
    """Base of every error that `paged` raises on purpose.

    The message is one line. Unprintable characters are escaped, since they may come from a file and control a
    terminal. A message longer than MAX_LENGTH loses its middle.

    param: the parameter or the field of a request body that is wrong, if known.
    """

    MAX_LENGTH: ClassVar[int | None] = None
    param: str | None = None

    def __init__(self, message: str = "", *, param: str | None = None) -> None:
        if not message.isprintable():
            message = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)
        if self.MAX_LENGTH is not None and len(message) > self.MAX_LENGTH:
            half = self.MAX_LENGTH // 2
            message = f"{message[: half - 2]} … {message[1 - half :]}"
        super().__init__(message)
        if param is not None:
            self.param = param


class ConfigError(PagedError):
    """An engine option is wrong, or does not fit this machine."""


class DivisionError(ConfigError):
    """The model cannot be divided among processes as the options say."""


class ResourceError(ConfigError):
    """The machine lacks something: memory, cores, a GPU, a port, a file of keys, a package."""


class ClusterError(ResourceError):
    """Ray is not installed, no Ray cluster answers, or the cluster lacks room for the engines."""


class RequestError(PagedError):
    """A prompt or a sampling parameter is wrong. Only that request is refused."""

    MAX_LENGTH = 500  # it may repeat what a stranger wrote


class WorkerLostError(RequestError):
    """The process that renders a chat template or tokenizes was killed from outside; try again later."""


class QueueFullError(RequestError):
    """The queue already holds max_waiting requests or max_queued_tokens tokens; try again later."""


class RequestTimeoutError(RequestError):
    """The request's timeout_s passed while its prompt was prepared, before it reached the engine."""


class UnknownArgumentError(PagedError, TypeError):
    """A keyword that does not exist."""


class UnsupportedModelError(PagedError):
    """A model, or a feature of its config, that is not implemented."""

    MAX_LENGTH = 500


class CheckpointError(PagedError):
    """Files that are damaged, or disagree with their config."""

    MAX_LENGTH = 500


class MissingModelError(CheckpointError):
    """Files of a checkpoint are missing, or cannot be read or fetched. A retry may find them."""


class FileError(PagedError):
    """A file of prompts or results holds something else, is in use, or cannot be written."""


class EngineDeadError(PagedError):
    """The async engine was shut down, one of its steps raised, or its GPU failed: see __cause__."""


class RequestKillsEngineError(PagedError):
    """Four engine processes ended while they computed this request; the last two computed nothing else."""


class RankError(PagedError):
    """A process of a model over several processes ended, hangs, or does not match the others."""


class UsageError(PagedError):
    """A call that the object's state does not allow, such as freeing a block twice."""


def is_final(error: PagedError) -> bool:
    """Return whether a new start with the same files on this machine would always fail.

    Shortages are not final: memory, cores, a port, another process or a file of the model may become
    available.
    """
    is_wrong = isinstance(error, ConfigError | UnknownArgumentError | UnsupportedModelError | CheckpointError)
    return is_wrong and not isinstance(error, ResourceError | MissingModelError)


def dead_engine(reason: str, cause: BaseException) -> EngineDeadError:
    """Return the error of an engine that can run no more steps; its message gives the reason."""
    error = EngineDeadError(
        f"{reason}. engine.unfinished() returns the requests so far, for another engine to go on with"
    )
    error.__cause__ = cause
    return error


@contextmanager
def about(param: str) -> Iterator[None]:
    """Set `param` on an error that is raised inside this context, unless the error already has one."""
    try:
        yield
    except PagedError as error:
        error.param = error.param or param
        raise


def reject_unknown(
    owner: str, given: Iterable[str], known: Iterable[str], neutral: Iterable[str] = ()
) -> None:
    """Raise UnknownArgumentError for the first name in `given` that is not in `known`.

    neutral: names of accepted arguments without effect; they too are suggested for a misspelled name.
    """
    known = sorted(known)
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, [*known, *neutral], n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known)}"
            raise UnknownArgumentError(f"{owner} got an unknown argument {name!r}; {hint}")
