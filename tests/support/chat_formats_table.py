"""The table of chat formats in docs/tool-calls.md: python -m tests.support.chat_formats_table --write."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from paged.chat.formats import CHAT_FORMATS, REASONINGS, CallSyntax, ChatSyntax

PAGE = Path(__file__).parents[2] / "docs" / "tool-calls.md"
BEGIN = "<!-- table: python -m tests.support.chat_formats_table --write -->\n"
END = "<!-- end of table -->\n"


def table() -> str:
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


def main() -> None:
    """Rewrite the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", required=True)
    parser.parse_args()
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{after}")


if __name__ == "__main__":
    main()
