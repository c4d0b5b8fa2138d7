"""The generated tables of the documentation.

python -m tests.tables            # name the pages with other tables than the code has, and exit with 1
python -m tests.tables --write    # rewrite them
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from paged.architectures.families.multimodal import NATIVE
from paged.chat.formats import CHAT_FORMATS, REASONINGS, CallSyntax, ChatSyntax
from paged.kernels.cpu.compiled.products.kinds import READERS
from paged.kernels.cpu.formats import FORMATS, PANEL, UNPACKED
from paged.server.access.key_file import KEY_TABLE
from paged.server.telemetry.families import METRIC_FAMILIES
from tests.support import from_vllm

ROOT = Path(__file__).parents[1]
BEGIN = "<!-- table: python -m tests.tables --write -->\n"
END = "<!-- end of table -->\n"


def models() -> str:
    """Return the native architectures."""
    rows = [f"| {known.models} | `{name}` |\n" for name, known in NATIVE.items()]
    return "".join(["| models | architecture |\n", "|---|---|\n", *rows])


def metrics() -> str:
    """Return the server's metrics."""
    rows = ["| metric | type | labels | meaning |\n", "|---|---|---|---|\n"]
    for family in METRIC_FAMILIES:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        suffix = "_total" if family.kind == "counter" else ""
        rows.append(f"| `paged:{family.name}{suffix}` | {family.kind} | {labels} | {family.meaning} |\n")
    return "".join(rows)


def keys() -> str:
    """Return the fields of a key."""
    rows = [
        f"| `{field.name}`{' (required)' if field.required else ''} | {field.kind} | {field.meaning} |\n"
        for field in KEY_TABLE.fields
    ]
    return "".join(["| field | value | meaning |\n|---|---|---|\n", *rows])


def weight_formats() -> str:
    """Return the weight formats of the CPU kernels, the same on every CPU."""
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


def chat_formats() -> str:
    """Return the tables of calls and of reasoning."""
    rows = [
        f"| {_names(entry)} | {entry.families} | {_code(_written(syntax))} | {syntax.arguments} |\n"
        for entry in CHAT_FORMATS
        for syntax in _distinct(entry)
    ]
    reasons = [
        f"| `{entry.name}` | {_code(entry.begins[0] + ' … ' + entry.ends[0])} | {_users(entry.name)} |\n"
        for entry in REASONINGS
    ]
    head = "| name (aliases) | families | calls | arguments |\n|---|---|---|---|\n"
    return "".join([head, *rows, "\n| reasoning | marks | formats |\n|---|---|---|\n", *reasons])


def _names(entry: ChatSyntax) -> str:
    aliases = f" ({', '.join(f'`{name}`' for name in entry.aliases)})" if entry.aliases else ""
    return f"`{entry.name}`{aliases}"


def _distinct(entry: ChatSyntax) -> Sequence[CallSyntax]:
    """Return the ways in which a format writes calls; those that differ in blanks alone are one."""
    found = {"".join(_written(syntax).split()): syntax for _, syntax in reversed(entry.variants)}
    return [*found.values()][::-1]


def _written(syntax: CallSyntax) -> str:
    before, after = syntax.section
    arguments = "{…}" if syntax.arguments in ("json", "gemma") else "…"
    call = syntax.written("NAME", arguments)
    if syntax.parameter:
        element = syntax.parameter.replace("$key", "KEY").replace("$value", "VALUE")
        call = syntax.written("NAME", f"{element}…")
    return f"{before}{call}{after}"


def _users(reasoning: str) -> str:
    return ", ".join(f"`{entry.name}`" for entry in CHAT_FORMATS if reasoning in entry.reasoning)


def _code(text: str) -> str:
    escaped = text.replace("|", "\\|").replace("\n", "↵")
    return f"`` {escaped} ``" if "`" in text else f"`{escaped}`"


TABLES: dict[str, Callable[[], str]] = {
    "docs/features.md": models,
    "docs/serving-metrics.md": metrics,
    "docs/serving-operations.md": keys,
    "docs/tool-calls.md": chat_formats,
    "docs/vllm-names.md": from_vllm.tables,
    "kernels/cpu/README.md": weight_formats,
}


def with_table(page: str) -> str:
    """Return the text of a page, with its table as the code has it."""
    before, _, rest = (ROOT / page).read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{TABLES[page]()}{END}{after}"


def main() -> None:
    """Check or rewrite the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true")
    writes = parser.parse_args().write
    stale = {page: text for page in TABLES if (text := with_table(page)) != (ROOT / page).read_text()}
    for page, text in stale.items():
        print(f"{'wrote' if writes else 'stale:'} {page}")
        if writes:
            (ROOT / page).write_text(text, encoding="utf-8")
    sys.exit(bool(stale) and not writes)


if __name__ == "__main__":
    main()
