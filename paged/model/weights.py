"""Check the files of a checkpoint and copy its weights into parameters. Safetensors only."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError
from ..validation import shown
from .config import LLAMA_NAMES, TensorNames
from .hf_config import check_file, read_json

PICKLES = (".bin", ".pt", ".pth", ".ckpt")
SAFETENSORS_DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes of an element
HEADER_CEILING = 100 * 2**20
MAX_RANK = 8
COMPARED_BYTES = 64 * 2**20  # of each of two tensors at once
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
INDEX = "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class StoredTensor(NamedTuple):
    """Where a tensor is: a file, and its name there, which may be longer than that in the decoder."""

    file: Path
    name: str
    shape: list[int]


Sources = Mapping[str, StoredTensor]  # by the name in the decoder
Entry = tuple[str, list[int], int, int]  # dtype, shape, start and end of a tensor in a file


def load_weights(destinations: Mapping[str, Tensor], sources: Sources) -> None:
    """Copy tensors from where `find_tensors` found them to their destinations, casting to their dtypes."""
    for name, destination in destinations.items():
        # Open the file for each tensor: mapped pages stay in memory until it is closed, and would double the
        # memory that loading takes.
        file, name_there, _ = sources[name]
        try:
            with safe_open(file, framework="pt") as tensors:
                destination.copy_(tensors.get_tensor(name_there))
        except SafetensorError as error:
            raise CheckpointError(f"{file}: {name_there} cannot be read: {error}") from error


def check_weights(
    destinations: Mapping[str, Tensor], sources: Sources, names: TensorNames, directory: Path
) -> None:
    """Compare what `find_tensors` found with the destinations, which may be on the meta device.

    Raises CheckpointError, which names file and tensor, for tensors that are missing, unknown or of another
    shape.
    """
    _check_names(destinations, sources, names, directory)
    for name, destination in destinations.items():
        file, name_there, shape = sources[name]
        if shape != list(destination.shape):
            raise CheckpointError(
                f"{file}: {name_there} has shape {shape}, but config.json makes it {list(destination.shape)}"
            )


def has_own_head(sources: Sources) -> bool:
    """Return whether there is an output head that differs from the embedding.

    The two are then not tied, whatever config.json says, which often has a default there. Some checkpoints
    carry a copy of the embedding.
    """
    if HEAD not in sources or EMBEDDING not in sources:
        return False
    head, embedding = sources[HEAD], sources[EMBEDDING]
    if head.shape != embedding.shape or len(head.shape) != 2:
        return True
    rows = max(1, COMPARED_BYTES // (4 * max(1, head.shape[1])))
    try:
        with safe_open(head.file, framework="pt") as one, safe_open(embedding.file, framework="pt") as other:
            slices = one.get_slice(head.name), other.get_slice(embedding.name)
            return not all(
                torch.equal(*(part[start : start + rows].float() for part in slices))
                for start in range(0, head.shape[0], rows)
            )
    except SafetensorError as error:
        raise CheckpointError(f"{head.file}: {head.name} cannot be read: {error}") from error


def find_tensors(directory: Path, names: TensorNames) -> dict[str, StoredTensor]:
    """Find every tensor of the decoder in the headers of a checkpoint's files.

    Raises CheckpointError, which names file and tensor, for damaged files and for tensors of no known part.
    """
    index = directory / INDEX
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index}: has no weight_map")
        files = [directory / name for name in sorted(set(map(str, weight_map.values())))]
    else:
        files = [directory / "model.safetensors"]
    found: dict[str, StoredTensor] = {}
    for file in files:
        if file.parent != directory:
            raise CheckpointError(f"{index}: {file.name} lies outside the checkpoint")
        if not os.path.isfile(file):  # Path.is_file would raise for a name that is too long
            raise _missing_file(file)
        for name, shape in read_header(file, names).items():
            own_name = names.in_decoder(name)
            if own_name is None:
                raise _unknown(file, [name])
            if (known := found.get(own_name)) is not None:
                again = "" if known.name == name else f", as {known.name}"
                raise CheckpointError(f"{file}: {name} is in {known.file.name} too{again}")
            found[own_name] = StoredTensor(file, name, shape)
    return found


def _missing_file(file: Path) -> CheckpointError:
    pickles = sorted(p.name for p in file.parent.iterdir() if p.suffix in PICKLES)
    if pickles:
        return CheckpointError(
            f"{file.parent}: {pickles[0]} is a pickle, which can run any code when loaded and is refused; "
            f"convert the checkpoint to safetensors (save_pretrained in transformers)"
        )
    if file.name != "model.safetensors":
        return CheckpointError(f"{file} does not exist, and {INDEX} says that it has tensors; fetch it again")
    message = f"{file} does not exist, nor {INDEX}, which names the files of a larger checkpoint"
    for other in sorted(file.parent.iterdir()):
        if other.suffix == ".gguf":
            return CheckpointError(f"{message}; {other.name} is there, but GGUF is not supported")
        if other.suffix == ".safetensors" and other.is_file():
            return CheckpointError(
                f"{message}; {other.name} is there: fetch the index, or rename a single file"
            )
    return CheckpointError(f"{message}; only safetensors are read")


def read_header(file: Path, names: TensorNames = LLAMA_NAMES) -> dict[str, list[int]]:
    """Read the shape of every tensor in a safetensors file. Raises CheckpointError.

    names: say which are left out, and may be of any dtype.

    Not by the safetensors library: its errors name neither file nor tensor, and it accepts a header that
    contains a name twice.
    """
    size = check_file(file, sys.maxsize)
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_CEILING):
            raise CheckpointError(f"{file}: is truncated or no safetensors file ({size} bytes)")
        try:
            header = json.loads(_check_brackets(stream.read(length)), object_pairs_hook=_unique_keys)
            _check_metadata(header.pop("__metadata__", {}))
            entries = {name: _read_entry(entry) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{file}: has a damaged header: {error}") from error
    for name, (dtype, shape, start, end) in entries.items():
        if 8 + length + end > size:
            raise CheckpointError(
                f"{file}: is truncated: {name} ends at byte {8 + length + end}, the file at {size}"
            )
        if not names.is_read(name):
            continue
        if dtype not in SAFETENSORS_DTYPES:
            supported = ", ".join(SAFETENSORS_DTYPES)
            raise CheckpointError(f"{file}: {name} is {dtype}; supported are {supported}")
        if end - start != math.prod(shape) * SAFETENSORS_DTYPES[dtype]:
            raise CheckpointError(
                f"{file}: {name} has {end - start} bytes, which is not what {dtype}{shape} takes"
            )
    _check_spans(file, entries, size - 8 - length)
    return {name: shape for name, (_, shape, _, _) in entries.items() if names.is_read(name)}


def _check_brackets(header: bytes) -> bytes:
    """Return the header. Raises ValueError if it has lists and objects that no tensor has.

    They take many times the memory of their text.
    """
    bare = _STRING.sub(b"", header)
    num_lists, num_objects, num_keys = (bare.count(character) for character in (b"[", b"{", b":"))
    # A tensor is one object of two lists. It has three keys and is the value of a fourth.
    if num_lists > 2 * num_objects or 4 * num_objects > num_keys + 16:
        raise ValueError(f"{num_lists} lists and {num_objects} objects are more than its tensors need")
    return header


def _read_entry(entry: dict[str, Any]) -> Entry:
    """Return dtype, shape, start and end of one tensor in a header."""
    start, end = entry["data_offsets"]
    dtype, shape = entry["dtype"], entry["shape"]
    if not isinstance(shape, list) or len(shape) > MAX_RANK:
        raise ValueError(f"an entry is {shown(entry)}")
    numbers = [start, end, *shape]
    if not isinstance(dtype, str) or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        raise ValueError(f"an entry is {shown(entry)}")
    return dtype, numbers[2:], start, end


def _check_metadata(metadata: object) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"__metadata__ must be an object of strings, got {shown(metadata)}")


def _check_spans(file: Path, entries: Mapping[str, Entry], num_bytes: int) -> None:
    """Check that the tensors fill the file from the end of the header without gaps or overlaps."""
    reached = 0
    for name, (_, _, start, end) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if start != reached:
            raise CheckpointError(
                f"{file}: {name} begins at byte {start} of the data, but the one before ends at {reached}"
            )
        reached = end
    if reached != num_bytes:
        raise CheckpointError(f"{file}: has {num_bytes} bytes of data, of which tensors take {reached}")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{shown(name)} is there twice")
    return unique


def _check_names(
    destinations: Mapping[str, Tensor], sources: Sources, names: TensorNames, directory: Path
) -> None:
    absent = set(destinations) - set(sources)
    if absent:
        # A model that makes embeddings needs no head, so its checkpoint may lack one that is not tied.
        only_head = "; tie_word_embeddings true in config.json uses the embedding as head"
        missing = _some(sorted(map(names.in_checkpoint, absent)))
        hint = only_head if absent == {HEAD} else ""
        raise CheckpointError(f"{directory}: {missing} missing from the checkpoint{hint}")
    tied_head = set() if HEAD in destinations else {HEAD}
    extra = sorted(sources[name].name for name in set(sources) - set(destinations) - tied_head)
    if extra:
        raise _unknown(next(source.file for source in sources.values() if source.name == extra[0]), extra)


def _unknown(file: Path, names: list[str]) -> CheckpointError:
    return CheckpointError(f"{file}: {_some(names)} not part of the model that config.json describes")


def _some(names: list[str]) -> str:
    listed = ", ".join(names[:3])
    return f"{listed} is" if len(names) == 1 else f"{listed}{' …' if len(names) > 3 else ''} are"
