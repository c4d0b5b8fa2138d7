"""Whatever sizes config.json states, nothing much is allocated before the tensors of the files agree."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from paged import CheckpointError, PagedError, ResourceError
from paged.model.decoder import Decoder
from tests.support.checkpoints import checkpoint, edit_json, new_engine

SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "num_experts", "num_local_experts", "moe_intermediate_size"),
    *("n_embd", "n_layer", "n_head", "n_inner", "n_positions", "shared_expert_intermediate_size"),
    *("global_head_dim", "hidden_size_per_layer_input", "vocab_size_per_layer_input"),
)
FAMILIES = ("llama", "glm4", "phi3", "gpt2", "gpt_neox", "gemma4", "qwen3_moe", "qwen2_moe", "gpt_oss")


class Allocations(TorchDispatchMode):
    """Counts the bytes that operations make on a device."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.device.type != "meta" and not made._is_view():
            self.num_bytes += made.nbytes
        return made


def refusal(directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the error of an engine, made with little memory and few modules."""
    num_modules = 0
    init = nn.Module.__init__

    def counting(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        nonlocal num_modules
        num_modules += 1
        init(self, *args, **kwargs)

    with monkeypatch.context() as patch, Allocations() as allocations:
        patch.setattr(nn.Module, "__init__", counting)
        with pytest.raises(PagedError) as caught:
            new_engine(directory)
    size = (directory / "model.safetensors").stat().st_size
    assert allocations.num_bytes < size + 2**20
    assert num_modules < 2000  # of the files with most tensors, which the largest configs do not come near
    return str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_of_10_to_10_000_times_the_files(family, tmp_path, monkeypatch):
    """One of them, and several at once."""
    directory = tmp_path / "model"
    shutil.copytree(checkpoint(family), directory)
    sound = json.loads((directory / "config.json").read_text())
    keys = [key for key in SIZES if isinstance(sound.get(key), int)]
    chance = random.Random(family)
    assert len(keys) > 3
    for chosen in [[key] for key in keys] + [chance.sample(keys, k=2) for _ in range(8)]:
        changes = {key: int(sound[key] * 10 ** chance.uniform(1, 4)) for key in chosen}
        edit_json(directory / "config.json", **(sound | changes))
        message = refusal(directory, monkeypatch)
        assert str(directory) in message, (changes, message)


def test_the_error_names_the_sizes(tmp_path, monkeypatch):
    directory = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), directory)
    for changes, expected in (
        ({"num_hidden_layers": 1024, "hidden_size": 2**17}, "describes 1,024 layers, but the files have 21 "),
        (
            {"vocab_size": 10**7},
            "embed_tokens.weight has shape [211, 48], but config.json makes it [10000000,",
        ),
        (
            {"intermediate_size": 10**6},
            "of hidden_size 48, vocab_size 211), but the tensors of the files have",
        ),
    ):
        edit_json(directory / "config.json", **{"hidden_size": 48, "vocab_size": 211, **changes})
        assert expected in refusal(directory, monkeypatch)
        edit_json(directory / "config.json", num_hidden_layers=2)


@pytest.mark.parametrize("place", ["__init__", "load"])
def test_a_failed_allocation_is_one_error_that_names_the_sizes(place, monkeypatch):
    errors = (
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you"),
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    )
    for error in errors:

        def fail(*_: Any, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(Decoder, place, fail)
        with pytest.raises(
            ResourceError, match=r"no memory for the weights of LlamaForCausalLM .* layers of"
        ):
            new_engine(checkpoint("llama"))


def test_other_errors_are_not_taken_for_a_shortage(monkeypatch):
    def fail(*_: Any) -> None:
        raise CheckpointError("a tensor that nobody could allocate memory for")

    monkeypatch.setattr(Decoder, "load", fail)
    with pytest.raises(CheckpointError):
        new_engine(checkpoint("llama"))
