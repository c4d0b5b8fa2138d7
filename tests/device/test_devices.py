"""What this machine lacks is an error that names a way out, or a warning that it is slow."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace

import pytest
import torch

from paged import ConfigError, EngineConfig, SamplingParams
from paged.device import devices
from paged.device.devices import resolve_device, resolve_dtype
from paged.kernels.backend import load_kernels
from tests.support.checkpoints import checkpoint, new_engine

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:7"])
def test_gpu_that_does_not_exist(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=f"device '{name}' does not exist: torch sees 0 GPUs; device='cpu'"):
        new_engine(checkpoint("llama"), device=name)


def test_auto_is_a_gpu_if_there_is_one(monkeypatch):
    for is_available in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda value=is_available: value)
        assert resolve_device("auto") == (GPU if is_available else CPU)


@pytest.mark.parametrize(
    ("flags", "checkpoint_dtype", "dtype"),
    [
        ("avx2 avx512f avx512_bf16", "bfloat16", "bfloat16"),
        ("avx2 amx_tile amx_bf16", "bfloat16", "bfloat16"),
        ("fp asimd bf16", "bfloat16", "bfloat16"),
        ("avx2 avx512f", "bfloat16", "float32"),
        (None, "bfloat16", "float32"),
        ("avx2 avx512f avx512_bf16", "float16", "float32"),
        ("avx2 avx512f avx512_bf16", "float32", "float32"),
    ],
    ids=str,
)
def test_auto_is_a_dtype_in_which_the_cpu_is_fast(
    monkeypatch, tmp_path, caplog, flags, checkpoint_dtype, dtype
):
    cpuinfo = tmp_path / "cpuinfo"
    if flags is not None:
        cpuinfo.write_text(f"model name\t: some CPU\nflags\t\t: fpu {flags}\n")
    monkeypatch.setattr(devices, "Path", lambda _: cpuinfo)
    with caplog.at_level(logging.INFO, "paged.device.devices"):
        assert resolve_dtype("auto", checkpoint_dtype, CPU, True) == dtype
    said = [f"dtype float32 instead of the checkpoint's {checkpoint_dtype}, in which this CPU is slow"]
    assert caplog.messages == (said if dtype != checkpoint_dtype else [])
    assert resolve_dtype("auto", checkpoint_dtype, GPU, False) == checkpoint_dtype
    wider = "bfloat16" if checkpoint_dtype == "float16" else checkpoint_dtype
    assert resolve_dtype("auto", checkpoint_dtype, GPU, True) == wider


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_slow_dtype_works_and_is_warned_of_once(monkeypatch, caplog, dtype):
    monkeypatch.setattr(devices, "cpu_has_bfloat16", lambda: False)
    devices._warn_of_slow.cache_clear()
    params = SamplingParams(temperature=0.0, max_tokens=4)
    for _ in range(2):
        engine = new_engine(checkpoint("llama"), dtype=dtype)
        (output,) = engine.generate([[1, 2, 3]], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 4
        assert f"in {dtype} on cpu" in engine.describe()
    own = [r for r in caplog.records if r.name == "paged.device.devices"]  # others log that they compile
    warnings = [r.getMessage() for r in own if r.levelno == logging.WARNING]
    assert warnings == [f"dtype {dtype} is slow on this CPU; dtype='auto' chooses one that is not"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"avx2"}, True),
        ({"avx512_bf16"}, True),
        ({"avx512_bf16", "amx_bf16"}, True),
        ({"asimd", "bf16"}, False),
    ],
)
def test_linears_in_bfloat16_are_left_to_torch_where_it_is_faster(monkeypatch, flags, expected):
    monkeypatch.setattr(devices, "cpu_flags", lambda: flags)
    config, kernels = EngineConfig(model="demo"), load_kernels("numba")

    def in_panels(**options):
        return devices.weights_in_panels(replace(config, **options), kernels, CPU, torch.bfloat16)

    assert in_panels() is expected
    assert in_panels(quantization="int8") is expected
    assert in_panels(deterministic=True)
    assert devices.weights_in_panels(config, kernels, CPU, torch.float32)


def test_a_fast_dtype_is_not_warned_of(monkeypatch, caplog):
    monkeypatch.setattr(devices, "cpu_has_bfloat16", lambda: True)
    devices._warn_of_slow.cache_clear()
    assert resolve_dtype("bfloat16", "float32", CPU, True) == "bfloat16"
    assert resolve_dtype("float32", "bfloat16", CPU, True) == "float32"
    assert resolve_dtype("float16", "bfloat16", GPU, True) == "float16"
    assert caplog.messages == []


def test_error_names_triton_if_it_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # if it were installed, a CPU would run it
    with pytest.raises(
        ConfigError, match=r"attention_backend='triton' needs Triton.*attention_backend='torch'"
    ):
        new_engine(checkpoint("llama"), attention_backend="triton")


def test_triton_on_a_cpu_is_an_error(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        ConfigError, match=r"attention_backend='triton' on a CPU.*attention_backend='numba' or 'torch'"
    ):
        new_engine(checkpoint("llama"), attention_backend="triton")
