"""A stream equals the whole answer, for random requests of all parameters, over HTTP from an engine pr."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import random_agents
from tests.support.random_requests import check_all
from tests.support.served import Served
from tests.support.small_server import small_server

NUM_REQUESTS = 60  # python -m tests.support.random_requests sends 500
NUM_OF_AGENTS = 36  # python -m tests.support.random_agents sends 300


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with small_server() as served:
        yield served


def test_a_stream_equals_the_whole_answer(served):
    assert check_all(served, NUM_REQUESTS, seed=0) > 0.9 * NUM_REQUESTS


def test_the_events_of_agents_make_the_whole_answers(served):
    random_agents.check_all(served, NUM_OF_AGENTS, seed=0)
