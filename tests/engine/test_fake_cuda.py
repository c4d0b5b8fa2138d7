"""The engine on CUDA devices that are not here: no step fails, and each asks of a device what is written."""

import json
from dataclasses import fields
from importlib.metadata import version

import pytest
from packaging.version import Version

from paged import SamplingParams
from tests.aot import run_compiler
from tests.steps import KINDS, NUM_RANDOM, TABLE, counts_in, errors, rows, table
from tests.support.fake_cuda import lacks
from tests.support.step_cases import CASES, CHANGES, OF_THE_HOST

STALE = "run `python -m tests.steps --write` and look at what changed"
pytestmark = pytest.mark.skipif(lacks() is not None, reason=str(lacks()))
RANDOM = [f"random {seed}" for seed in range(NUM_RANDOM)]


@pytest.fixture(scope="module")
def reported():
    """Return what `python -m tests.steps --json` prints: the interpreter of this process launches nothing."""
    return json.loads(run_compiler("tests.steps", "--json"))


@pytest.fixture(scope="module")
def kept():
    """Return the table; skip with a torch older than it was made with, fail with a newer one."""
    text, installed = TABLE.read_text(), version("torch").partition("+")[0]
    made_with = text.partition("with torch ")[2].partition(";")[0]
    if Version(installed) < Version(made_with):
        pytest.skip(f"{TABLE.name} was made with torch {made_with}, this is {installed}")
    assert installed == made_with, STALE
    return text


def test_no_case_fails(reported):
    assert len(reported) == len(CASES) + NUM_RANDOM >= 80
    assert not errors(reported), "\n".join(errors(reported))


def test_every_parameter_of_sampling_has_a_case():
    changed = {name for change in CHANGES.values() for name in change}
    assert changed | OF_THE_HOST == {field.name for field in fields(SamplingParams)}
    assert changed & OF_THE_HOST <= {"stop_token_ids"}  # min_tokens needs one


def test_no_step_asks_for_more_than_the_table_says(reported, kept):
    """The counts of each step; a smaller one is a stale table, and a larger one a step that got slower."""
    known = counts_in(kept)
    for case, found in counts_in("\n".join(rows({case.name: reported[case.name] for case in CASES}))).items():
        grown = [
            f"{kind}: {before} to {now}"
            for kind, before, now in zip(KINDS, known[case], found, strict=True)
            if now > before
        ]
        assert not grown, f"{case} grew from {', '.join(grown)}"


def test_table_is_fresh(reported, kept):
    assert table({case.name: reported[case.name] for case in CASES}) == kept, STALE


def test_random_combinations_transfer_and_wait_only_where_the_table_says(reported, kept):
    for name in RANDOM:
        assert reported[name]["rows"]
        assert [line for line in reported[name]["places"] if line not in kept] == [], name
