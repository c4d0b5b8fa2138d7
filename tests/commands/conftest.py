"""Fixtures of the tests of commands."""

from collections.abc import Iterator

import pytest

from tests.support.command_line import Run, running


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Run `paged` in this process."""
    with running(monkeypatch, capsys) as run:
        yield run
