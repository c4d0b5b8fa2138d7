"""The committed pictures and tables are what their command makes."""

import re
from pathlib import Path

import pytest

from benchmarks.peers import measured

DOCS = Path(__file__).parents[2] / "docs"


def version_of(svg: str) -> str:
    return re.search(r"Matplotlib v([\w.]+)", svg)[1]


def texts_of(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)", svg)


def test_pictures_are_fresh(tmp_path):
    """Bytes are compared where matplotlib is the version that wrote them, else every text and number."""
    pytest.importorskip("matplotlib")
    from benchmarks.pictures import write

    written = write(tmp_path)
    assert {path.name for path in written} == {path.name for path in (DOCS / "pictures").glob("*.svg")}
    for path in written:
        got, committed = path.read_text(), (DOCS / "pictures" / path.name).read_text()
        assert texts_of(got) == texts_of(committed), "run python -m benchmarks.pictures"
        if version_of(got) == version_of(committed):
            assert got == committed, "run python -m benchmarks.pictures"


def test_tables_are_fresh():
    page = (DOCS / "figures.md").read_text(encoding="utf-8")
    assert measured.fill(page) == page, "run python -m benchmarks.pictures"


def test_ratios_follow_from_their_ranges():
    for workload in measured.load():
        for row in workload["rows"]:
            assert ("ratio" in row) is (row["system"] != "paged")
            low, high = row.get("range", (0, 100))
            assert low <= row.get("ratio", low) <= high
