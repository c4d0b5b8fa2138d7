"""Shares of `python -m tests.support.server_fuzz` and `server_schemathesis`: malformed requests."""

from __future__ import annotations

import pytest

from tests.support import server_schemathesis
from tests.support.server_fuzz import COUNT_IN_CI, fuzzed_server, run


@pytest.fixture(scope="module")
def server():
    with fuzzed_server() as served:
        yield served


def test_malformed_requests_get_their_errors_and_disturb_nothing(server):
    report = run(server, seed=0, numbers=range(COUNT_IN_CI))
    assert not report.findings, "python -m tests.support.server_fuzz --seed 0 --case NUMBER"
    assert report.count == COUNT_IN_CI
    assert report.statuses[200] > 200
    assert report.statuses[400] > 300
    assert {404, 405, 408, 413, 415, 431} <= report.statuses.keys()


def test_schemathesis_finds_nothing(server):
    # Thousands of bodies: the ones above try these routes, or others with the same fields.
    excluded = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]
    excluded += ["/generate", "/v1/messages/count_tokens"]
    ended = server_schemathesis.run(server.url, examples=5, seed=0, excluded=excluded)
    assert ended.returncode == 0, ended.stdout
    assert "No issues found" in ended.stdout
