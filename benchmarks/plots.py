"""Pictures of one result of benchmarks.gpu."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks.gpu.report import attention_rows

Rows = list[dict[str, Any]]


def paint(result: dict[str, Any], path: Path) -> Iterator[Path]:
    """Draw every picture that has measurements, as PNG files beside the JSON, and yield their paths."""
    rows = attention_rows(result["sections"])
    pictures = {
        "roofline": (roofline, rows),
        "decode": (bandwidth, [row for row in rows if row["section"] == "decode"]),
        "prefill": (throughput, [row for row in rows if row["section"] == "prefill"]),
        "batches": (
            bars,
            [row for row in rows if row["section"] in ("skewed", "long", "quantized")],
        ),
    }
    note = "" if result["meaningful"] else " (interpreter: times mean nothing)"
    for name, (draw, chosen) in pictures.items():
        if not chosen:
            continue
        figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
        draw(axes, chosen, result["limits"])
        axes.set_title(f"{result['device']['name']}, {result['date'][:10]}{note}")
        axes.grid(alpha=0.3)
        picture = path.with_name(f"{path.stem}-{name}.png")
        figure.savefig(picture, dpi=120)
        pyplot.close(figure)
        yield picture


def roofline(axes: Axes, rows: Rows, limits: dict[str, float]) -> None:
    """Draw FLOP/s over FLOPs per byte, below the two measured ceilings."""
    ridge = limits["flops"] / limits["bytes_per_s"]
    intensities = [row["flops"] / row["bytes"] for row in rows]
    low, high = min([*intensities, ridge]) / 2, max([*intensities, ridge]) * 2
    roof = [low * limits["bytes_per_s"] / 1e12, limits["flops"] / 1e12, limits["flops"] / 1e12]
    axes.plot([low, ridge, high], roof, color="black", label="measured ceilings")
    for section in dict.fromkeys(row["section"] for row in rows):
        points = [row for row in rows if row["section"] == section]
        x = [row["flops"] / row["bytes"] for row in points]
        axes.scatter(x, [row["tflops"] for row in points], label=section, s=18)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte", ylabel="TFLOP/s")
    axes.legend()


def bandwidth(axes: Axes, rows: Rows, limits: dict[str, float]) -> None:
    """Draw the bandwidth of decodes over the context length."""
    for name, points in _lines(rows, "block_size").items():
        speed = [row["bytes"] / us / 1e3 for row, us in points]
        axes.plot([row["context"] for row, _ in points], speed, marker="o", label=name)
    axes.axhline(limits["bytes_per_s"] / 1e9, color="black", label="measured copy")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="context in tokens", ylabel="GB/s", ylim=(0, None))
    axes.legend()


def throughput(axes: Axes, rows: Rows, limits: dict[str, float]) -> None:
    """Draw TFLOP/s of prefills over the prompt length."""
    for name, points in _lines(rows, "head_dim", "block_size").items():
        speed = [row["flops"] / us / 1e6 for row, us in points]
        axes.plot([row["context"] for row, _ in points], speed, marker="o", label=name)
    axes.axhline(limits["flops"] / 1e12, color="black", label="measured matrix product")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="length in tokens", ylabel="TFLOP/s", ylim=(0, None))
    axes.legend(fontsize=7)


def bars(axes: Axes, rows: Rows, limits: dict[str, float]) -> None:  # noqa: ARG001
    """Draw the share of its limit that each batch reaches, for our kernel and the comparators."""
    names = [name for name in ("ours", *rows[0]["comparators"]) if any(name in _times(row) for row in rows)]
    for i, name in enumerate(names):
        measured = [(place, row) for place, row in enumerate(rows) if name in _times(row)]
        places = [place + (i - len(names) / 2) / (len(names) + 1) for place, _ in measured]
        shares = [row["limit_us"] / _times(row)[name] for _, row in measured]
        axes.barh(places, shares, height=1 / (len(names) + 1), label=name)
    axes.set_yticks(range(len(rows)), [row["case"] for row in rows], fontsize=7)
    axes.set(xlabel="of the limit", xlim=(0, None))
    axes.legend()


def _times(row: dict[str, Any]) -> dict[str, float]:
    others = {name: found["us"] for name, found in row["comparators"].items() if "us" in found}
    return {"ours": row["us"], **others}


def _lines(rows: Rows, *keys: str) -> dict[str, list[tuple[dict[str, Any], float]]]:
    """Group measurements by kernel and by these settings, in the order of their contexts."""
    lines: dict[str, list[tuple[dict[str, Any], float]]] = {}
    for row in sorted(rows, key=lambda row: row["context"]):
        for name, us in _times(row).items():
            setting = ", ".join(f"{key.replace('_', ' ')} {row[key]}" for key in keys)
            lines.setdefault(f"{name}, {setting}", []).append((row, us))
    return lines
