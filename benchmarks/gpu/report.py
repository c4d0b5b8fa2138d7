"""Tables of the results of benchmarks.gpu, on the terminal and as Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.comparator_names import NAMES

HEADER = """# What was measured on GPUs

Made by `python -m benchmarks.gpu` from the JSON in {results}; `--report` rewrites this page. The limit of a
kernel is the larger of its bytes over the copy bandwidth and its FLOPs over the matrix throughput of the same
run. The columns of comparators are their time over ours: above 1 ours is faster. A * marks a comparator that
could not be captured in a CUDA graph, as ours was, and includes host time.
"""


def write_report(results: Path) -> Path:
    """Write README.md beside a folder named results, or into a folder of another name. Return its path."""
    page = (results.parent if results.name == "results" else results) / "README.md"
    found = [json.loads(path.read_text()) | {"path": path} for path in sorted(results.glob("*.json"))]
    parts = [HEADER.format(results=f"`{results.name}/`")]
    parts += [report_of(result, page.parent) for result in found]
    if not found:
        parts.append("Nothing has been measured yet.\n")
    page.write_text("\n".join(parts))
    return page


def report_of(result: dict[str, Any], beside: Path) -> str:
    """Return one result as Markdown."""
    device = result["device"]
    sections = result["sections"]
    lines = [f"## {device['name']}, {result['date'][:10]}\n"]
    if not result["meaningful"]:
        lines.append("**In Triton's interpreter: the times mean nothing.**\n")
    lines.append(
        f"Commit {result['commit']}, torch {device['torch']}, Triton {device['triton']}, CUDA or ROCm "
        f"{device['cuda']}; {result['seconds']:.0f} s in all.\n"
    )
    if result["limits"]:
        limits = result["limits"]
        gb_per_s, tflops = limits["bytes_per_s"] / 1e9, limits["flops"] / 1e12
        lines.append(f"Ceilings: {gb_per_s:,.0f} GB/s copied, {tflops:,.0f} TFLOP/s.\n")
    for row in sections.get("tests", {"rows": []})["rows"]:
        lines.append(
            f"{row['case'].capitalize()}: {row['passed']} passed, {row['failed'] + row['error']} failed,"
            f" {row['skipped']} skipped, {row['unfinished']} not finished in their share of the time.\n"
        )
    for row in sections.get("engine", {"rows": []})["rows"]:
        told = row.get("skipped") or (
            f"{row['tokens_per_s']:,.0f} output tokens/s in {row['seconds']:.1f} s, {row['steps']:,} steps; "
            f"{row['graphs']} CUDA graphs took {row['graph_mib']:,.0f} MiB and {row['graph_s']:.1f} s"
        )
        lines.append(f"{row['case'].capitalize()}: {told}.\n")
    lines += [f"Failed: {name}.\n" for name, section in sections.items() if section["error"]]
    lines += [attention_table(sections), layer_table(sections), coded_table(sections)]
    lines += [experts_table(sections), skipped_list(sections)]
    for picture in sorted(result["path"].parent.glob(f"{result['path'].stem}-*.png")):
        lines.append(f"![{picture.stem}]({picture.relative_to(beside).as_posix()})")
    return "\n".join(line for line in lines if line) + "\n"


def attention_rows(sections: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the measured batches of all attention sections."""
    return [row for section in sections.values() for row in section["rows"] if "comparators" in row]


def attention_table(sections: dict[str, Any]) -> str:
    """Return the table of our kernel, with a column for each comparator that ran."""
    rows = attention_rows(sections)
    columns = [name for name in NAMES if any("us" in row["comparators"].get(name, {}) for row in rows)]
    head = ["attention", "µs", "GB/s", "TFLOP/s", "of limit", *(f"{name} ÷ ours" for name in columns)]
    cells = []
    for row in rows:
        cells.append([*_measured(row), *(_ratio(row, row["comparators"].get(name, {})) for name in columns)])
    return _markdown(head, cells)


def layer_table(sections: dict[str, Any]) -> str:
    """Return the table of the kernels around attention."""
    return _markdown(
        ["kernel", "µs", "GB/s", "TFLOP/s", "of limit"], list(map(_measured, _timed(sections, "layers")))
    )


def coded_table(sections: dict[str, Any]) -> str:
    """Return the table of products with weights in codes, beside torch's of the same weights in floats."""
    head = ["weights in codes", "µs", "GB/s", "TFLOP/s", "of limit", "torch.matmul of floats ÷ ours"]
    rows = _timed(sections, "coded_linear")
    return _markdown(head, [[*_measured(row), _ratio(row, row["floats"])] for row in rows])


def experts_table(sections: dict[str, Any]) -> str:
    """Return the table of mixtures of experts, beside what torch has for the same weights in floats."""
    head = [
        "experts",
        "µs",
        "GB/s",
        "TFLOP/s",
        "of limit",
        "a loop of torch.matmul ÷ ours",
        "_grouped_mm ÷ ours",
    ]
    cells = []
    for row in _timed(sections, "experts"):
        others = row.get("others", {})
        cells.append(
            [*_measured(row), *(_ratio(row, others.get(name, {})) for name in ("loop", "grouped_mm"))]
        )
    return _markdown(head, cells)


def skipped_list(sections: dict[str, Any]) -> str:
    """List what was not measured, by reason."""
    reasons: dict[str, list[str]] = {}
    for section in sections.values():
        for row in section["rows"]:
            if isinstance(row.get("skipped"), str):
                reasons.setdefault(f"{row['case']}: {row['skipped']}", [])
            for name, comparator in (row.get("comparators", {}) | row.get("others", {})).items():
                if "skipped" in comparator:
                    reasons.setdefault(f"{name}: {comparator['skipped']}", []).append(row["case"])
    lines = [
        f"- {reason}" + (f" ({len(cases)} batches)" if cases else "") for reason, cases in reasons.items()
    ]
    return "\n".join(["Not measured:\n", *lines, ""]) if lines else ""


def print_summary(result: dict[str, Any]) -> None:
    """Print the table, and last a JSON line."""
    from benchmarks.common import print_json, print_table

    sections = result["sections"]
    shown = attention_rows(sections)
    for name in ("layers", "coded_linear", "experts"):
        shown += _timed(sections, name)
    rows = []
    for row in shown:
        theirs_of = row.get("comparators") or row.get("others") or {}
        if "floats" in row:
            theirs_of = {"torch.matmul": row["floats"]}
        others = {name: _ratio(row, theirs) for name, theirs in theirs_of.items()}
        told = ", ".join(f"{name} {ratio}" for name, ratio in others.items() if ratio)
        rows.append(dict(zip(("kernel", "us", "GB/s", "TFLOP/s", "of limit"), _measured(row), strict=True)))
        rows[-1]["their time / ours"] = told
    if rows:
        print_table(rows)
    for name, section in sections.items():
        if section["error"]:
            print(f"FAILED {name}: {section['error'].strip().splitlines()[-1]}")
    if not result["meaningful"]:
        print("in Triton's interpreter: the times mean nothing")
    print_json(
        {
            "benchmark": "gpu",
            "device": result["device"]["name"],
            "meaningful": result["meaningful"],
            "seconds": result["seconds"],
            "limits": result["limits"],
            "tests": {row["case"]: row["ran"] for row in sections.get("tests", {"rows": []})["rows"]},
            "tokens_per_s": {
                row["case"]: round(row["tokens_per_s"])
                for row in sections.get("engine", {"rows": []})["rows"]
                if "tokens_per_s" in row
            },
            "errors": [name for name, section in sections.items() if section["error"]],
            "of_limit": {row["case"]: round(row["of_limit"], 3) for row in shown},
        }
    )


def _timed(sections: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [row for row in sections.get(name, {"rows": []})["rows"] if "us" in row]


def _measured(row: dict[str, Any]) -> list[str]:
    return [
        row["case"],
        f"{row['us']:,.1f}",
        f"{row['gb_per_s']:,.0f}",
        f"{row['tflops']:,.1f}",
        f"{row['of_limit']:.0%}",
    ]


def _ratio(row: dict[str, Any], theirs: dict[str, Any]) -> str:
    if "us" not in theirs:
        return ""
    return f"{theirs['theirs_over_ours']:.2f}{'*' if row['graph'] and not theirs['graph'] else ''}"


def _markdown(head: list[str], cells: list[list[str]]) -> str:
    if not cells:
        return ""
    rule = "|---|" + "---:|" * (len(head) - 1)
    return "\n".join([f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(row)} |" for row in cells)]) + "\n"
