"""A share of the random conversations with images: `python -m tests.conversations`."""

from __future__ import annotations

from tests.conversations import run_worlds


def test_answers_are_those_of_questions_alone():
    report = run_worlds([7, 10, 12], 12)  # which find images that are not told apart
    assert report.findings == {}, "python -m tests.conversations --seed SEED"
    assert report.counts["cached tokens"] > 50
