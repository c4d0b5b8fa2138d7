"""The shape of the project: which folder may import which, what a file may hold, and what a wheel holds."""

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import paged
from paged.base import errors

ROOT = Path(__file__).parents[1]
# The floors. A room is imported by itself and by the rooms below it, not by its neighbours.
LAYERS = [
    ["base", "kernels"],
    ["blocks", "options", "grammars"],
    ["requests", "device", "architectures"],
    ["drafting", "checkpoints", "images"],
    ["scheduler", "text", "model"],
    ["sampling", "chat"],
    ["runner"],
    ["ranks"],
    ["engine"],
    ["protocol"],
    ["server"],
    ["simulate", "ray"],
    ["commands"],
    ["__main__"],
]
ROW = {name: row for row, names in enumerate(LAYERS) for name in names}
PURE_PYTHON = ("base", "blocks", "options", "requests", "drafting", "scheduler")
MAX_PARAMETERS = 12
# The one module that defines each word of the glossary.
GLOSSARY = {
    "AttentionOptions": "kernels/attention_options.py",
    "AttentionPlan": "kernels/attention_options.py",
    "Batch": "paged/model/batch.py",
    "BlockManager": "paged/blocks/manager.py",
    "BlockPool": "paged/blocks/pool.py",
    "Decoder": "paged/model/decoder.py",
    "EngineCore": "paged/engine/core.py",
    "KVCache": "paged/model/cache/kv_cache.py",
    "Kernels": "kernels/operations.py",
    "LLMEngine": "paged/engine/engine.py",
    "ModelRunner": "paged/runner/model_runner.py",
    "Policy": "paged/scheduler/policy.py",
    "PrefixChain": "paged/blocks/prefix_chain.py",
    "Request": "paged/requests/request.py",
    "RequestGroup": "paged/requests/request.py",
    "Schedule": "paged/scheduler/schedule.py",
    "Scheduler": "paged/scheduler/scheduler.py",
}
SOURCES = sorted((ROOT / "paged").rglob("*.py"))
KERNELS = sorted((ROOT / "kernels").rglob("*.py"))
PRODUCT = SOURCES + KERNELS
EVERY_FILE = PRODUCT + [
    file for folder in ("tests", "benchmarks", "examples") for file in sorted((ROOT / folder).rglob("*.py"))
]


def names_of(files: list[Path]) -> list[str]:
    return [str(file.relative_to(ROOT)) for file in files]


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def parts_of(file: Path) -> tuple[str, ...]:
    """Split the dotted name that a file is imported by: kernels/ is reached as paged.kernels."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = ("paged", *parts) if parts[0] == "kernels" else parts
    return parts[:-1] if parts[-1] == "__init__" else parts


@cache
def imports(file: Path) -> tuple[tuple[str, str | None], ...]:
    """Return each module that a file imports from, with each name imported from there."""
    return tuple(_imports(file))


def _imports(file: Path) -> Iterator[tuple[str, str | None]]:
    package = parts_of(file) if file.name == "__init__.py" else parts_of(file)[:-1]
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((module, alias.name) for alias in node.names)


def packages(file: Path) -> set[str]:
    """Return the top-level packages that a file imports."""
    return {module.split(".")[0] for module, _ in imports(file)}


def place(file: Path) -> str:
    """Return the entry of LAYERS that a file belongs to."""
    return (*parts_of(file), "__init__")[1]


def cycles(edges: Mapping[str, set[str]]) -> list[str]:
    """Return the names that are in a cycle, or on a path between two."""
    left = {name: set(targets) - {name} for name, targets in edges.items()}
    while True:
        imported = set().union(*left.values())
        ends = [name for name, targets in left.items() if name not in imported or not targets & left.keys()]
        if not ends:
            return sorted(left)
        for name in ends:
            del left[name]


def import_graph() -> dict[str, set[str]]:
    """Map each module of the product to those it imports."""
    modules = {".".join(parts_of(file)) for file in PRODUCT}
    graph = defaultdict(set)
    for file in PRODUCT:
        if file == ROOT / "paged" / "__init__.py":  # its names are for users
            continue
        for module, name in imports(file):
            target = f"{module}.{name}" if f"{module}.{name}" in modules else module
            if target in modules:
                graph[".".join(parts_of(file))].add(target)
    return graph


def test_every_module_has_a_row():
    assert {place(file) for file in SOURCES} - {"__init__"} | {"kernels"} == set(ROW)


PLACED = [file for file in SOURCES if place(file) in ROW]


@pytest.mark.parametrize("file", PLACED, ids=names_of(PLACED))
def test_imports_go_one_way(file):
    for module, name in imports(file):
        if module.split(".")[0] != "paged":
            continue
        target = module.split(".")[1] if "." in module else name
        if target in ROW:
            is_below = ROW[target] < ROW[place(file)]
            assert target == place(file) or is_below, f"{file} imports {module}, which is not below it"
        else:
            # The package itself imports the engine: only what lies above that may ask it for a name.
            assert ROW[place(file)] >= ROW["server"], f"{file} imports {name} from {module}"


def test_no_file_is_in_an_import_cycle():
    assert cycles(import_graph()) == []


def test_no_folder_is_in_an_import_cycle():
    """A file beside folders counts as one."""
    graph = import_graph()
    parents = {module.rpartition(".")[0] for module in graph}
    with_folders = {parent.rpartition(".")[0] for parent in parents}

    def folder(module: str) -> str:
        parent = module.rpartition(".")[0]
        return module if parent in with_folders else parent

    folders = defaultdict(set)
    for module, targets in graph.items():
        folders[folder(module)] |= {folder(target) for target in targets}
    assert cycles(folders) == []


def test_private_names_stay_in_their_module():
    private = {
        (str(file.relative_to(ROOT)), name)
        for file in PRODUCT
        for module, name in imports(file)
        if module.split(".")[0] == "paged" and name and name.startswith("_") and not name.startswith("__")
    }
    assert private == set()


def test_functions_take_few_parameters():
    """Except Triton's kernels, launchers of the store of K and V, and LLMEngine."""
    nodes = [node for file in PRODUCT for node in ast.walk(tree_of(file))]
    excepted = {
        method
        for owner in nodes
        if isinstance(owner, ast.ClassDef)
        and owner.name == "LLMEngine"  # has the arguments of vLLM's methods
        for method in owner.body
    }
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node not in excepted and not _is_launcher(node):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = sum(argument.arg not in ("self", "cls") for argument in given)
            assert count <= MAX_PARAMETERS, f"{node.name} takes {count}"


def _is_launcher(node: ast.FunctionDef) -> bool:
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    stores_kv = node.name == "rotary_store_kv" or "checked_as('rotary_store_kv')" in decorators
    return stores_kv or bool({each.partition("(")[0] for each in decorators} & {"triton.jit", "jit"})


def test_a_word_has_one_home():
    """Public classes and constants are defined once, and the words of the glossary where it says."""
    homes = defaultdict(set)
    for file in PRODUCT:
        for name in _defined(tree_of(file)):
            homes[name].add(str(file.relative_to(ROOT)))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}
    assert {word: homes[word] for word in GLOSSARY} == {word: {file} for word, file in GLOSSARY.items()}


def _defined(tree: ast.Module) -> Iterator[str]:
    """Yield public classes and constants at the top level of a module, but no type variables."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name) and target.id.isupper()]
        else:
            continue
        yield from (name for name in names if not name.startswith("_") and len(name) > 1)


WORDS_FOR_PEOPLE = re.compile(r"\b(nobody|somebody|everybody|whoever)\b", re.IGNORECASE)


def test_requests_and_blocks_are_no_people():
    found = {
        name: WORDS_FOR_PEOPLE.findall(file.read_text())
        for file, name in zip(PRODUCT, names_of(PRODUCT), strict=True)
    }
    assert {name: words for name, words in found.items() if words} == {}


@pytest.mark.parametrize("file", [file for file in SOURCES if place(file) in PURE_PYTHON], ids=str)
def test_what_decides_is_pure_python(file):
    assert packages(file) <= sys.stdlib_module_names | {"paged"}


@pytest.mark.parametrize("file", KERNELS, ids=names_of(KERNELS))
def test_kernels_know_tensors_only(file):
    compiler = {"numba", "llvmlite"} if "cpu" in file.parts else {"triton"}
    allowed = sys.stdlib_module_names | {"torch", "numpy", "paged"} | compiler
    assert packages(file) <= allowed
    for module, _ in imports(file):
        assert module.split(".")[0] != "paged" or module.startswith("paged.kernels")


def test_constants_of_triton_kernels_stand_behind_tensors():
    """In the interpreter of Triton 3.7, `CONSTANT * x` is no tensor, where `x * CONSTANT` is."""
    trees = {file: tree_of(file) for file in KERNELS if "triton" in packages(file)}
    constants = {name for tree in trees.values() for name in _triton_constants(tree)}
    assert "FLOAT_MAX" in constants
    in_front = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp)
        and _is_number(node.left, constants)
        and not isinstance(node.left, ast.Constant)
        and not _is_number(node.right, constants)
    ]
    assert in_front == []


def _triton_constants(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("tl.constexpr("):
            yield ast.unparse(node.targets[0])


def _is_number(node: ast.expr, constants: set[str]) -> bool:
    """Return whether an expression is a number or a constant, with or without a sign."""
    while isinstance(node, ast.UnaryOp):
        node = node.operand
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id in constants)


OF_A_BACKEND = re.compile(r"paged\.kernels\.(cpu|gpu|plain)\b")


@pytest.mark.parametrize("row", ["model", "sampling", "runner", "engine"])
def test_backends_are_behind_kernels(row):
    """What computes with kernels knows none of them: what a backend can do is in `Kernels`."""
    files = [file for file in SOURCES if place(file) == row]
    assert files
    for file in files:
        for module, name in imports(file):
            assert not OF_A_BACKEND.match(f"{module}.{name}"), f"{file} imports {name} from {module}"


def test_only_loading_touches_transformers():
    touching = {place(f) for f in SOURCES if "transformers" in packages(f)}
    assert touching <= {"model", "text", "protocol"}


def test_nothing_imports_tests_or_benchmarks():
    assert names_of([file for file in PRODUCT if packages(file) & {"tests", "benchmarks"}]) == []


def test_kernels_is_not_imported_by_its_bare_name():
    # Hugging Face has a package of that name, and transformers takes ours for it.
    assert names_of([file for file in EVERY_FILE if "kernels" in packages(file)]) == []


def test_kernels_is_no_package_of_its_own():
    assert not list((ROOT / "kernels").rglob("__init__.py"))
    link = ROOT / "paged" / "kernels"
    assert link.is_symlink()
    assert link.readlink() == Path("..", "kernels")
    assert not (ROOT / "tests" / "kernels").exists()
    assert not (ROOT / "benchmarks" / "kernels.py").exists()


def test_all_is_sorted_and_complete():
    # As ruff sorts it: constants, then classes.
    assert paged.__all__ == sorted(paged.__all__, key=lambda name: (not name.isupper(), name))
    for name in paged.__all__:
        assert getattr(paged, name).__module__.startswith("paged.")
    public = {
        name
        for name, value in vars(paged).items()
        if not name.startswith("_") and str(getattr(value, "__module__", "")).startswith("paged.")
    }
    assert public | {*paged._ALIASES, *paged._MODULES} == set(paged.__all__)


def test_every_error_is_public():
    found = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, errors.PagedError)]
    assert {error.__name__ for error in found} <= set(paged.__all__)


def test_wheel_holds_kernels_and_demo(tmp_path):
    """What is installed works: the symlinked kernels and the checkpoint are inside, nothing lies beside."""
    pytest.importorskip("setuptools", minversion="77")
    source, out = tmp_path / "source", tmp_path / "out"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "results")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    out.mkdir()
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(out)!r})"
    run = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (wheel,) = out.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        entry_points = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "paged = paged.__main__:main" in archive.read(entry_points).decode()
    assert {name.split("/")[0] for name in held} == {"paged"}
    wanted = {f"paged/{file.relative_to(ROOT)}" for file in KERNELS}
    wanted |= {"paged/py.typed", "paged/base/vllm.toml", "paged/commands/cli.py"}
    wanted |= {f"paged/demo/{file.name}" for file in (ROOT / "paged" / "demo").iterdir() if file.is_file()}
    wanted |= {f"paged/server/page/{file.name}" for file in (ROOT / "paged" / "server" / "page").iterdir()}
    assert wanted <= held
