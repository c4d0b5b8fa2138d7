"""The figures of benchmarks.peers that the documentation shows, as data and as Markdown tables.

measured.json is written by hand from the last line of benchmarks.peers. `python -m benchmarks.pictures` makes
of it the tables in docs/figures.md and the bars in docs/pictures/peers.svg.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
BEGIN, END = "<!-- begin: python -m benchmarks.pictures -->", "<!-- end -->"

Workload = dict[str, Any]  # "name", "cpu", "command", "note", and "rows": one for each system and batch


def load() -> list[Workload]:
    """Read all workloads, in the order of the page."""
    workloads: list[Workload] = json.loads(FILE.read_text(encoding="utf-8"))
    return workloads


def fill(page: str) -> str:
    """Return a page with the text between its two markers replaced by the tables."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


def tables() -> str:
    """Return a section for each workload: its command, its table and its note."""
    return "\n".join(
        f"### {workload['name']}, {workload['cpu']}\n\n    {_folded(workload['command'])}\n\n"
        f"{_table(workload['rows'])}\n" + (f"\n{workload['note']}\n" if workload["note"] else "")
        for workload in load()
    )


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| requests | system | tokens/s | paged is faster by | first token, s | peak MiB | of limit |",
        "|---:|---|---:|---|---:|---:|---:|",
    ]
    previous = None
    for row in rows:
        cells = [
            "" if row["requests"] == previous else str(row["requests"]),
            "**paged**" if row["system"] == "paged" else row["system"],
            _number(row.get("tokens_per_s")),
            _ratio(row),
            _number(row.get("first_token_s")),
            _number(row.get("peak_mib")),
            f"{row['of_limit']:.2f}" if "of_limit" in row else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
        previous = row["requests"]
    return "\n".join(lines)


def _ratio(row: dict[str, Any]) -> str:
    if "ratio" not in row:
        return ""
    low_high = " ({:.2f} to {:.2f})".format(*row["range"]) if "range" in row else ""
    return f"{row['ratio']:.2f}{low_high}"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _folded(command: str) -> str:
    return command.replace(" --ways", " \\\n        --ways")
