"""The table of docs/serving-metrics.md: python -m tests.support.metrics_table --write"""

import re
import sys
from pathlib import Path

from paged.server.telemetry.families import METRIC_FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "serving-metrics.md"


def table() -> str:
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for family in METRIC_FAMILIES:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        suffix = "_total" if family.kind == "counter" else ""
        rows.append(f"| `paged:{family.name}{suffix}` | {family.kind} | {labels} | {family.meaning} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(
            re.sub(r"\| metric \|.*?\n(?!\|)", table() + "\n", PAGE.read_text() + "\n", flags=re.DOTALL)
        )
    print(table(), end="")
