"""Bugs with names: lists of them in `tests/support/bugs/`, found in the product by syntax, planted on import.

A list has a line for each bug, under the file that it changes, whose path may be shortened in front:

    [blocks/pool.py]
    part: name | old => new @ Class.function | test_of_it[case]

`old` and `new` are expressions or statements of Python (`pass` drops one), compared as syntax: layout and
comments do not count. In `old`, $X stands for any expression, which `new` may repeat, and `...` for any other
arguments of a call. `old` must occur once in the file or, behind `@`, in that function or class. The test
must fail; where none is named, those of the folder (`tests.mutants.LOOKS`); with `step case`, a row of
`kernels/gpu/STEPS.md` must change. A line that begins with spaces goes on with the line above.
`name[*] := test[*]` shortens the name of a test, which may begin with its file: `test_file.py::test_of_it`.
"""

import ast
import functools
import importlib.machinery
import linecache
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
LISTS = Path(__file__).with_name("bugs")
METAVARIABLE = "_metavariable_"
Bound = dict[str, ast.expr]  # what metavariables stand for


class Change(NamedTuple):
    """The text of a file of the product in which something is changed."""

    file: Path
    line: int
    text: str


class Bug(NamedTuple):
    """A bug with a name: in `file`, `old` becomes `new`, and `test` fails."""

    file: str
    part: str  # what it is a bug of; "" if the list does not say
    name: str
    old: str
    new: str
    scope: str  # "" for the whole file
    test: str  # "" for those of the folder

    def change(self) -> Change:
        """Make the change. An error names the bug whose place does not occur, or occurs more than once."""
        try:
            file = product_file(self.file)
            old, new = _parsed(self.old), _parsed(self.new)
            # Between expressions, an expression; where one of both is a statement, a whole statement.
            inner = isinstance(old[0], ast.Expr) and isinstance(new[0], ast.Expr) and len(new) == 1
            pattern = old[0].value if isinstance(old[0], ast.Expr) and inner else old[0]
            found = list[tuple[ast.AST, Bound]]()
            for node in _nodes(file, self.scope):
                if _matches(pattern, node, bound := {}):
                    found.append((node, bound))
            if len(found) != 1:
                raise LookupError(f"{self.old!r} occurs {len(found)} times, not once")
            ((node, bound),) = found
            return changed(file, node, "\n".join(ast.unparse(_Fill(bound).visit(one)) for one in new))
        except (LookupError, SyntaxError) as error:
            raise LookupError(f"bug {self.name!r} in {self.file} {self.scope}: {error}") from error


@functools.cache
def product_files() -> list[Path]:
    """Return every Python file of the package; its kernels lie behind a link."""
    package = ROOT / "paged"
    return sorted([*package.rglob("*.py"), *(package / "kernels").rglob("*.py")])


def product_file(path: str) -> Path:
    """Return the one file of the package whose path ends like this."""
    found = [file for file in product_files() if f"{file}".endswith(f"/{path}")]
    if len(found) != 1:
        raise LookupError(f"the paths of {len(found)} files of the package end in {path!r}, not of one")
    return found[0]


@functools.cache
def syntax(file: Path) -> ast.Module:
    """Parse a file."""
    return ast.parse(file.read_text())


def _scopes(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        is_scope = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        name = f"{prefix}.{child.name}" if is_scope else prefix  # type: ignore[attr-defined]
        if is_scope:
            yield name, child
        yield from _scopes(child, name)


@functools.cache
def _nodes(file: Path, scope: str) -> list[ast.AST]:
    """Return the syntax of a file, or of one function or class in it."""
    if not scope:
        return [*ast.walk(syntax(file))]
    found = [node for name, node in _scopes(syntax(file)) if name.endswith(f".{scope}")]
    if len(found) != 1:
        raise LookupError(f"there are {len(found)} functions and classes {scope!r}, not one")
    return [*ast.walk(found[0])]


def _parsed(side: str) -> list[ast.stmt]:
    return ast.parse(re.sub(r"\$(\w+)", rf"{METAVARIABLE}\1", side)).body


def _matches(pattern: Any, node: Any, bound: Bound) -> bool:
    """Compare a pattern with syntax; note in `bound` what its metavariables stand for."""
    if isinstance(pattern, ast.Name) and pattern.id.startswith(METAVARIABLE):
        known = bound.setdefault(pattern.id, node)
        return isinstance(node, ast.expr) and ast.dump(known) == ast.dump(node)
    if isinstance(pattern, list):
        both = zip(pattern, node, strict=False)
        return len(pattern) == len(node) and all(_matches(one, other, bound) for one, other in both)
    if type(pattern) is not type(node):
        return False
    if not isinstance(pattern, ast.AST):
        return bool(pattern == node)
    args, keywords = getattr(node, "args", None), getattr(node, "keywords", None)
    if isinstance(pattern, ast.Call) and any(map(_is_ellipsis, pattern.args)):
        named = {keyword.arg for keyword in pattern.keywords}
        first = [*map(_is_ellipsis, pattern.args)].index(True)
        pattern = ast.Call(pattern.func, pattern.args[:first], pattern.keywords)
        node = ast.Call(node.func, args[:first], [keyword for keyword in keywords if keyword.arg in named])
    fields = [name for name in pattern._fields if name not in ("ctx", "type_comment", "kind")]
    return all(_matches(getattr(pattern, name), getattr(node, name), bound) for name in fields)


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


class _Fill(ast.NodeTransformer):
    """Puts in what metavariables stand for."""

    def __init__(self, bound: Bound) -> None:
        self._bound = bound

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._bound[node.id] if node.id.startswith(METAVARIABLE) else node


def changed(file: Path, node: Any, new: str) -> Change:
    """Put a text in the place of an expression or a statement."""
    lines = file.read_bytes().splitlines(keepends=True)
    before = [*lines[: node.lineno - 1], lines[node.lineno - 1][: node.col_offset]]
    after = [lines[node.end_lineno - 1][node.end_col_offset :], *lines[node.end_lineno :]]
    if isinstance(node, ast.stmt):
        new = textwrap.indent(new, " " * node.col_offset).lstrip()
    elif not isinstance(node, ast.Starred):
        new = f"({new})"
    return Change(file, node.lineno, b"".join([*before, new.encode(), *after]).decode())


def plant(change: Change) -> None:
    """Have this process import a module with a change."""
    assert not any(name == "paged" or name.startswith("paged.") for name in sys.modules)
    compile(change.text, change.file, "exec")  # else what is no Python would count as a bug that is caught
    loader = importlib.machinery.SourceFileLoader
    get_code = loader.get_code
    module = ".".join(change.file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")

    def get_planted(self: Any, fullname: str) -> Any:
        return compile(change.text, self.path, "exec") if fullname == module else get_code(self, fullname)

    loader.get_code = get_planted  # type: ignore[method-assign]
    # Triton compiles the source that `inspect` finds.
    lines = change.text.splitlines(keepends=True)
    linecache.cache[f"{change.file}"] = len(change.text), None, lines, f"{change.file}"


def bugs() -> list[Bug]:
    """Read all lists."""
    return [bug for file in sorted(LISTS.glob("*.txt")) for bug in read(file.read_text())]


def read(text: str) -> Iterator[Bug]:
    """Read the bugs in a list."""
    short: dict[str, str] = {}
    file = ""
    for line in re.sub(r"\n +", " ", text).splitlines():
        if line.startswith("["):
            file = line.strip("[]")
        elif found := re.fullmatch(r"(\w+)(?:\[\*\])? := (.+)", line):
            short[found[1]] = found[2]
        elif line and not line.startswith("#"):
            found = re.fullmatch(r"(?:([\w -]+): )?(.+?) \| (.+) => (.+?)(?: @ ([\w.]+))?(?: \| (.+))?", line)
            assert found, f"{line!r} is no bug"
            part, name, old, new, scope, test = found.groups("")
            name_of_test, _, case = test.partition("[")
            test = short[name_of_test].replace("*", case[:-1]) if name_of_test in short else test
            yield Bug(file, part, name, old, new, scope, test)
