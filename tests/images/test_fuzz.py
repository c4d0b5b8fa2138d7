"""A share of `python -m tests.images_fuzz`; that of the bodies is in tests/server/test_images.py."""

from __future__ import annotations

import sys

import pytest

from tests.images_fuzz import run_images

COUNT = 150


@pytest.mark.skipif(sys.platform != "linux", reason="/proc shows the memory of a process")
def test_damaged_images_are_one_error_each():
    report = run_images(range(COUNT))
    assert report.findings == {}, "python -m tests.images_fuzz --seed SEED"
    assert report.count == COUNT
    assert {"an image", "is a damaged", "is no image", "more than"} <= report.outcomes.keys()
    assert 0 < report.largest < 2**30
