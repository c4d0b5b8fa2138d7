"""Plain mutations: another operator, bound, constant, condition or order, or a statement less."""

import ast
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.planting import ROOT, Change, changed, product_files, syntax

_PAIRS: list[tuple[type[ast.AST], type[ast.AST]]] = [
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    *((ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.LShift, ast.RShift), (ast.BitAnd, ast.BitOr)),
    (ast.And, ast.Or),
]
SWAPS = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
# Checks of a class by itself, and what is printed of it, change no result.
NOT_LOOKED_AT = {"check", "__repr__"}
Mutant = tuple[ast.AST, str]  # what is replaced, and by what


class Mutation(NamedTuple):
    """A plain mutation. Its name stays the same while other code of its file changes."""

    name: str
    file: Path
    node: ast.AST
    new: str

    def change(self) -> Change:
        """Make the change."""
        return changed(self.file, self.node, self.new)


def mutations(folder: str) -> list[Mutation]:
    """Return all plain mutations of a folder or a file, relative to the package."""
    path = ROOT / "paged" / folder
    files = [file for file in product_files() if file == path or path in file.parents]
    if not files:
        raise LookupError(f"the package has no Python file in {folder!r}")
    return [mutation for file in files for mutation in _of_file(file)]


def _of_file(file: Path) -> Iterator[Mutation]:
    found = Counter[str]()
    for scope, node, new in _inside(syntax(file), ""):
        what = f"{file.relative_to(ROOT)}: {scope}: {ast.unparse(node)} => {new}"
        found[what] += 1
        yield Mutation(f"{what} ({found[what]})", file, node, new)


def _inside(node: ast.AST, scope: str) -> Iterator[tuple[str, ast.AST, str]]:
    """Return what may be replaced inside functions and classes, and by what."""
    for child in ast.iter_child_nodes(node):
        # Error messages, annotations and assertions are no behaviour. Parts of an f-string have no place.
        if isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr | ast.arguments):
            continue
        inner = scope
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if child.name in NOT_LOOKED_AT:
                continue
            inner = f"{scope}.{child.name}".lstrip(".")
            child = ast.Module(child.body, [])
        elif isinstance(child, ast.AnnAssign):
            child = ast.Module([child.value] if child.value else [], [])  # type: ignore[list-item]
        if inner:
            yield from ((inner, *mutant) for mutant in _mutants(child))
        yield from _inside(child, inner)


def _mutants(node: ast.AST) -> Iterator[Mutant]:
    """Return what may be replaced of a node itself."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in SWAPS:
            yield node, ast.unparse(_with(node, ops=[SWAPS[type(op)]()]))
        case ast.BoolOp(op=op, values=values):
            yield node, ast.unparse(_with(node, op=SWAPS[type(op)]()))
            for dropped in values:
                rest = [value for value in values if value is not dropped]
                yield node, ast.unparse(_with(node, values=rest) if len(rest) > 1 else rest[0])
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in SWAPS:
            yield node, ast.unparse(_with(node, op=SWAPS[type(op)]()))
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield node, ast.unparse(operand)
        case ast.Constant(value=bool(value)):
            yield node, repr(not value)
        case ast.Constant(value=int(value)):
            yield from ((node, repr(value + 1)), (node, repr(value - 1)))
        case ast.Slice(lower=lower, upper=upper):
            yield from ((at, f"{ast.unparse(at)} + 1") for at in (lower, upper) if isinstance(at, ast.expr))
        case ast.Call(func=ast.Name(id=name)) if name in NAMES:
            yield node, ast.unparse(_with(node, func=ast.Name(NAMES[name])))
        case ast.Call(args=[first, second, *rest]) if not isinstance(first, ast.Starred):
            yield node, ast.unparse(_with(node, args=[second, first, *rest]))
        case ast.Continue():
            yield node, "break"
        case ast.If(test=test) | ast.IfExp(test=test):
            yield from ((test, "True"), (test, "False"))
        case ast.While(test=test):
            yield test, "False"
    if _has_effect(node):
        yield node, "pass"
    for name in ("body", "orelse"):
        statements = getattr(node, name, None)
        for pair in pairwise(statements if isinstance(statements, list) else []):
            match pair:
                case (
                    ast.Expr(value=ast.Call(func=ast.Attribute(value=one))) as first,
                    ast.Expr(value=ast.Call(func=ast.Attribute(value=other))) as second,
                ) if ast.dump(one) == ast.dump(other):  # two calls of the same object
                    both = ast.copy_location(ast.Pass(), first)
                    both.end_lineno, both.end_col_offset = second.end_lineno, second.end_col_offset
                    yield both, f"{ast.unparse(second)}\n{ast.unparse(first)}"


def _has_effect(node: ast.AST) -> bool:
    """Return whether a statement changes what was there before, so that it may be dropped."""
    match node:
        case ast.AugAssign() | ast.Delete() | ast.Expr(value=ast.Call()):
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return True
    return False


def _with(node: ast.AST, **fields: Any) -> ast.AST:
    """Copy a node with other fields."""
    return type(node)(**{name: getattr(node, name) for name in node._fields} | fields)
