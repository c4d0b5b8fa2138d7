"""Shares of `python -m tests.support.server_fuzz` and `server_schemathesis`: malformed requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support import server_schemathesis
from tests.support.served import PATIENCE_S
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


def test_schemathesis_finds_nothing(server, monkeypatch):
    # It takes a connection that a busy machine lets idle too long for a fault of the server.
    monkeypatch.setattr(server.server._context, "head_s", PATIENCE_S)
    monkeypatch.setattr(server.front, "options", replace(server.front.options, body_timeout_s=PATIENCE_S))
    # Thousands of bodies: the ones above try these routes, or others with the same fields.
    excluded = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]
    excluded += ["/generate", "/v1/messages/count_tokens"]
    ended = server_schemathesis.run(server.url, examples=5, seed=0, excluded=excluded)
    assert ended.returncode == 0, ended.stdout
    assert "No issues found" in ended.stdout
