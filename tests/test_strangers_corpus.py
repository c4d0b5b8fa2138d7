"""A share of `python -m tests.strangers`: 2,000 damaged checkpoints, watched as they load."""

from __future__ import annotations

import sys

import pytest

from tests.strangers import run

COUNT = 2000
# The files that are read without the tokenizers library.
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
)


@pytest.mark.skipif(sys.platform != "linux", reason="inotify and /proc show what a process does")
def test_damaged_checkpoints_load_or_are_refused_by_one_line():
    report = run(range(COUNT), processes=2, only=FILES)
    assert report.findings == {}, "python -m tests.strangers --seed SEED --files ..."
    assert report.count == COUNT
    refused = report.outcomes["CheckpointError"] + report.outcomes["UnsupportedModelError"]
    assert refused > COUNT / 3
    assert report.outcomes["loads"] > COUNT / 10
