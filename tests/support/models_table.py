"""The table of native architectures in docs/features.md.

python -m tests.support.models_table --write    # rewrite it
"""

import re
import sys
from pathlib import Path

from paged.architectures.families.multimodal import NATIVE

PAGE = Path(__file__).parents[2] / "docs" / "features.md"
SECTION = re.compile(r"(?<=<!-- models -->\n).*?(?=<!-- end of models -->)", re.DOTALL)


def table() -> str:
    """Return the table in Markdown."""
    rows = [f"| {known.models} | `{name}` |\n" for name, known in NATIVE.items()]
    return "".join(["| models | architecture |\n", "|---|---|\n", *rows])


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    new = SECTION.sub(lambda _: table(), text)
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(new, encoding="utf-8")
    sys.exit(new != text)
