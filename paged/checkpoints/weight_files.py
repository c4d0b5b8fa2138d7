"""Find the files that hold a checkpoint's weights, in the order in which transformers looks for them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from ..architectures.gguf_paths import GGUF_KEY, HEADERS_ALONE, gguf_files
from ..architectures.hf_config import read_json
from ..base.errors import CheckpointError, MissingModelError
from ..base.validation import shown

logger = logging.getLogger(__name__)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_NAMED_BY_CONFIG = "transformers_weights"  # a key of config.json


def find_weight_files(directory: Path) -> list[Path]:
    """Return the files of a checkpoint that hold weights. Log the other weight files, which are ignored.

    These are the file that config.json names, else model.safetensors, else the files that
    model.safetensors.index.json lists. In a directory made for a GGUF file, it is the GGUF file.

    Raises CheckpointError if files are missing, and names the files that are there instead.
    """
    config = directory / "config.json"
    if config.exists() and GGUF_KEY in read_json(config):
        return _linked_gguf(directory)
    first = _first_file(directory)
    files = _named_by_index(first) if first.suffix == ".json" else [first]
    for file in files:
        if file.parent != directory:
            raise CheckpointError(f"{first}: {shown(file.name)} lies outside the checkpoint")
        if not os.path.isfile(file):  # Path.is_file would raise for a name that is too long
            raise MissingModelError(
                f"{file} does not exist, and {first.name} says that it has tensors; fetch it again"
            )
    _log_ignored(directory, first, files)
    return files


def _linked_gguf(directory: Path) -> list[Path]:
    """Return the GGUF file, or the first of its parts, that the directory links to, or has the headers of."""
    links = [directory / name for name in gguf_files(directory)]
    if links and (directory / HEADERS_ALONE).exists():
        return links[:1]
    if not links or not links[0].is_symlink():
        raise CheckpointError(
            f"{directory}: has no link to the GGUF file that it was made for; give that file"
        )
    return [Path(os.readlink(links[0]))]


def _first_file(directory: Path) -> Path:
    """Return the file that transformers opens first: a file of tensors, or the index of several."""
    config = directory / "config.json"
    named = read_json(config).get(_NAMED_BY_CONFIG) if config.exists() else None
    if named is not None:
        if not isinstance(named, str) or not named.endswith((".safetensors", ".safetensors.index.json")):
            raise CheckpointError(
                f"{config}: {_NAMED_BY_CONFIG} must name a safetensors file or its index, got {shown(named)}"
            )
        file = directory / named
        if file.parent != directory:
            raise CheckpointError(
                f"{config}: {_NAMED_BY_CONFIG} must name a file of its own directory, got {shown(named)}"
            )
        if not os.path.isfile(file):
            raise MissingModelError(f"{file} does not exist, and config.json names it: {_NAMED_BY_CONFIG}")
        return file
    if os.path.isfile(directory / SINGLE):
        return directory / SINGLE
    if (directory / INDEX).exists():
        return directory / INDEX
    from .missing_weights import missing_weights_error

    found = [name for name in _weights_in(directory) if os.path.isfile(directory / name)]
    raise missing_weights_error(directory, SINGLE, INDEX, found)


def _named_by_index(index: Path) -> list[Path]:
    """Return the files that an index file lists in its weight_map."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: has no weight_map")
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            raise CheckpointError(
                f"{index}: weight_map must have the name of a file for {shown(tensor)}, got {shown(name)}"
            )
    return [index.parent / name for name in sorted(set(weight_map.values()))]


def _log_ignored(directory: Path, first: Path, files: list[Path]) -> None:
    """Log the weight files that are not read, as they may be what the user meant."""
    read = {first.name, *(file.name for file in files)}
    others = [name for name in _weights_in(directory) if name not in read]
    if others:
        some = ", ".join(map(_printable, others[:3]))
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        place = _printable(str(directory), 200)
        logger.warning("%s: read %s, ignored %s%s", place, _printable(first.name), some, more)


def _printable(text: str, max_length: int = 60) -> str:
    """Return text as one printable line, cut at the front to max_length characters."""
    return (text if text.isprintable() else ascii(text)[1:-1])[-max_length:]


def _weights_in(directory: Path) -> Iterator[str]:
    """Yield the names of the safetensors files and index files in a directory."""
    for name in sorted(os.listdir(directory)):
        if name.endswith(".safetensors") or (".safetensors.index" in name and name.endswith(".json")):
            yield name
