"""Variants of kernels: an engine announces all that it launches, and a variant computes the kernel's bits."""

import subprocess
import sys
from itertools import cycle

import pytest
import torch

pytest.importorskip("numba")

from paged import LLMEngine, SamplingParams
from paged.kernels.cpu import backend, variants
from paged.kernels.cpu.formats import BFLOAT16
from paged.kernels.cpu.launch import code_cache, machine_code, tasks
from paged.kernels.cpu.rows import rotary_store_kv
from paged.kernels.cpu.variants import ATTENTION_KERNEL, LINEAR_KERNEL, ROTARY_KERNEL
from tests.support.checkpoints import checkpoint

# Families that together have every kind of layer, and options that go round.
FAMILIES = (
    *("llama-tied-bias", "ministral3", "qwen3", "phi3-longrope", "granite", "gemma4", "gemma4-experts"),
    *("glm4", "qwen2_moe", "gpt2", "gpt_oss", "granitemoe", "gpt_neox"),
)
OPTIONS = (
    {"dtype": "bfloat16"},
    {"dtype": "float32"},
    {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    {"dtype": "float16"},
    {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
)
WAYS = (
    {"temperature": 0.0, "logprobs": 2},
    {"seed": 1, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2},
    {
        "temperature": 0.0,
        "dry_multiplier": 0.8,
        "dry_sequence_breakers": (),
        "logit_bias": {3: 1.0},
        "allowed_token_ids": [3, 4],
    },
)


@pytest.fixture
def launched(monkeypatch):
    """Note what is launched: names of kernels, and pairs of a name and a kind of those with variants."""
    found, run, require = set(), tasks.Task.run, tasks.VariantTask.require

    def note_run(task, *args, **fields):
        found.add(task.name)
        return run(task, *args, **fields)

    def note_kinds(task, *kinds):
        found.update((task.name, kind) for kind in kinds)
        require(task, *kinds)

    monkeypatch.setattr(tasks.Task, "run", note_run)
    monkeypatch.setattr(tasks.VariantTask, "require", note_kinds)
    return found


@pytest.fixture
def announced(monkeypatch):
    found = set()

    def note(needs):
        names, kinds = variants.kernels_for(needs)
        found.update(names, ((name, kind) for name, own in kinds.items() for kind in own))
        return names, kinds

    monkeypatch.setattr(backend, "kernels_for", note)
    return found


@pytest.mark.parametrize(
    ("family", "options"), [*zip(FAMILIES, cycle(OPTIONS)), ("demo", {"quantization": "int4"})], ids=str
)
def test_no_kernel_is_launched_that_was_not_announced(family, options, launched, announced):
    """A request would wait until it is compiled."""
    model = family if family == "demo" else str(checkpoint(family))
    engine = LLMEngine(model, device="cpu", skip_tokenizer_init=True, num_blocks=64, **options)
    ways = [SamplingParams(max_tokens=2, ignore_eos=True, **params) for params in WAYS]
    engine.generate([[5, 6, 7, i] for i in range(len(ways))], ways, use_tqdm=False)
    assert LINEAR_KERNEL in launched
    assert launched <= announced, launched - announced


def test_what_an_engine_announces_is_little():
    """The demo's: no kernel of another activation, of experts, or of other numbers."""
    engine = LLMEngine("demo", num_blocks=16, max_model_len=64)
    kernels = {code_cache.parts(name)[0] for name in code_cache.needed}
    assert engine.runner.dtype == torch.bfloat16
    assert code_cache.needed
    assert {"sampling.sample_tokens.sample", ATTENTION_KERNEL, ROTARY_KERNEL} <= kernels


ROTARY_OF_BFLOAT16 = f"{ROTARY_KERNEL}+{BFLOAT16}"


def rotated(dtype):
    generator = torch.Generator().manual_seed(1)
    caches = torch.zeros(2, 4, 16, 2, 64, dtype=dtype)
    qkv = torch.randn(5, 8, 64, generator=generator).to(dtype)
    angles = torch.randn(5, 32, generator=generator)
    slots = torch.tensor([3, 20, 21, 40, 63])
    query = rotary_store_kv.rotary_store_kv(qkv, angles.cos(), angles.sin(), *caches, slots)
    return torch.cat([query.flatten(), caches.flatten()])


def test_a_variant_computes_the_same_bits_and_nothing_else(tmp_path, monkeypatch):
    wanted = rotated(torch.bfloat16)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(code_cache, "announced", {})
    command = [sys.executable, "-m", "paged.kernels.cpu.compiling", "longest", ROTARY_OF_BFLOAT16]
    subprocess.run(command, check=True)
    assert [file.name.split("-")[0] for file in tmp_path.glob("*.o")] == [ROTARY_OF_BFLOAT16]
    assert code_cache.missing_kernels([ROTARY_OF_BFLOAT16, ROTARY_KERNEL]) == [ROTARY_KERNEL]
    own = rotary_store_kv.ROTARY_STORE_KV
    fresh = tasks.VariantTask(own.name, own.pointers, own._own[len(own.pointers) : -1], own._own[-1:])
    monkeypatch.setattr(rotary_store_kv, "ROTARY_STORE_KV", fresh)
    assert torch.equal(rotated(torch.bfloat16).view(torch.int16), wanted.view(torch.int16))
    assert fresh._kinds == {BFLOAT16}

    # Numbers of another kind take the kernel for all of them, which is compiled if need be.
    def compile_kernel(name):
        raise ImportError(f"{name} is compiled")

    monkeypatch.setattr(machine_code._compiled("kernels"), "compile_kernel", compile_kernel)
    with pytest.raises(ImportError, match=f"^{ROTARY_KERNEL} is compiled$"):
        rotated(torch.float32)
