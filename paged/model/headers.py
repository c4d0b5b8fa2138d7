"""Fetch the headers of a checkpoint's weights from the hub, by HTTP range requests, and nothing of their data."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .weights.weight_files import find_weight_files

_CHUNK = 2**16  # bytes of a request: most headers of a shard are smaller
_LENGTH_BYTES = 8
_HEADER_CEILING = 100 * 2**20
# Of the files beside the weights, those that say what the weights are.
_JSON = ("config.json", "hf_quant_config.json")


def fetch_headers(repository: str, revision: str | None) -> Path:
    """Return a directory with the config of a model on the hub and, for each file of its weights, one as large
    that has the header and no data.

    Weights that are in the hub's cache are taken from there.

    Raises CheckpointError for a repository without safetensors, OSError and ValueError as the hub does.
    """
    from huggingface_hub import HfFileSystem, hf_hub_download

    cached = Path(hf_hub_download(repository, "config.json", revision=revision)).parent
    try:
        find_weight_files(cached)
    except CheckpointError:
        pass
    else:
        return cached
    directory = Path(tempfile.mkdtemp(prefix="paged-headers-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    hub = HfFileSystem()
    names = [Path(entry["name"]).name for entry in hub.ls(repository, revision=revision) if entry["type"] == "file"]
    for name in names:
        if name in _JSON or ".safetensors.index" in name:
            shutil.copyfile(hf_hub_download(repository, name, revision=revision), directory / name)
        elif name.endswith(".safetensors"):
            (directory / name).touch()
    for file in find_weight_files(directory):
        with hub.open(f"{repository}/{file.name}", revision=revision, block_size=_CHUNK) as remote:
            _copy_header(remote, file)
    return directory


def _copy_header(remote: Any, file: Path) -> None:
    """Write the header of a remote safetensors file. The rest of the file takes no space on a disk."""
    start = remote.read(_LENGTH_BYTES)
    length = int.from_bytes(start, "little")
    if length > min(_HEADER_CEILING, remote.size):
        raise CheckpointError(f"{file.name} is no safetensors file: its header would have {length} bytes")
    with file.open("wb") as local:
        local.write(start + remote.read(length))
        local.truncate(remote.size)
