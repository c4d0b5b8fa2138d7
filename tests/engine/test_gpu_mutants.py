"""Seeded bugs of the CUDA path, each of which a step on fake devices shows."""

import pytest

from tests.aot import run_compiler
from tests.gpu_mutants import MUTANTS
from tests.support.fake_cuda import lacks


@pytest.mark.skipif(lacks() is not None, reason=str(lacks()))
def test_every_mutant_is_caught():
    printed = run_compiler("tests.gpu_mutants")  # fails if one survives
    assert printed.endswith(f"{len(MUTANTS)} of {len(MUTANTS)} caught\n")
