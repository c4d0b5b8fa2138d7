"""Draw the pictures of the documentation, and write the tables of other engines into docs/figures.md.

    python -m benchmarks.pictures

Nothing is measured: the figures are those of benchmarks/peers/measured.json. The same version of matplotlib
writes the same bytes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from benchmarks.common import parse_args
from benchmarks.peers import measured

DOCS = Path(__file__).parents[1] / "docs"
# Text stays text; where a reader's machine lacks DejaVu Sans, others take less room.
STYLE = {"svg.hashsalt": "paged", "svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif"}
COLOURS = {"shared": "#cfd8dc", "A": "#ffcc80", "B": "#a5d6a7", "C": "#90caf9", "": "#ffffff"}
BLOCK_SIZE = 4


def main() -> None:
    """Write every picture and the tables; with --rehearse into a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    with tempfile.TemporaryDirectory() as folder:
        docs = Path(folder) if parse_args(parser).rehearse else DOCS
        (docs / "pictures").mkdir(exist_ok=True)
        for path in write(docs / "pictures"):
            print(f"wrote {path}")
        tables = measured.fill((DOCS / "figures.md").read_text(encoding="utf-8"))
        (docs / "figures.md").write_text(tables, encoding="utf-8")
        print(f"wrote {docs / 'figures.md'}")


def write(folder: Path) -> list[Path]:
    """Write every picture as SVG into a folder, and return their paths."""
    pictures: dict[str, Callable[[], Figure]] = {"blocks": blocks, "step": step, "peers": peers}
    paths = []
    for name, draw in pictures.items():
        path = folder / f"{name}.svg"
        with matplotlib.rc_context(STYLE):
            figure = draw()
            figure.savefig(path, metadata={"Date": None})
            pyplot.close(figure)
        paths.append(path)
    return paths


def blocks() -> Figure:
    """Draw three sequences that share a prefix of two blocks: their tokens, and the pool that holds them."""
    figure, axes = _canvas(9.2, 4.6)
    tables = {"A": [3, 7, 1], "B": [3, 7, 5, 2], "C": [3, 7, 9]}
    lengths = {"A": 11, "B": 14, "C": 10}
    num_shared = 2
    _note(axes, 0, 8.75, "Three sequences, and the block table of each", weight="bold")
    for i, (name, table) in enumerate(tables.items()):
        y = 7.1 - 1.3 * i
        _note(axes, 0, y + 0.3, f"sequence {name}")
        for position in range(len(table) * BLOCK_SIZE):
            owner = "shared" if position < num_shared * BLOCK_SIZE else name
            label = f"{'p' if owner == 'shared' else name.lower()}{position}"
            if position >= lengths[name]:
                owner = label = ""
            _cell(axes, 2.6 + position + 0.3 * (position // BLOCK_SIZE), y, label, owner)
        for place, block in enumerate(table):
            _note(axes, 2.6 + 4.3 * place + 2, y + 0.8, f"block {block}", ha="center", size=7)
        _note(axes, 20.6, y + 0.3, f"table {table}")
    _note(axes, 0, 3.35, "The pool: the two blocks of the prefix are stored once", weight="bold")
    held: dict[int, tuple[str, list[str]]] = {}
    for name, table in tables.items():
        for place, block in enumerate(table):
            owner = "shared" if place < num_shared else name
            prefix = "p" if owner == "shared" else name.lower()
            last = min(lengths[name], (place + 1) * BLOCK_SIZE)
            held[block] = owner, [f"{prefix}{t}" for t in range(place * BLOCK_SIZE, last)]
    for block in range(10):
        x, y = 5.1 * (block % 5), 2.0 - 1.75 * (block // 5)
        owner, labels = held.get(block, ("", []))
        for slot in range(BLOCK_SIZE):
            _cell(axes, x + slot, y, labels[slot] if slot < len(labels) else "", owner)
        users = {"shared": "held by A, B and C", "": "free"}.get(owner, f"held by {owner}")
        _note(axes, x + 2, y + 0.8, f"block {block}: {users}", ha="center", size=7)
    axes.set(xlim=(-0.2, 25.4), ylim=(-0.1, 9.2))
    return figure


def step() -> Figure:
    """Draw one step: a prompt of 5 tokens, a decode, and a chunk of 4 tokens of a long prompt."""
    figure, axes = _canvas(9.2, 4.9)
    new = {"A": range(5), "B": range(9, 10), "C": range(8, 12)}
    tables = {"A": [7, 2], "B": [0, 4, 5], "C": [1, 9, 3]}
    told = {
        "A": "a prompt of 5 tokens, all of it:\nits next token is sampled",
        "B": "decodes: one new token,\nits next token is sampled",
        "C": "4 of the tokens of a long prompt:\nnothing is sampled yet",
    }
    _note(axes, 0, 10.0, "One batch: the new tokens of all requests, end to end", weight="bold")
    _note(axes, 0, 8.75, "token_ids")
    x = 4.0
    starts = [0]
    for name, positions in new.items():
        for position in positions:
            _cell(axes, x, 8.5, f"{name.lower()}{position}", name)
            x += 1
        starts.append(starts[-1] + len(positions))
    _note(axes, 0, 7.55, "cu_seqlens_q")
    for start in starts:
        axes.plot([4 + start, 4 + start], [7.95, 8.45], color="black", linewidth=0.8)
        _note(axes, 4 + start, 7.55, str(start), ha="center")
    _note(axes, 14.6, 8.75, "10 rows through every linear layer, without padding")
    _note(axes, 0, 6.2, "Attention: each new token reads what its own blocks hold up to it", weight="bold")
    for i, (name, positions) in enumerate(new.items()):
        y = 4.5 - 1.9 * i
        _note(axes, 0, y + 0.3, f"{name}, seq_len {positions.stop}")
        for position in range(BLOCK_SIZE * len(tables[name])):
            at = 4 + position + 0.3 * (position // BLOCK_SIZE)
            is_new = position in positions
            exists = position < positions.stop
            label = f"{name.lower()}{position}" if exists else ""
            _cell(axes, at, y, label, name if is_new else "shared" if exists else "")
        for place, block in enumerate(tables[name]):
            _note(axes, 4 + 4.3 * place + 2, y + 0.85, f"block {block}", ha="center", size=7)
        _note(axes, 17.4, y + 0.35, told[name])
    for at, owner, label in (
        (4, "shared", "in the KV cache"),
        (10, "A", "new in this step, in the colour of its request"),
    ):
        _cell(axes, at, -0.75, "", owner)
        _note(axes, at + 1.3, -0.45, label)
    axes.set(xlim=(-0.2, 26.6), ylim=(-0.9, 10.4))
    return figure


def peers() -> Figure:
    """Draw the ratio of this engine's tokens/s to that of each other one, a field for each workload."""
    workloads = measured.load()
    rows = -(-len(workloads) // 2)
    figure, fields = pyplot.subplots(rows, 2, figsize=(9.2, 2.5 * rows), layout="constrained")
    systems = [*dict.fromkeys(row["system"] for workload in workloads for row in workload["rows"])]
    systems.remove("paged")
    for axes, workload in zip(fields.flat, workloads, strict=True):
        found = [row for row in workload["rows"] if "ratio" in row]
        batches = sorted({row["requests"] for row in found})
        present = [system for system in systems if any(row["system"] == system for row in found)]
        width = min(0.25, 0.88 / len(present))
        for i, system in enumerate(present):
            points = [row for row in found if row["system"] == system]
            x = [batches.index(row["requests"]) + (i - (len(present) - 1) / 2) * width for row in points]
            ratios = [row["ratio"] for row in points]
            drawn = axes.bar(x, ratios, width * 0.92, color=f"C{systems.index(system)}", label=system)
            axes.bar_label(drawn, fmt="%.2f", fontsize=5.5)
        axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
        axes.set_title(f"{workload['name']}, {workload['cpu']}", fontsize=9)
        axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
        axes.set_ylim(0, 1.15 * max(row["ratio"] for row in found))
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("requests at once", fontsize=9)
    figure.supylabel("tokens/s of paged / tokens/s of the other engine", fontsize=9)
    handles, labels = fields[0][0].get_legend_handles_labels()  # the field with every system
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    return figure


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    axes.set_axis_off()
    return figure, axes


def _cell(axes: Axes, x: float, y: float, label: str, owner: str) -> None:
    """Draw one token's place, one unit wide."""
    axes.add_patch(Rectangle((x, y), 1, 0.6, facecolor=COLOURS[owner], edgecolor="#455a64", linewidth=0.8))
    axes.text(x + 0.5, y + 0.28, label, ha="center", va="center", fontsize=7)


def _note(axes: Axes, x: float, y: float, text: str, size: float = 9, **style: Any) -> None:
    axes.text(x, y, text, va="center", fontsize=size, **style)


if __name__ == "__main__":
    main()
