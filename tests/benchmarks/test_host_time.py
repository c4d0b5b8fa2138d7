"""benchmarks.host_time: it runs without a GPU, and its last line is what it measured."""

import json

from tests.aot import run_compiler


def test_it_measures_every_part_of_a_step():
    options = ["--num-requests", "1", "3", "1024", "--context", "20", "--steps", "5"]
    *lines, last = run_compiler("benchmarks.host_time", *options).splitlines()
    rows = json.loads(last)["rows"]
    assert [(row["requests"], row["by"]) for row in rows] == [
        (number, by) for number in (1, 3, 1024) for by in ("launches", "replay")
    ]
    for row in rows[::2]:
        assert min(row[part] for part in ("schedule", "upload", "launch", "update")) > 0
        assert 28 * 5 < row["launches"] <= 28 * 10 + 12, "of 28 layers, and of the others"
    assert "driver" in lines[-1], "what is not in it"
