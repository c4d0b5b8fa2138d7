"""A picture of benchmarks.peers: generated tokens/s over the batch, a line for each way."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from benchmarks.peers.report import Row

_EIGHT, _FOUR = "-.", ":"
_STYLES = {
    "bfloat16": "-",
    "float32": "--",
    "int8": _EIGHT,
    "Q8_0": _EIGHT,
    "int4": _FOUR,
    "Q4_0": _FOUR,
    "Q4_K_M": _FOUR,
}


def paint(rows: list[Row], path: Path) -> None:
    """Draw a panel for each shape, with a colour for each system and a line style for each precision."""
    shapes = [*dict.fromkeys(row["shape"] for row in rows)]
    figure, fields = pyplot.subplots(
        1, len(shapes), figsize=(7 * len(shapes), 5), layout="constrained", squeeze=False
    )
    ways = [*dict.fromkeys(row["way"] for row in rows)]
    systems = [*dict.fromkeys(way.rsplit("-", 1)[0] for way in ways)]
    for shape, axes in zip(shapes, fields[0], strict=True):
        for way in ways:
            system, dtype = way.rsplit("-", 1)
            points = [(r["batch"], r["tokens/s"]) for r in rows if (r["shape"], r["way"]) == (shape, way)]
            axes.plot(
                *zip(*points, strict=True) if points else ([], []),
                _STYLES[dtype],
                color=f"C{systems.index(system)}",
                linewidth=2.5 if system == "paged" else 1.2,
                marker=".",
                label=way,
            )
        axes.set(title=shape, xlabel="requests at once", ylabel="generated tokens/s", yscale="log")
        batches = sorted({row["batch"] for row in rows if row["shape"] == shape})
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.grid(alpha=0.3)
    fields[0][-1].legend(fontsize=7)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
