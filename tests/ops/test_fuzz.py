"""The first wrong calls of `python -m tests.ops.fuzz`, in equal shares of the backends."""

import pytest

from tests.ops import fuzz
from tests.support.kernel_cases import on_cpu


@on_cpu
def test_wrong_calls_are_refused():
    reports = fuzz.run_backends(fuzz.BACKENDS, fuzz.CALLS_IN_CI)
    assert not [(name, defect) for name, report in reports.items() for defect in report["defects"]]
    for report in reports.values():
        assert report["refused"] >= fuzz.CALLS_IN_CI // len(reports)
        assert 0 < report["accepted"] < report["refused"] / 4


@pytest.mark.parametrize(
    ("call", "status", "longest_s"),
    [("os.abort()", -6, 60), ("time.sleep(60)", 1, 0.5)],
    ids=str,
)
def test_a_call_that_does_not_return_is_reported(call, status, longest_s, monkeypatch):
    program = f"from tests.ops import fuzz; import os, time; fuzz.outcome_of = lambda *_: {call}"
    monkeypatch.setattr(fuzz, "PROGRAM", ("-c", f"{program}; fuzz.LONGEST_S = {longest_s}; fuzz.main()"))
    report = fuzz.run_backends(("torch",), 1, only=3)["torch"]
    assert report["refused"] == 0
    (defect,) = report["defects"]
    assert defect.startswith(f"3  # ended the process with {status}: ")
