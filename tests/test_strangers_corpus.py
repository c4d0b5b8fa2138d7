"""A share of `python -m tests.strangers`: damaged checkpoints, watched as they load."""

from __future__ import annotations

import sys

import pytest

from tests.strangers import run

# Files that are read in this process, and those for which most checkpoints start a worker.
DATA = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.gguf",
)
COUNTS = {"data": 240, "text": 15}
TEXT = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@pytest.mark.skipif(sys.platform != "linux", reason="inotify and /proc show what a process does")
@pytest.mark.parametrize(("count", "files"), [(COUNTS["data"], DATA), (COUNTS["text"], TEXT)], ids=COUNTS)
def test_damaged_checkpoints_load_or_are_refused_by_one_line(count, files):
    report = run(range(count), processes=1, only=files)
    assert report.findings == {}, "python -m tests.strangers --seed SEED --files ..."
    assert report.count == count
    refused = report.outcomes["CheckpointError"] + report.outcomes["UnsupportedModelError"]
    assert refused > count / 3
    assert report.outcomes["loads"] > count / 10
