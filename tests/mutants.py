"""Mutation tests: bugs are planted one at a time, and tests must notice each.

    python -m tests.mutants                         # the bugs with names in tests/support/bugs
    python -m tests.mutants rope decoder.py         # those with one of these words in their names or files
    python -m tests.mutants --sample 6 --seed 1     # some of them
    python -m tests.mutants --share                 # what CI tries: a few of both kinds
    python -m tests.mutants --folder blocks --sample 50 --jobs 2   # plain mutations of a folder or a file

Exit code 1 if a larger share survives than --survivors allows. A sample depends on the seed and on what is
chosen from alone: an edit of the product changes it only where it changes what was chosen.
"""

import argparse
import difflib
import functools
import hashlib
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support import plain_mutations, planting, trials
from tests.support.plain_mutations import Mutation
from tests.support.planting import ROOT, Bug, Change
from tests.support.trials import Result, Trial

_OF_BLOCKS = [f"tests/blocks/test_block_{name}.py" for name in ("pool", "manager", "snapshots")]
_OF_SCHEDULER = [
    f"tests/scheduler/test_{name}.py"
    for name in ("scheduler", "drafts", "preemption", "held", "policies", "ahead")
]
_OF_SAMPLING = [f"tests/sampling/test_{name}.py" for name in ("draft_rows", "dry", "logprobs", "sampler")]
CORE = ("worlds 0 16", "\n".join([*_OF_BLOCKS, *_OF_SCHEDULER]), "worlds 16 100")
# What looks for bugs in a folder or a file, in the order that takes the least time; a line for each argument.
LOOKS = {
    "blocks": CORE,
    "scheduler": CORE,
    "requests": ("tests/requests", *CORE),
    "drafting": ("tests/drafting", *CORE),
    "runner/plan.py": ("tests/runner/test_plan.py", *CORE),
    "ranks/messages.py": ("tests/ranks/test_messages.py", "worlds 0 16"),
    "grammars": ("tests/grammars",),
    "sampling": ("\n".join(_OF_SAMPLING),),
    "server/access/limits.py": ("tests/server/test_limits.py",),
    "model/layers": ("tests/engine/test_matches_transformers.py\n-k\nragged and torch",),
    "kernels/plain": ("tests/ops\n-k\ntorch and not triton and not numba\n--ignore-glob=*pu/*",),
}
# What CI tries takes little time. Bugs with names, the seed of the sample; plain mutations of `blocks`.
NUM_BUGS, SEED, NUM_MUTATIONS = 3, 9, 2


def looks_at(file: Path) -> tuple[str, ...]:
    """Return what looks for bugs in a file of the product."""
    path = file.relative_to(ROOT / "paged")
    found = [LOOKS[f"{above}"] for above in (path, *path.parents) if f"{above}" in LOOKS]
    if not found:
        raise LookupError(f"tests.mutants.LOOKS has nothing for {path}, but for {', '.join(LOOKS)}")
    return found[0]


@functools.cache
def _tests() -> list[tuple[str, Path]]:
    tests = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [(name, file.relative_to(ROOT)) for file in files for name in tests.findall(file.read_text())]


@functools.cache
def _has_cases(file: Path, function: str) -> bool:
    found = re.search(
        rf"((?:^@.*\n(?:[ )\]}}].*\n)*)+)(?:async )?def {function}\(", (ROOT / file).read_text(), re.M
    )
    return found is not None and "parametrize" in found[1]


def trial_of(mutant: Bug | Mutation) -> Trial:
    """Return the trial of a mutant: by its own test if it names one."""
    change = mutant.change()
    if isinstance(mutant, Mutation) or not mutant.test:
        return Trial(mutant.name, looks_at(change.file), change)
    look, name = mutant.test, f"{mutant.part}: {mutant.name}".removeprefix(": ")
    if not look.startswith("step "):
        head, bracket, case = look.partition("[")
        file, _, function = head.rpartition("::")
        files = [each for known, each in _tests() if known == function and f"{each}".endswith(file)]
        if len(files) != 1:
            raise LookupError(f"bug {name!r}: {len(files)} files of tests have {head}, not one")
        if bracket and not _has_cases(files[0], function):
            raise LookupError(f"bug {name!r}: {head} has no cases")
        look = f"{files[0]}::{function}{bracket}{case}"
    return Trial(name, (look,), change)


def chosen(mutants: Sequence[Bug | Mutation], count: int | None, seed: int) -> list[Bug | Mutation]:
    """Choose the mutants with the lowest hashes."""
    hashes = [hashlib.sha256(f"{seed} {mutant.name}".encode()).digest() for mutant in mutants]
    most = max(sorted(hashes)[:count], default=b"")
    return [mutant for mutant, own in zip(mutants, hashes, strict=True) if own <= most]


def share() -> list[Bug | Mutation]:
    """Return what CI tries."""
    of_blocks = chosen(plain_mutations.mutations("blocks"), NUM_MUTATIONS, 0)
    return [*chosen(planting.bugs(), NUM_BUGS, SEED), *of_blocks]


def diff(change: Change) -> str:
    """Return the changed lines, under the file and the line."""
    old, new = change.file.read_text().splitlines(), change.text.splitlines()
    lines = [*difflib.unified_diff(old, new, lineterm="", n=0)][3:]
    return "\n    ".join([f"{change.file.relative_to(ROOT)}:{change.line}", *lines])


def summary(found: Sequence[Result], most: float) -> tuple[str, bool]:
    """Say what survives, and how many do not; and whether the share of survivors is above `most`."""
    survivors = [result.trial for result in found if not result.found]
    lines = [f"SURVIVES {t.name}\n    {diff(t.change)}" for t in survivors if t.change is not None]
    lines.append(f"{len(found) - len(survivors)} of {len(found)} caught")
    return "\n".join(lines), len(survivors) > most * len(found)


def main() -> None:
    """Try mutants."""
    layout = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.mutants", description=__doc__, formatter_class=layout)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--folder", help=f"one of {', '.join(LOOKS)}, or a file or a folder in one")
    parser.add_argument("--sample", type=int, help="try so many; by default all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--share", action="store_true", help="try what CI tries")
    parser.add_argument("--jobs", type=int, default=1, help="trials at once")
    parser.add_argument("--survivors", type=float, help="default: 0.25 in a folder, 0 of bugs with names")
    parser.add_argument("--no-control", action="store_true", help="do not try the tests without a bug first")
    args = parser.parse_args()
    mutants: Sequence[Bug | Mutation] = planting.bugs()
    most = 0.0
    if args.folder is not None:
        mutants, most = plain_mutations.mutations(args.folder), 0.25
    if args.words:
        mutants = [mutant for mutant in mutants if any(word in f"{mutant}" for word in args.words)]
    mutants = share() if args.share else chosen(mutants, args.sample, args.seed)
    if not mutants:
        sys.exit(f"there is no bug with {' or '.join(args.words)}")
    try:
        tried = [*map(trial_of, mutants)]
    except LookupError as error:
        sys.exit(f"{error}")
    if not args.no_control:
        looks = dict.fromkeys(look for trial in tried for look in trial.looks)
        for result in trials.results([Trial(look, (look,), None) for look in looks], args.jobs):
            print(f"no bug: {result.seconds:5.1f} s  {' '.join(result.trial.name.split())}", flush=True)
            if result.found:
                sys.exit(f"no bug is planted, and this fails: {result.found}")
    started = time.perf_counter()
    found = list[Result]()
    for result in trials.results(tried, args.jobs):
        found.append(result)
        said = f"{result.trial.name} | {result.found or 'SURVIVES'}"
        print(f"{len(found):4} of {len(tried)} {result.seconds:5.1f} s  {said}", flush=True)
    said, is_too_many = summary(found, most if args.survivors is None else args.survivors)
    print(f"{said}, {time.perf_counter() - started:.0f} s")
    sys.exit(int(is_too_many))


if __name__ == "__main__":
    main()
