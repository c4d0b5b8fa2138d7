"""The fields of a key, a table in docs/serving-operations.md: python -m tests.support.keys_table --write."""

import argparse
from pathlib import Path

from paged.server.access.key_file import KEY_TABLE

PAGE = Path(__file__).parents[2] / "docs" / "serving-operations.md"
BEGIN = "<!-- table: python -m tests.support.keys_table --write -->\n"
END = "<!-- end of table -->\n"


def table() -> str:
    """Return the table."""
    rows = [
        f"| `{field.name}`{' (required)' if field.required else ''} | {field.kind} | {field.meaning} |\n"
        for field in KEY_TABLE.fields
    ]
    return "".join(["| field | value | meaning |\n|---|---|---|\n", *rows])


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
