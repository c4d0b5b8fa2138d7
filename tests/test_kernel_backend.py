"""The kernels as one value: names, errors, and life without Triton."""

import inspect
import subprocess
import sys
import textwrap

import pytest

from paged.kernels import reference
from paged.kernels.backend import load_kernels

OPERATIONS = (
    "rms_norm",
    "rotary_store_kv",
    "silu_and_mul",
    "copy_blocks",
    "paged_attention",
    "apply_penalties",
    "sample_tokens",
)


@pytest.mark.parametrize("name", ["torch", "numba", "triton"])
def test_signatures_are_those_of_the_reference(name):
    kernels = load_kernels(name)
    assert kernels.name == name
    for operation in OPERATIONS:
        expected = inspect.signature(getattr(reference, operation))
        assert inspect.signature(getattr(kernels, operation)) == expected


def test_unknown_backend_names_the_choices():
    with pytest.raises(ValueError, match="'triton', 'numba', 'torch', got 'cuda'"):
        load_kernels("cuda")


def test_torch_backend_needs_no_triton():
    script = """
        import sys
        sys.modules["triton"] = None  # as if it were not installed
        from paged.kernels.backend import load_kernels
        load_kernels("torch")
        try:
            load_kernels("triton")
        except ImportError as error:
            assert "pip install triton" in str(error), error
        else:
            raise SystemExit("no ImportError")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)
