"""The shape of the project: which module may import which, and what a wheel holds."""

import ast
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import paged
from paged import errors

ROOT = Path(__file__).parents[1]
# Imports go from a row to itself or to one above it, never down. Every file and folder has its row.
LAYERS = [
    ["errors", "validation", "config", "sampling_params"],
    ["blocks"],
    ["requests"],
    ["scheduler"],
    ["kernels"],
    ["model"],
    ["text"],
    ["sampling"],
    ["runner"],
    ["engine"],
    ["protocol", "routing"],
    ["simulate"],
    ["commands"],
    ["__main__"],
]
ROW = {name: row for row, names in enumerate(LAYERS) for name in names}
STDLIB_ROWS = 4  # the first rows are pure Python
SOURCES = sorted((ROOT / "paged").rglob("*.py"))
KERNELS = sorted((ROOT / "kernels").rglob("*.py"))
EVERY_FILE = [
    file
    for folder in ("paged", "kernels", "tests", "benchmarks")
    for file in sorted((ROOT / folder).rglob("*.py"))
]


def names_of(files: list[Path]) -> list[str]:
    return [str(file.relative_to(ROOT)) for file in files]


def imports(file: Path) -> Iterator[str]:
    """Everything that a file imports anywhere, as absolute dotted names."""
    # paged/model/decoder.py lies in the package paged.model, and so does paged/model/__init__.py.
    package = file.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = [*base, *(node.module or "").split(".")] if node.module else [*base]
            yield from (".".join([*module, alias.name]) for alias in node.names)


def module_of(dotted: str) -> str:
    """The module or subpackage right under `paged`; "__init__" for a name of the package itself."""
    name = f"{dotted}.".split(".")[1]
    return name if name in ROW else "__init__"


def place(file: Path) -> str:
    """The entry of LAYERS that a file belongs to."""
    return file.relative_to(ROOT / "paged").parts[0].removesuffix(".py")


def test_every_module_has_a_row():
    found = {place(file) for file in SOURCES} - {"__init__", "demo"} | {"kernels"}
    assert found == set(ROW)


@pytest.mark.parametrize("file", [f for f in SOURCES if place(f) not in ("__init__", "demo")], ids=place)
def test_imports_go_one_way(file):
    for dotted in imports(file):
        if dotted.split(".")[0] != "paged":
            continue
        target = module_of(dotted)
        if target == "__init__":
            # The package itself imports the engine: only what lies above that may ask it for a name.
            assert ROW[place(file)] >= ROW["commands"], f"{file} imports {dotted}"
        else:
            assert ROW[target] <= ROW[place(file)], f"{file} imports {dotted}, which lies above it"


@pytest.mark.parametrize(
    "file", [f for f in SOURCES if ROW.get(place(f), STDLIB_ROWS) < STDLIB_ROWS], ids=place
)
def test_lower_rows_are_pure_python(file):
    assert {dotted.split(".")[0] for dotted in imports(file)} <= sys.stdlib_module_names | {"paged"}


@pytest.mark.parametrize("file", KERNELS, ids=names_of(KERNELS))
def test_kernels_know_tensors_only(file):
    compiler = {"numba", "llvmlite"} if "cpu" in file.parts else {"triton"}
    allowed = sys.stdlib_module_names | {"torch", "numpy", "kernels"} | compiler
    assert {dotted.split(".")[0] for dotted in imports(file)} <= allowed
    # Relative imports that would leave the folder, which is paged/kernels when it is imported:
    for node in ast.walk(ast.parse(file.read_text())):
        assert not isinstance(node, ast.ImportFrom) or node.level < len(file.relative_to(ROOT).parts)


def test_only_loading_touches_transformers():
    touching = {place(f) for f in SOURCES if any(name.startswith("transformers") for name in imports(f))}
    assert touching - {"demo"} <= {"model", "text"}


@pytest.mark.parametrize("file", SOURCES + KERNELS, ids=names_of(SOURCES + KERNELS))
def test_nothing_imports_tests_or_benchmarks(file):
    assert not {dotted.split(".")[0] for dotted in imports(file)} & {"tests", "benchmarks"}


@pytest.mark.parametrize("file", EVERY_FILE, ids=names_of(EVERY_FILE))
def test_nobody_imports_kernels_by_its_bare_name(file):
    # Hugging Face has a package of that name, and transformers takes ours for it.
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "kernels" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert (node.module or "").split(".")[0] != "kernels"


def test_kernels_is_no_package_of_its_own():
    assert not (ROOT / "kernels" / "__init__.py").exists()
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
    assert public | {"LLM", *paged._MODULES} == set(paged.__all__)


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
        assert "paged = paged.commands.cli:main" in archive.read(entry_points).decode()
    assert {name.split("/")[0] for name in held} == {"paged"}
    wanted = {f"paged/{file.relative_to(ROOT)}" for file in KERNELS}
    wanted |= {"paged/py.typed", "paged/commands/cli.py"}
    wanted |= {f"paged/demo/{file.name}" for file in (ROOT / "paged" / "demo").iterdir() if file.is_file()}
    assert wanted <= held
