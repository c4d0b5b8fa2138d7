"""Weights are read into memory while torch is imported."""

import os
from pathlib import Path

import pytest

from paged.commands import common


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no advice on files")
def test_local_weights_are_read_ahead_if_they_fit(tmp_path, monkeypatch):
    advised = []

    def note(descriptor, start, length, advice):
        advised.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, start, length, advice))

    monkeypatch.setattr(os, "posix_fadvise", note)
    for name in ("a.safetensors", "b.gguf", "config.json"):
        (tmp_path / name).write_bytes(bytes(100))
    for model in (tmp_path, tmp_path / "b.gguf", "owner/name", "\0"):
        common.read_ahead(str(model))
    wanted = os.POSIX_FADV_WILLNEED
    assert advised == [("a.safetensors", 0, 0, wanted), ("b.gguf", 0, 0, wanted)]
    monkeypatch.setattr(common, "_free_bytes", lambda: 199)
    common.read_ahead(str(tmp_path))
    assert len(advised) == 2
