"""Requests are prepared in turn, answered at their deadline, and dropped when their readers leave."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from paged.base.errors import RequestTimeoutError
from paged.server.preparations import Preparation, Preparations
from tests.support.served import PATIENCE_S


class Harness:
    """Two threads, of which each preparation waits until it is told to go on. Events: (what, name)."""

    def __init__(self) -> None:
        self.preparations = Preparations[str](2)
        self.begun: SimpleQueue[str] = SimpleQueue()
        self.events: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self.go_on: defaultdict[str, threading.Event] = defaultdict(threading.Event)

    def submit(self, name: str, left_s: float | None = None) -> None:
        go_on = self.go_on[name]  # made here, so that the end of the test sets all there will be

        def prepare() -> str:
            self.begun.put(name)
            assert go_on.wait(PATIENCE_S)
            if name.endswith("wrong"):
                raise ValueError(name)
            return name

        asked = Preparation(
            key=name,
            tenant=name[0],
            left_s=left_s,
            prepare=prepare,
            add=lambda spec: self.events.put(("added", spec)),
            fail=lambda error: self.events.put((type(error).__name__, name)),
            give_up=lambda: self.events.put(("given up", name)),
        )
        self.preparations.submit(asked)

    def finish(self, *names: str) -> None:
        for name in names:
            self.go_on[name].set()

    def next_begun(self) -> str:
        return self.begun.get(timeout=PATIENCE_S)

    def next_event(self) -> tuple[str, Any]:
        return self.events.get(timeout=PATIENCE_S)


@pytest.fixture
def harness() -> Iterator[Harness]:
    harness = Harness()
    yield harness
    harness.finish(*harness.go_on)
    harness.preparations._pool.shutdown()
    assert harness.events.empty(), "a request was answered twice"
    assert len(harness.preparations) == 0
    assert not harness.preparations._waiting
    assert not harness.preparations._num_running


def test_tenants_take_turns(harness):
    """The first one is alone, and has both threads; then it gets no second one while others wait."""
    for name in ("a0", "a1"):
        harness.submit(name)
        assert harness.next_begun() == name
    for name in ("a2", "a3", "b0", "b1", "c0"):
        harness.submit(name)
    for finished, begun in (("a0", "b0"), ("b0", "c0"), ("c0", "b1"), ("b1", "a2"), ("a1", "a3")):
        harness.finish(finished)
        assert harness.next_begun() == begun
    harness.finish("a2", "a3")
    assert {harness.next_event() for _ in range(7)} == {
        ("added", name) for name in ("a0", "a1", "a2", "a3", "b0", "b1", "c0")
    }


def test_what_is_dropped_is_never_prepared_and_takes_no_place(harness):
    for name in ("a0", "a1", "a2", "a3"):
        harness.submit(name)
    assert {harness.next_begun(), harness.next_begun()} == {"a0", "a1"}
    for name in ("a2", "a0"):  # one that waits, and one that is being prepared
        harness.preparations.drop(name)
        harness.preparations.drop(name)
        assert harness.next_event() == ("given up", name)
    assert len(harness.preparations) == 2
    harness.finish("a0", "a1", "a3")
    assert harness.next_begun() == "a3"
    assert {harness.next_event(), harness.next_event()} == {("added", "a1"), ("added", "a3")}


def test_a_deadline_holds_whatever_the_threads_do(harness):
    """One that is being prepared, one that waits; one that has time goes on."""
    harness.submit("a0", left_s=1e-6)
    harness.submit("a1", left_s=1e9)
    harness.submit("a2", left_s=1e-6)
    expired = {harness.next_event(), harness.next_event()}
    assert expired == {(RequestTimeoutError.__name__, "a0"), (RequestTimeoutError.__name__, "a2")}
    harness.finish("a1")
    assert harness.next_event() == ("added", "a1")


def test_an_error_is_told_to_its_request(harness):
    harness.submit("a wrong")
    harness.finish("a wrong")
    assert harness.next_event() == ("ValueError", "a wrong")
