"""What each use of the engine imports, how large each room is, and how many files answer a question.

python -m tests.house    # three tables
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tests.test_layout import LAYERS, import_graph

ROOT = Path(__file__).parents[1]
# Rooms and files that a plain generation must not import.
CHOSEN = (
    *("paged.ranks", "paged.drafting", "paged.server", "paged.commands", "paged.simulate", "paged.protocol"),
    *(
        "paged.checkpoints.gguf",
        "paged.architectures.gguf_names",
        "paged.architectures.schemes",
        "paged.checkpoints.formats",
        "paged.checkpoints.hub",
    ),
    *(
        "paged.model.weights.coded_panels",
        "paged.architectures.families.moe",
        "paged.architectures.families.gemma4",
    ),
    *("paged.sampling.structured_outputs", "paged.grammars.json_schema", "paged.sampling.dry"),
    *(
        "paged.scheduler.runs",
        "paged.scheduler.backlog",
        "paged.scheduler.deadlines",
        "paged.scheduler.towers",
        "paged.scheduler.adapters",
        "paged.options.lora_request",
        "paged.engine.logprob_turns",
        "paged.runner.quantised",
    ),
    *("paged.text.tokenizer_bounds", "paged.text.tokenizer_growth", "paged.kernels.content_checks"),
    *("paged.base.from_vllm", "paged.base.json_kinds", "paged.sampling.reporter"),
    *(
        "paged.requests.answer_start",
        "paged.requests.contradictions",
        "paged.requests.prompt_report",
        "paged.requests.stop_strings",
    ),
    *(
        "paged.scheduler.drafts",
        "paged.runner.draft_model",
        "paged.runner.footprint",
        "paged.engine.beam_search",
    ),
    *(
        "paged.text.worker",
        "paged.kernels.cpu.compiled",
        "paged.kernels.cpu.rows.experts",
        "paged.kernels.gpu",
        "paged.kernels.reference",
    ),
    *("numba", "llvmlite", "triton", "transformers", "huggingface_hub", "msgspec", "prometheus_client"),
)
_ENGINE = 'LLMEngine("demo", num_threads=1, max_model_len=256, num_blocks=64{options})'
_GENERATE = """
    from paged import LLMEngine, SamplingParams, StructuredOutputsParams
    engine = {engine}
    engine.generate(["def f(n):"], SamplingParams(max_tokens=8{params}), use_tqdm=False)
"""
_COMMAND = """
    import contextlib, sys
    sys.argv = {arguments}
    from paged.commands.cli import main
    with contextlib.suppress(SystemExit):
        main()
"""
# How a demo is used: options of the engine, and parameters.
USES = {
    "plain": ("", ", temperature=0"),
    "drawn": ("", ", seed=1"),
    "grammar": ("", ', temperature=0, structured_outputs=StructuredOutputsParams(regex="[a-z]+")'),
    "drafts": (', speculative_config={"method": "ngram"}', ", temperature=0"),
    "int4": (', quantization="int4"', ", temperature=0"),
    "ranks": (", pipeline_parallel_size=2", ", temperature=0"),
}
# Commands, each with the rooms and packages that it must not import.
_NO_ENGINE = ("torch", "numpy", "paged.engine.engine", "paged.model.decoder", "paged.kernels", "rich")
_NO_SERVER = ("paged.server", "paged.simulate", "paged.ranks", "paged.ray", "uvicorn", "rich")
COMMANDS = {
    "--help": (*_NO_ENGINE, *_NO_SERVER, "paged.protocol", "paged.chat", "paged.text", "paged.scheduler"),
    "generate --help": (*_NO_ENGINE, *_NO_SERVER, "paged.chat"),
    "serve --help": (*_NO_ENGINE, "uvicorn", "starlette", "prometheus_client", "paged.simulate"),
    "plan --help": (*_NO_ENGINE, "paged.server", "paged.chat", "paged.engine"),
    "bench --help": (*_NO_ENGINE[:-1], "paged.server", "paged.simulate.fleet", "paged.simulate.replica"),
    "generate hello --max-tokens 1": (*_NO_SERVER, "paged.commands.bench", "paged.commands.serve"),
}
_REPORT = """
    import json, sys
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    print(json.dumps({name: file for name, file in files.items() if file and file.endswith(".py")}))
"""


class Imported(NamedTuple):
    """Our modules that a use imports, all modules, and the lines of ours."""

    own: frozenset[str]
    all: frozenset[str]
    num_lines: int


def imported_by(use: str) -> Imported:
    """Run a use in a process of its own. Return what it imports; the kernels must be compiled before."""
    options, params = USES[use]
    return _imported(_GENERATE.format(engine=_ENGINE.format(options=options), params=params))


def imported_by_command(arguments: str) -> Imported:
    """Run `paged` with these arguments in a process of its own. Return what it imports."""
    return _imported(_COMMAND.format(arguments=["paged", *arguments.split()]))


def _imported(script: str) -> Imported:
    body = textwrap.indent(textwrap.dedent(script) + textwrap.dedent(_REPORT), "    ")
    command = [sys.executable, "-c", f"if __name__ == '__main__':\n{body}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    files: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    # By file: a module may be found by a second name.
    own = {file: name for name, file in sorted(files.items()) if name.partition(".")[0] == "paged"}
    return Imported(frozenset(own.values()), frozenset(files), sum(map(_num_lines, own)))


def _num_lines(file: str | Path) -> int:
    return len(Path(file).read_text(encoding="utf-8").splitlines())


def rooms() -> Counter[str]:
    """Return the lines of each room of paged/, and of kernels/."""
    lines: Counter[str] = Counter()
    for file in (ROOT / "paged").rglob("*.py"):
        place = file.relative_to(ROOT / "paged")
        if place.parts[0] != "kernels":
            lines[place.parts[0] if len(place.parts) > 1 else "paged"] += _num_lines(file)
    lines["kernels"] = sum(map(_num_lines, (ROOT / "kernels").rglob("*.py")))
    return lines


def arrows() -> set[tuple[str, str]]:
    """Return each pair of rooms of which the first imports the second."""
    pairs = {
        (importer.split(".")[1], imported.split(".")[1])
        for importer, targets in import_graph().items()
        for imported in targets
        if "." in importer and "." in imported
    }
    return {(importer, imported) for importer, imported in pairs if importer != imported}


def questions() -> list[tuple[str, int]]:
    """Return the questions of docs/README.md, each with the number of Python files to open for its answer."""
    table = (
        (ROOT / "docs/README.md").read_text(encoding="utf-8").split("## Where to look")[1].split("\n## ")[0]
    )
    rows = [line.strip("|").split("|", 1) for line in table.splitlines() if line.startswith("| ")][1:]
    return [(asked.strip(), len(set(re.findall(r"\((\S+\.py)\)", answer)))) for asked, answer in rows]


def main() -> None:
    """Print the tables."""
    print(f"{'use':36} {'modules':>8} {'lines':>8}")
    for use in USES:
        found = imported_by(use)
        print(f"{use:36} {len(found.own):8,} {found.num_lines:8,}", flush=True)
    for arguments in COMMANDS:
        found = imported_by_command(arguments)
        print(f"paged {arguments:30} {len(found.own):8,} {found.num_lines:8,}", flush=True)
    sizes, pairs = rooms(), arrows()
    floors = {room: floor for floor, found in enumerate(LAYERS, 1) for room in found}
    print(f"\n{'room':20} {'floor':>8} {'lines':>8} {'imports':>8}")
    for room, count in sizes.most_common():
        print(f"{room:20} {floors.get(room, ''):>8} {count:8,} {sum(room == pair[0] for pair in pairs):8}")
    print(f"{f'all {len(sizes) - 1} rooms':20} {len(LAYERS):8} {sizes.total():8,} {len(pairs):8}")
    asked = questions()
    print(f"\n{'files':>5} question")
    for question, num_files in asked:
        print(f"{num_files:5} {question}")
    print(f"{sum(count for _, count in asked):5} of {len(asked)} questions")


if __name__ == "__main__":
    main()
