"""The log's queue: it never waits for its reader, and no line is lost without being counted."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import select
from collections.abc import Iterator

import pytest

from paged.server.telemetry import log_queue
from paged.server.telemetry.log_queue import LogQueue
from tests.support.served import eventually

COUNT = 2000


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 4096)
    yield ends
    for end in ends:
        os.close(end)


def logger_of(queue: LogQueue) -> logging.Logger:
    logger = logging.Logger("test")
    logger.addHandler(queue)
    return logger


@pytest.mark.parametrize("blocks", [True, False])
def test_lines_that_are_not_read_are_dropped_and_counted(blocks, pipe, monkeypatch):
    monkeypatch.setattr(log_queue, "FLUSH_S", 0.05)
    reader, writer = pipe
    os.set_blocking(writer, blocks)
    queue = LogQueue(writer, max_lines=100)
    logger = logger_of(queue)
    for i in range(COUNT):
        logger.warning("line %d", i)
    queue.flush()  # does not wait for the reader
    assert 0 < queue.num_dropped < COUNT
    text = b""
    numbers: list[int] = []
    dropped = 0
    while len(numbers) + dropped < COUNT:
        assert select.select([reader], [], [], 60)[0], "a line is lost"
        text += os.read(reader, 4096)
        numbers = [int(number) for number in re.findall(rb"line (\d+)\n", text)]
        dropped = sum(map(int, re.findall(rb"(\d+) lines of the log were dropped", text)))
    assert numbers == sorted(set(numbers))
    assert (len(numbers) + dropped, dropped) == (COUNT, queue.num_dropped)


def test_a_reader_that_has_gone(pipe):
    reader, writer = pipe
    queue = LogQueue(os.dup(writer))
    os.dup2(os.open(os.devnull, os.O_RDONLY), reader)  # closes the only reading end
    logger_of(queue).warning("a")
    eventually(lambda: queue.num_dropped == 1)
    queue.flush()


def test_lines_are_bounded_and_a_wrong_call_is_a_line(pipe):
    reader, writer = pipe
    queue = LogQueue(writer)
    logger = logger_of(queue)
    logger.warning("%d", "a")
    queue.flush()
    assert os.read(reader, 4096) == b"a line of the log could not be made: '%d'\n"
    assert len(queue._line(logging.makeLogRecord({"msg": "x" * 2**20}))) == log_queue.MAX_LINE_BYTES + 1
