"""Which files of a directory hold the weights, compared with transformers; each is opened once."""

from __future__ import annotations

import builtins
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.modeling_utils import _get_resolved_checkpoint_files

from paged import CheckpointError
from paged.architectures.config import LLAMA_NAMES
from paged.checkpoints import stored as sources
from paged.checkpoints.safetensors_file import SafetensorsFile
from paged.checkpoints.weight_files import find_weight_files
from paged.model.weights.loading import open_tensors

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
OTHERS = ("consolidated.safetensors", "model.fp16.safetensors", "pytorch_model.bin", "other.safetensors")
NAMES = (SINGLE, INDEX, *SHARDS, *OTHERS)


def theirs(directory: Path, named: str | None) -> list[Path] | None:
    """Return the files that transformers would read, or None if it finds none that exist."""
    options: dict[str, Any] = {
        "variant": None,
        "gguf_file": None,
        "use_safetensors": True,
        "user_agent": None,
    }
    try:
        files, _ = _get_resolved_checkpoint_files(
            str(directory), is_remote_code=False, transformers_explicit_filename=named, **options
        )
    except (OSError, ValueError):
        return None
    return [Path(file) for file in files] if all(map(Path.exists, map(Path, files))) else None


@pytest.mark.parametrize("named", [None, "other.safetensors", INDEX])
def test_the_files_are_those_of_transformers(named, tmp_path, caplog):
    for there in product([False, True], repeat=len(NAMES)):
        chosen = [name for name, is_there in zip(NAMES, there, strict=True) if is_there]
        directory = tmp_path / str(sum(2**i for i, is_there in enumerate(there) if is_there))
        directory.mkdir()
        for name in chosen:
            (directory / name).write_text(
                json.dumps({"metadata": {}, "weight_map": {"a": SHARDS[1], "b": SHARDS[0]}})
            )
        (directory / "config.json").write_text(json.dumps({"transformers_weights": named}))
        expected = theirs(directory, named)
        caplog.clear()
        if expected is None:
            with pytest.raises(CheckpointError, match=r"does not exist|pickle"):
                find_weight_files(directory)
            continue
        assert find_weight_files(directory) == expected
        aside = {*chosen} - {"pytorch_model.bin", *(file.name for file in expected)}
        if expected[0].name in SHARDS:
            aside -= {INDEX}
        listed = [name for name in sorted(aside) if name in caplog.text.partition("ignored")[2]]
        assert len(listed) == min(3, len(aside)), "the log says which files are ignored"


def test_each_file_is_opened_once(tmp_path, monkeypatch):
    """However many tensors it has, and they are read as they were written."""
    tensors = {f"model.layers.{i}.weight": torch.full((2, 3), float(i)) for i in range(60)}
    tensors["model.scalar"] = torch.tensor(7.0)
    places = {name: SHARDS[i % 2] for i, name in enumerate(tensors)}
    for shard in SHARDS:
        save_file({name: tensors[name] for name in tensors if places[name] == shard}, tmp_path / shard)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    opened: list[str] = []
    original = Path.open

    def counted(path: Path, *args: Any, **options: Any) -> Any:
        opened.append(path.name)
        return original(path, *args, **options)

    monkeypatch.setattr(Path, "open", counted)
    monkeypatch.setattr(builtins, "open", lambda *_, **__: pytest.fail("opened otherwise"))
    for dtype in (torch.float32, torch.bfloat16):
        opened.clear()
        destinations = {name: torch.zeros(tensor.shape, dtype=dtype) for name, tensor in tensors.items()}
        with open_tensors(tmp_path, LLAMA_NAMES) as sources:
            for name, destination in destinations.items():
                sources[name].copy_to(destination)
        assert {name: opened.count(name) for name in SHARDS} == dict.fromkeys(SHARDS, 1)
        for name, tensor in tensors.items():
            assert torch.equal(destinations[name], tensor.to(dtype)), name


def test_rows_and_parts_are_those_of_the_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr("paged.checkpoints.stored.TENSOR_PART_BYTES", 100)
    whole = torch.arange(70.0).view(10, 7).bfloat16()
    save_file({"a": whole, "empty": torch.zeros(0, 3)}, tmp_path / "a.safetensors")
    with SafetensorsFile(tmp_path / "a.safetensors") as file:
        tensor = file.tensors["a"]
        assert len(tensor.parts()) == 2
        assert torch.equal(torch.cat([tensor.read(rows) for rows in tensor.parts()]), whole)
        for destination in (torch.zeros(10, 7), torch.zeros(7, 10).bfloat16().t()):
            tensor.copy_to(destination)
            assert torch.equal(destination, whole.to(destination.dtype))
        file.tensors["empty"].copy_to(torch.zeros(0, 3, dtype=torch.float16))
    assert tensor.file._stream.closed


def test_a_file_that_becomes_shorter_is_named(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(1000)}, path)
    with SafetensorsFile(path) as file:
        path.write_bytes(path.read_bytes()[:-8])
        with pytest.raises(CheckpointError, match=r"a\.safetensors: became shorter while it was read"):
            file.tensors["a"].read()


def test_a_large_tensor_has_few_parts(tmp_path, monkeypatch):
    """Each costs a meeting of all threads, which is slow where they share their cores."""
    monkeypatch.setattr(sources, "TENSOR_PART_BYTES", 100)
    whole = torch.arange(7000.0).view(1000, 7).bfloat16()
    save_file({"a": whole}, tmp_path / "a.safetensors")
    with SafetensorsFile(tmp_path / "a.safetensors") as file:
        parts = file.tensors["a"].parts()
        assert len(parts) == sources.MAX_PARTS
        copy = torch.zeros(1000, 7)
        file.tensors["a"].copy_to(copy)
    assert torch.equal(copy, whole.float())
