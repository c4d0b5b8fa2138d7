"""Runs `paged` in this process and captures its output."""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from paged.commands import cli, common


class Terminal(io.StringIO):
    """Standard input that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


class Run:
    """Runs `paged` with arguments. Returns exit code, stdout and stderr."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *argv: Any, stdin: str | None = None, typed: str = "") -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["paged", *map(str, argv)])
        self.monkeypatch.setattr(sys, "stdin", Terminal(typed) if stdin is None else io.StringIO(stdin))
        with pytest.raises(SystemExit) as left:
            cli.main()
        out, err = self.capsys.readouterr()
        return left.value.code or 0, out, err

    def refused(self, *argv: Any, stdin: str | None = None, code: int = common.EXIT_USAGE) -> str:
        """Return the one line of an error that is found before the model is loaded."""
        self.monkeypatch.setattr(common, "start", lambda _: pytest.fail("the model was loaded"))
        return self.fails(*argv, stdin=stdin, code=code)

    def fails(self, *argv: Any, stdin: str | None = None, code: int = common.EXIT_USAGE) -> str:
        """Return the one line of an error; `code` is 1 where what was typed could be done elsewhere."""
        found, out, err = self(*argv, stdin=stdin)
        assert (found, out) == (code, "")
        *before, line = err.splitlines()
        assert line.startswith("paged: ")
        assert "Traceback" not in err
        assert not before or before[0].startswith("LlamaForCausalLM")
        return line


@contextmanager
def running(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Yield a Run, then restore what main() changes until its process ends.

    That is Ctrl-C, garbage collection, and the environment, which the processes of a server get.
    """
    handler = signal.getsignal(signal.SIGINT)
    with patch.dict(os.environ):
        yield Run(monkeypatch, capsys)
    signal.signal(signal.SIGINT, handler)
    gc.unfreeze()


def write(path: Path, *lines: Any) -> Path:
    """Write lines to a file, those that are not strings as JSON. Return its path."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path
