"""What the kernels compile to for GPUs that are not here: a table of figures, read out of the binaries.

Figures are kept by key, which stands for all that a binary follows from: each run compiles what is not
known, and of what is known one case of SHARES, each on one target.

    python -m tests.aot sm_90          # one target's table; needs TRITON_INTERPRET unset
    python -m tests.aot sm_90 --json <tests/kernel_figures.json    # the same for the tests
    python -m tests.aot --write        # compiles all, and keeps what it finds: table and known figures
    python -m tests.aot --update       # the same, but of what is known compiles that share only
    python -m tests.aot --check sm_120 # compiles attention for every case, not only the common ones, and says
                                       # what spills or does not fit
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import triton

from paged.kernels.backend import load_kernels
from paged.kernels.checks import TrustedContents
from tests.support.absent_gpu import (
    CONSUMER_TARGETS,
    DATA_CENTER_TARGETS,
    TARGETS,
    Launch,
    compiling,
    never,
)
from tests.support.binary_figures import SHARED_LIMITS, figures
from tests.support.kernel_launches import (
    ATTENTION_CASES,
    CODED_CASES,
    COMMON_CASES,
    COMMON_CODED_CASES,
    COMMON_EXPERTS_CASES,
    DTYPES,
    EXPERTS_CASES,
    NUM_CODED_ROWS,
    NUM_EXPERTS_ROWS,
    ROTARY_CASES,
    VOCAB_SIZE,
    AttentionCase,
    experts_of,
    has_case,
    launch_attention,
    launch_coded_linear,
    launch_coded_rows,
    launch_grouped_linear,
    launch_rotary_store_kv,
    launch_routing,
    launch_sampling,
    other_launches,
    packed_of,
    targets_of,
)

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "kernels" / "gpu" / "COMPILED.md"
KNOWN = ROOT / "tests" / "kernel_figures.json"
SHARES = 8
SHARED = ("plan", "merge", "add_splits")  # kernels that several cases may share
Figures = Mapping[str, float]


def known_figures() -> dict[str, Figures]:
    """Return the figures of the kernels by key, as --write found them."""
    found: dict[str, Figures] = json.loads(KNOWN.read_text())
    return found


def report(target: str, known: Mapping[str, Figures]) -> list[dict[str, Any]]:
    """Return a row of figures for each kernel that the cases need on `target`: known, or compiled now."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    with TrustedContents():  # the tensors hold nothing
        launches = [
            *_attention(target, known),
            *_others(target, known),
            *_coded(target, known),
            *_experts(target, known),
        ]
    for case, launch in launches:
        name = launch.kernel.strip("_").removesuffix("_kernel")
        place = (name, "" if name in SHARED else case, launch.key)
        compiled = launch.binary is not None
        if place not in rows or compiled > rows[place]["compiled"]:
            found = figures(target, launch.binary) if launch.binary else known[launch.key]
            case = rows[place]["case"] if place in rows else case
            rows[place] = {"kernel": name, "case": case, "key": launch.key, "compiled": compiled, **found}
    return list(rows.values())


def _attention(target: str, known: Mapping[str, Figures]) -> list[tuple[str, Launch]]:
    rows = []
    for number, case in enumerate(ATTENTION_CASES):
        targets = tuple(
            name
            for name in TARGETS
            if has_case(name, case) and (name not in CONSUMER_TARGETS or case in COMMON_CASES)
        )
        if target in targets:
            rows += _launches(case, target, _skip(number, target, known, targets))
    return rows


def _launches(case: AttentionCase, target: str, skip: Callable[[str], bool]) -> list[tuple[str, Launch]]:
    head_dim, group, dtype, block_size, options = case
    told = " ".join([f"{head_dim}x{group} {dtype} block {block_size}", *map(_told, options.items())])
    with compiling(target, skip) as launches:
        launch_attention(load_kernels("triton"), head_dim, group, DTYPES[dtype], block_size, **options)
    return [(told, launch) for launch in launches]


def check(target: str) -> int:
    """Compile attention for every case that a target has; print what is wrong, and return how much it is."""
    wrong = 0
    for case in ATTENTION_CASES:
        if not has_case(target, case):
            continue
        with TrustedContents():
            launches = _launches(case, target, never)
        for told, launch in launches:
            found = figures(target, launch.binary)
            if found["stack"] or found["local"] or found["shared"] > SHARED_LIMITS[target]:
                print(launch.kernel, told, found, flush=True)
                wrong += 1
    return wrong


def _others(target: str, known: Mapping[str, Figures]) -> list[tuple[str, Launch]]:
    kernels = load_kernels("triton")
    rows = []
    for number, (num_heads, num_kv_heads, head_dim, dtype, norm, cache) in enumerate(ROTARY_CASES):
        targets = targets_of(cache)
        if target not in targets:
            continue
        told = (f"{num_heads}/{num_kv_heads}x{head_dim}", dtype, norm, f"cache {cache}" if cache else "")
        case = " ".join(filter(None, told))
        with compiling(target, _skip(number, target, known, targets)) as launches:
            heads = num_heads, num_kv_heads, head_dim
            launch_rotary_store_kv(kernels, *heads, DTYPES[dtype], norm, cache_dtype=cache)
        rows += [(case, launch) for launch in launches]
    with compiling(target, _skip(0, target, known)) as launches:
        for told, call in other_launches(kernels, torch.bfloat16):
            before = len(launches)
            call()
            rows += [(f"bfloat16 {told}".rstrip(), launch) for launch in launches[before:]]
    with compiling(target, _skip(3 * SHARES, target, known)) as launches:
        launch_routing(kernels, torch.bfloat16)
    rows += [("bfloat16", launch) for launch in launches]
    with compiling(target, _skip(SHARES, target, known)) as launches:
        launch_sampling()
    rows += [(f"vocabulary {VOCAB_SIZE}", launch) for launch in launches]
    with compiling(target, _skip(2 * SHARES, target, known)) as launches:
        launch_sampling("top_n_sigma", "top_k")
    without = {launch.key for _, launch in rows}
    case = f"vocabulary {VOCAB_SIZE} filters"
    return rows + [(case, launch) for launch in launches if launch.key not in without]


def _coded(target: str, known: Mapping[str, Figures]) -> list[tuple[str, Launch]]:
    rows = []
    for number, case in enumerate(CODED_CASES):
        is_common = case in COMMON_CODED_CASES
        targets = tuple(TARGETS) if is_common else tuple(DATA_CENTER_TARGETS)
        if target not in targets:
            continue
        kind, dtype, num_outputs, num_inputs, group = case
        told = f"{kind} {dtype} {num_outputs}x{num_inputs} by {group}"
        weight = packed_of(case)
        # One case in every run: that is six kernels.
        skip = known.__contains__ if number else _skip(0, target, known, targets)
        with compiling(target, skip) as launches:
            for rows_told, num_rows in NUM_CODED_ROWS.items():
                before = len(launches)
                launch_coded_linear(case, weight, num_rows)
                rows += [(f"{told}, {rows_told} rows", launch) for launch in launches[before:]]
            launch_coded_rows(case, weight, 5)
        rows.append((told, launches[-1]))
    return rows


def _experts(target: str, known: Mapping[str, Figures]) -> list[tuple[str, Launch]]:
    rows = []
    for number, case in enumerate(EXPERTS_CASES):
        targets = tuple(TARGETS) if case in COMMON_EXPERTS_CASES else tuple(DATA_CENTER_TARGETS)
        if target not in targets:
            continue
        kind, dtype, num_experts, num_outputs, num_inputs, group = case
        told = f"{num_experts} {kind} {dtype} {num_outputs}x{num_inputs} by {group}".removesuffix(" by 1")
        weight = experts_of(case)
        # One case in every run: that is three kernels.
        skip = known.__contains__ if number else _skip(0, target, known, targets)
        with compiling(target, skip) as launches:
            for rows_told, num_rows in NUM_EXPERTS_ROWS.items():
                launch_grouped_linear(case, weight, num_rows)
                rows.append((f"{told}, {rows_told} rows", launches[-1]))
    return rows


def _skip(
    number: int, target: str, known: Mapping[str, Figures], targets: tuple[str, ...] = tuple(TARGETS)
) -> Callable[[str], bool]:
    """Compile one case of SHARES on one target in every run; what is left only if it is not known."""
    turn, place = divmod(number, SHARES)
    is_its_turn = place == 0 and target == targets[turn % len(targets)]
    return never if is_its_turn else known.__contains__


def _told(option: tuple[str, Any]) -> str:
    name, value = option
    return name if value is True else f"no {name}" if value is False else f"{name} {value}"


COLUMNS = {
    "registers": "registers",
    "shared": "shared memory",
    "blocks_per_sm": "blocks per SM",
    "instructions": "instructions",
    "tensor": "tensor core instructions",
    "wide": "wide loads",
}


def table(target: str, rows: list[dict[str, Any]]) -> str:
    """Format the figures of one target as Markdown."""
    lines = [
        f"## {target}\n",
        "| kernel | case | " + " | ".join(COLUMNS.values()) + " |",
        "|---|---|" + "---:|" * len(COLUMNS),
    ]
    for row in rows:
        values = {
            **row,
            "tensor": sum(row.get(name, 0) for name in ("wgmma", "mma", "tcgen05", "mfma", "wmma")),
            "wide": row.get("async_copies", 0) + row.get("loads_16B", 0),
        }
        cells = [row["kernel"], row["case"], *(str(values.get(name, "")) for name in COLUMNS)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


README = """# What the kernels compile to

Made by `python -m tests.aot --write` with Triton {version} and no GPU; a test fails when it is stale.
Nothing spills, but for 8 bytes of rotary_store_kv with 7 heads of 16 in float16 on sm_100. Registers are per
thread, shared memory is in bytes per block; blocks per SM follow from both.
Instructions are the machine code's bytes over the 16 of each, the padding behind them included; on AMD those
listed. Tensor core instructions are wgmma (sm_90), tcgen05 (sm_100), mma (sm_80, sm_86, sm_89, sm_120, and
where a block has less than 64 rows), counted in the PTX, MFMA (gfx942) and WMMA (gfx1100, whose "SM" is a
WGP). Wide loads are asynchronous copies of 16 bytes, by TMA of a tile, on AMD loads of 16 bytes. A case names
head_dim x GQA group, dtype, tokens of a block and options; or of a weight in codes its kind, the dtype of x,
outputs x inputs, the inputs of a group and how many rows x has; in front of weights of experts is how many
these are, and the rows are those of each.

The GPUs of data centers have every case, those of desktops and workstations ({consumer}) the common ones;
`python -m tests.aot --check TARGET` compiles the others too and lists those that spill there.

"""


def readme(reports: dict[str, list[dict[str, Any]]]) -> str:
    """kernels/README.md from the reports of all targets."""
    return README.format(version=triton.__version__, consumer=", ".join(CONSUMER_TARGETS)) + "\n".join(
        map(table, reports, reports.values())
    )


def reports(known: Mapping[str, Figures]) -> dict[str, list[dict[str, Any]]]:
    """Return the reports for all targets, each from a process with an empty cache of its own."""

    def of(target: str) -> Any:
        return json.loads(run_compiler("tests.aot", target, "--json", given=json.dumps(known)))

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(TARGETS, pool.map(of, TARGETS), strict=True))


def run_compiler(*arguments: str, given: str = "") -> str:
    """Run a module with a compiler, an empty cache and this standard input; return what it prints."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_CACHE_DIR": cache}
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, "-m", *arguments]
        done = subprocess.run(command, input=given, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def write(rows: dict[str, list[dict[str, Any]]]) -> None:
    """Write the table and the figures of what was compiled."""
    TABLE.write_text(readme(rows))
    known = {row["key"]: figures_of(row) for row in chain.from_iterable(rows.values())}
    lines = [f"{json.dumps(key)}: {json.dumps(known[key])}" for key in sorted(known)]
    KNOWN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def figures_of(row: dict[str, Any]) -> Figures:
    """Return a row without its names."""
    return {name: row[name] for name in row if name not in ("kernel", "case", "key", "compiled")}


if __name__ == "__main__":
    if sys.argv[1:] in (["--write"], ["--update"]):
        write(reports(known_figures() if sys.argv[1] == "--update" else {}))
    elif sys.argv[1:2] == ["--check"]:
        sys.exit(check(sys.argv[2]) > 0)
    elif sys.argv[2:] == ["--json"]:
        json.dump(report(sys.argv[1], json.load(sys.stdin)), sys.stdout)
    else:
        print(table(sys.argv[1], report(sys.argv[1], known_figures())))
