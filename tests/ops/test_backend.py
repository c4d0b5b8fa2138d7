"""The kernels as one value: names, errors, and life without Triton."""

import ast
import inspect
import os
import subprocess
import sys
import textwrap
from unittest.mock import Mock

import pytest
import torch

from paged.kernels import reference
from paged.kernels.backend import load_kernels
from paged.kernels.gpu import target
from paged.kernels.operations import Kernels
from tests.support.checkpoints import checkpoint, new_engine

# Those of `Kernels` that the reference defines, in its order.
OPERATIONS = [
    name
    for name, value in vars(Kernels).items()
    if inspect.isfunction(value) and not name.startswith("_") and hasattr(reference, name)
]


def test_the_reference_has_the_order_of_the_operations():
    body = ast.parse(inspect.getsource(reference)).body
    names = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    assert [name for name in names if name in OPERATIONS] == OPERATIONS
    assert len(OPERATIONS) > 20


@pytest.mark.parametrize("name", ["torch", "numba", "triton"])
def test_signatures_are_those_of_the_reference(name):
    kernels = load_kernels(name)
    assert kernels.name == name
    for operation in OPERATIONS:
        expected = inspect.signature(getattr(reference, operation))
        assert inspect.signature(getattr(kernels, operation)) == expected


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", ["torch", "numba", "triton"])
def test_every_call_is_checked_first(name, operation):
    """And of `checked=False` only what is checked once for each plan, or each combination of arguments."""
    call = getattr(load_kernels(name), operation)
    wrong = {parameter: object() for parameter in inspect.signature(call).parameters}
    with pytest.raises(ValueError, match=r" must be .*, got"):
        call(**wrong)
    bare = getattr(load_kernels(name, checked=False), operation)
    assert inspect.signature(bare) == inspect.signature(call)
    if name != "triton" and operation != "paged_attention":
        with pytest.raises((AttributeError, TypeError)):
            bare(**wrong)


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_an_engine_calls_bare_operations_but_in_debug_mode(backend, monkeypatch):
    def operation() -> object:
        engine = new_engine(checkpoint("llama"), attention_backend=backend)
        return engine.runner.model.kernels.rms_norm

    assert operation() is load_kernels(backend, checked=False).rms_norm
    monkeypatch.setenv("PAGED_DEBUG", "1")
    assert operation() is load_kernels(backend).rms_norm


def test_unknown_backend_names_the_choices():
    with pytest.raises(ValueError, match="'triton', 'numba', 'torch', got 'cuda'"):
        load_kernels("cuda")


def test_triton_says_where_it_can_launch(monkeypatch):
    """Not on a CPU but in its interpreter, and not on a GPU that is not the current one."""
    driver = pytest.importorskip("triton.runtime").driver
    kernels, x = load_kernels("triton"), torch.ones(2, 4)
    monkeypatch.setattr(target, "in_interpreter", lambda: False)
    no_gpu = Mock(**{"get_active_torch_device.side_effect": RuntimeError("0 active drivers")})
    monkeypatch.setattr(driver, "_active", no_gpu)
    with pytest.raises(ValueError, match=r"x is on cpu, and Triton finds no GPU here.*TRITON_INTERPRET=1"):
        kernels.silu_and_mul(x)
    second = Mock(**{"get_active_torch_device.return_value": torch.device("cuda:1")})
    monkeypatch.setattr(driver, "_active", second)
    with pytest.raises(ValueError, match="x must be on the current device cuda:1, got cpu"):
        kernels.silu_and_mul(x)


def test_without_numba_an_engine_runs_plain_and_says_so():
    script = """
        import logging, sys
        sys.modules["numba"] = None  # as if it were not installed
        logging.basicConfig(stream=sys.stdout)
        from paged import ConfigError, LLMEngine, SamplingParams
        options = dict(device="cpu", skip_tokenizer_init=True, num_blocks=8)
        engine = LLMEngine("demo", **options)
        assert "attention by torch" in engine.describe(), engine.describe()
        (output,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)
        assert output.outputs[0].token_ids
        for wanted in ({"attention_backend": "numba"}, {"deterministic": True}):
            try:
                LLMEngine("demo", **options, **wanted)
            except ConfigError as error:
                assert "numba" in str(error), error
            else:
                raise SystemExit(f"{wanted} without numba")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "numba is not installed" in said
    assert "pip install 'paged[cpu]'" in said


def test_nowhere_to_keep_compiled_kernels_is_an_error_with_a_way_out():
    script = """
        from paged import ConfigError, LLMEngine
        try:
            LLMEngine("demo", device="cpu", skip_tokenizer_init=True, num_blocks=8)
        except ConfigError as error:
            assert "set NUMBA_CACHE_DIR" in str(error), error
        else:
            raise SystemExit("no ConfigError")
    """
    nowhere = {**os.environ, "NUMBA_CACHE_DIR": os.devnull}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, env=nowhere)


def test_torch_backend_needs_no_triton():
    script = """
        import sys
        sys.modules["triton"] = None  # as if it were not installed
        from paged.kernels.backend import load_kernels
        from paged.kernels.operations import Kernels
        load_kernels("torch")
        try:
            load_kernels("triton")
        except ImportError as error:
            assert "pip install triton" in str(error), error
        else:
            raise SystemExit("no ImportError")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)
