"""What a change of structure must not touch: tokens, the bits of CPU kernels, the public names."""

import pytest

from tests.golden import NUM_PARAMETER_SETS, instruction_set, kernel_results, public_names, recorded, tokens


@pytest.fixture(scope="module")
def record():
    return recorded()


def test_public_names(record):
    assert public_names() == record["public_names"]


def test_tokens(record):
    assert len(record["tokens"]) == NUM_PARAMETER_SETS
    assert tokens() == record["tokens"]
    assert tokens(speculative_config={"method": "suffix"}) == record["tokens"]


def test_bits_of_cpu_kernels(record):
    if instruction_set() not in record["kernels"]:
        pytest.skip(f"tests.golden has recorded nothing for a CPU with {instruction_set()}")
    assert kernel_results() == record["kernels"][instruction_set()]
