"""A share of `python -m tests.support.server_fuzz`: 2,000 malformed requests from many clients."""

from __future__ import annotations

from tests.support.server_fuzz import fuzzed_server, run


def test_malformed_requests_get_their_errors_and_disturb_nothing():
    with fuzzed_server() as served:
        report = run(served, seed=0, numbers=range(2000))
    assert not report.findings, "python -m tests.support.server_fuzz --seed 0 --case NUMBER"
    assert report.count == 2000
    assert report.statuses[200] > 400
    assert report.statuses[400] > 600
    assert {404, 405, 408, 413, 415, 431} <= report.statuses.keys()
