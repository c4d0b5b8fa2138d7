"""The table of weight formats in kernels/cpu/README.md.

python -m tests.support.cpu_table --write    # rewrite it
"""

import argparse
from pathlib import Path

from paged.kernels.cpu.compiled.products.kinds import READERS
from paged.kernels.cpu.formats import FORMATS, PANEL, UNPACKED

README = Path(__file__).parents[2] / "kernels" / "cpu" / "README.md"
_START, _END = "<!-- formats: python -m tests.support.cpu_table --write -->\n", "<!-- end of formats -->"


def table() -> str:
    """Return the table, which is the same on every CPU."""
    lines = [
        "| format | bits a weight | needs | in registers | unpacked to, for large batches | use |",
        "|---|---:|---|---|---|---|",
    ]
    for kind, row in FORMATS.items():
        reader = READERS[kind]
        inputs = 1 + reader.in_pairs
        # Without tables and factors of groups.
        bits = int(8 * row.step_bytes / (PANEL * inputs))
        registers = "pairs of bfloat16" if reader.in_pairs else "float32"
        unpacked = FORMATS[UNPACKED[kind]].name if UNPACKED[kind] != kind else ""
        needs = " and ".join(f"({n})" if " or " in n and len(row.needs) > 1 else n for n in row.needs)
        lines.append(f"| {row.name} | {bits} | {needs} | {registers} | {unpacked} | {row.use} |")
    return "".join(f"{line}\n" for line in lines)


def written() -> str:
    """Return the table that the README has."""
    return README.read_text().split(_START)[1].split(_END)[0]


def write() -> None:
    """Put the table into the README."""
    text = README.read_text()
    README.write_text(text.replace(_START + written() + _END, _START + table() + _END))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        write()
    else:
        print(table(), end="")
