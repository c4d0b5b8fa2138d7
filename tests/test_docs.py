"""The documentation: links lead somewhere, what is named exists, numbers about the code are true."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from paged.kernels.backend import load_kernels
from tests import (
    mutants,
    simulation,
    strangers,
    test_examples,
    test_layout,
    test_strangers_corpus,
)
from tests.ops import fuzz
from tests.support import absent_gpu, planting, random_schemas, server_fuzz
from tests.support.pythons import supported
from tests.tables import TABLES, with_table

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [
    page
    for pattern in (
        "*.md",
        "docs/*.md",
        "kernels/**/*.md",
        "paged/demo/*.md",
        "benchmarks/*.md",
        "examples/*.md",
        "deploy/*.md",
    )
    for page in sorted(ROOT.glob(pattern))
]
# A link may have a picture as its text, but no page does that.
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
PATH = re.compile(
    r"(?<![\w/.-])(?:paged|kernels|tests|benchmarks|docs|examples|deploy)/[\w/.-]+\.(?:py|md|json|svg)\b"
)
COMMAND = re.compile(r"python -m ((?:paged|tests|benchmarks)[\w.]*)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)

each_page = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


def text_of(page: Path) -> str:
    """Read a page without its code blocks, in which brackets are not links."""
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def defines(source: str, name: str) -> bool:
    """Return whether a Python source defines a function, class or constant of this name."""
    return re.search(rf"^\s*(?:async def|def|class) {name}\b|^{name}\b.*=", source, re.MULTILINE) is not None


@each_page
def test_links_lead_somewhere(page):
    for text, target in LINK.findall(text_of(page)):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{page.name} links to {target}"
        if file.suffix == ".py" and re.fullmatch(r"`[\w.]+`", text) and not text.endswith(".py`"):
            for name in text.strip("`").split("."):
                assert defines(file.read_text(encoding="utf-8"), name), f"{path} has no {text}"


@pytest.mark.parametrize("page", TABLES)
def test_tables_are_those_of_the_code(page):
    assert with_table(page) == (ROOT / page).read_text(encoding="utf-8"), "python -m tests.tables --write"


@each_page
def test_files_that_are_named_exist(page):
    if page.name == "CHANGELOG.md":
        pytest.skip("a changelog names what was there")
    for name in PATH.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


@each_page
def test_modules_in_commands_exist(page):
    for module in COMMAND.findall(page.read_text(encoding="utf-8")):
        path = ROOT / module.rstrip(".").replace(".", "/")
        runnable = path.with_suffix(".py").exists() or (path / "__main__.py").exists()
        assert runnable, f"{page.name} runs {module}"


@each_page
def test_python_compiles(page):
    if page.parent.name == "demo":
        pytest.skip("samples of the demo model")
    for block in re.findall(
        r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    ):
        if not block.startswith(" "):  # an entry out of its table
            compile(block, str(page), "exec")


@pytest.mark.parametrize("backend", ["numba", "triton", "torch"])
@pytest.mark.parametrize("page", [README, ROOT / "docs" / "kernels.md"], ids=["README", "kernels"])
def test_calls_of_kernels_run(page, backend, monkeypatch):
    section = page.read_text(encoding="utf-8").split("# Kernels as a library\n")[1].split("\n## Features")[0]
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL))
    chosen = load_kernels(backend)
    monkeypatch.setattr("paged.kernels.backend.load_kernels", lambda _: chosen)
    names: dict[str, Any] = {}
    exec(compile(code, str(page), "exec"), names)
    for name in ("normed", "activated", "query", "attended"):
        assert names[name].isfinite().all(), name
    assert 0 <= int(names["drawn"].min()) <= int(names["drawn"].max()) < 1000


def test_every_page_of_docs_is_listed():
    listed = {target.partition("#")[0] for _, target in LINK.findall(text_of(ROOT / "docs" / "README.md"))}
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"} <= listed


def test_readme_is_short():
    assert README.read_text(encoding="utf-8").count("\n") <= 200


def facts() -> dict[str, list[str]]:
    """Return what pages say of the code, as it is now: a number that is not there is wrong on its page."""
    order = README.read_text(encoding="utf-8").split("## Reading order")[1].split("Where to look")[0]
    core = [ROOT / name for name in PATH.findall(order) if name.endswith(".py")]
    assert len(core) == len(set(core)), "a file of the reading order is named twice"
    num_lines = round(sum(file.read_text(encoding="utf-8").count("\n") for file in core), -2)
    num_targets = {7: "seven", 8: "eight", 9: "nine", 10: "ten"}[len(absent_gpu.TARGETS)]
    checkpoints = sum(test_strangers_corpus.COUNTS.values())
    millions = simulation.STEPS // 10**6
    hundreds = len(planting.bugs()) // 100 * 100
    pythons = f"Python 3.{supported()[0]} to 3.{supported()[-1]}"
    floors = " | ".join(", ".join(f"`{room}`" for room in floor) for floor in test_layout.LAYERS[:-1])
    schemas = f"random JSON schemas, compared with jsonschema; CI tries {random_schemas.COUNT_IN_CI}"
    server = f"{server_fuzz.COUNT:,} malformed requests for the server; CI sends {server_fuzz.COUNT_IN_CI:,}"
    return {
        "README.md": [
            pythons,
            floors,
            f"Its core of {num_lines:,} lines",
            f"The core is {len(core)} files of about {num_lines:,} lines",
            f"{fuzz.CALLS_IN_CI:,} calls in CI",
            f"{millions} million random steps in CI",
            f"{checkpoints:,} damaged checkpoints in CI",
            f"inserts more than {hundreds} known bugs",
            f"CI inserts {mutants.NUM_BUGS + mutants.NUM_MUTATIONS}",
        ],
        "CONTRIBUTING.md": [
            f"{millions} million steps of the scheduler",
            f"more than {hundreds} named bugs",
            f"{strangers.COUNT:,} damaged checkpoints; CI loads {checkpoints:,}",
            server,
            schemas,
        ],
        "docs/README.md": [f"compile to on {num_targets} targets"],
        "docs/exactness.md": [
            f"ahead of time for {num_targets} targets",
            f"{millions} million steps, as CI does",
            f"{fuzz.CALLS:,} wrong calls of the kernels (`--calls` for more); CI makes {fuzz.CALLS_IN_CI:,}",
        ],
        "docs/kernels.md": [f"{fuzz.CALLS:,} wrong calls of all backends"],
        "docs/security.md": [
            f"damages small checkpoints, {strangers.COUNT:,} of them",
            f"CI loads {checkpoints:,}; a seed",
        ],
        "examples/README.md": [
            f"at most {test_examples.MOST_LINES} lines (`llama.py` has {test_examples.LINES_OF_LLAMA})"
        ],
    }


def test_facts_about_the_code_are_true():
    missing = [
        f"{page}: write {fact!r}"
        for page, of_page in facts().items()
        for fact in of_page
        if fact not in " ".join((ROOT / page).read_text(encoding="utf-8").split())
    ]
    assert not missing, "\n".join(missing)


def test_ratios_are_those_measured():
    measured = {
        (workload["name"], workload["cpu"], row["system"], row["requests"]): f"{row['ratio']:.2f}"
        for workload in json.loads((ROOT / "benchmarks/peers/measured.json").read_text(encoding="utf-8"))
        for row in workload["rows"]
        if "ratio" in row
    }
    table = README.read_text(encoding="utf-8").split("| model | CPU | compared with |")[1].split("\n\n")[0]
    for line in table.splitlines()[2:]:
        model, cpu, system, *ratios = (cell.strip() for cell in line.strip("|").split("|"))
        assert ratios == [measured[model, cpu, system, requests] for requests in (1, 4, 16, 64)]
