"""Draw docstrings and paragraphs at random, for somebody to read cold: python -m tests.reading --seed 1.

The reader knows PyTorch and serving, but not this code. For each text the verdict is "clear at once" or "read
twice", with the reason. CONTRIBUTING.md has the table of the verdicts.
"""

import argparse
import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCSTRINGS, PARAGRAPHS = 24, 10
DEFINITIONS = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
SHORTEST_PARAGRAPH = 12  # words: shorter ones introduce a table or a command


def docstrings(path: Path) -> Iterator[str]:
    """Yield the public classes, functions and methods of a file that have a docstring, as source text."""
    source = path.read_text()
    lines = source.splitlines()

    def visit(parent: ast.Module | ast.ClassDef) -> Iterator[str]:
        for node in parent.body:
            if not isinstance(node, DEFINITIONS) or node.name.startswith("_"):
                continue
            if ast.get_docstring(node):
                docstring_end = node.body[0].end_lineno
                shown = "\n".join(lines[node.lineno - 1 : docstring_end])
                yield f"{path.relative_to(ROOT)}:{node.lineno}\n{shown}"
            if isinstance(node, ast.ClassDef):
                yield from visit(node)

    yield from visit(ast.parse(source))


def paragraphs(path: Path) -> Iterator[str]:
    """Yield the paragraphs and list items of a Markdown page, without headings, tables, code and HTML."""
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    items = re.sub(r"^(\s*)([-*]|\d+\.) ", r"\n\1\2 ", prose, flags=re.M)
    for paragraph in re.split(r"\n\s*\n", items):
        text = paragraph.strip()
        if not text.startswith(("|", "#", "<", "![")) and len(text.split()) >= SHORTEST_PARAGRAPH:
            yield f"{path.relative_to(ROOT)}\n{text}"


def draw(seed: int) -> tuple[list[str], list[str]]:
    """Return the docstrings and the paragraphs drawn by the seed."""
    sources = [path for room in ("paged", "kernels") for path in sorted((ROOT / room).rglob("*.py"))]
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    all_docstrings = [text for path in sources for text in docstrings(path)]
    all_paragraphs = [text for page in pages for text in paragraphs(page)]
    chosen = random.Random(seed)
    return chosen.sample(all_docstrings, DOCSTRINGS), chosen.sample(all_paragraphs, PARAGRAPHS)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw docstrings and paragraphs at random.")
    parser.add_argument("--seed", type=int, required=True)
    for drawn in draw(parser.parse_args().seed):
        for number, text in enumerate(drawn, 1):
            print(f"{number}. {text}\n")


if __name__ == "__main__":
    main()
