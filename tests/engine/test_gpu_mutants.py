"""Seeded bugs of the CUDA path, each of which a step on fake devices shows."""

import pytest

from tests.aot import run_compiler
from tests.gpu_mutants import MUTANTS, SHARES
from tests.mutants import planted
from tests.support.fake_cuda import lacks


def test_every_mutant_is_possible():
    for mutant in MUTANTS:
        planted(mutant.file, mutant.name, mutant.old, mutant.new)  # fails for a text that is not there


@pytest.mark.skipif(lacks() is not None, reason=str(lacks()))
def test_the_first_share_is_caught():
    """`make mutants` tries all SHARES."""
    printed = run_compiler("tests.gpu_mutants", "--share", "0")  # fails if one survives
    num_mutants = len(MUTANTS[::SHARES])
    assert printed.endswith(f"{num_mutants} of {num_mutants} caught\n")
