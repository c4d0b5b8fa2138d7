"""Fetch the headers of a checkpoint's weights from the hub, by range requests, and none of their data."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..architectures.gguf_paths import HEADERS_ALONE
from ..base.errors import CheckpointError
from .gguf.directory import config_of
from .gguf.gguf_file import GgufFile, open_gguf
from .gguf.metadata import Metadata
from .safetensors_file import HEADER_CEILING, HEADER_ONLY
from .weight_files import find_weight_files

_LENGTH_BYTES = 8
_CHUNK = 2**16  # bytes of a request: most headers are smaller
_QUANTIZATION = "hf_quant_config.json"  # beside config.json, where ModelOpt says what the weights are


def fetch_headers(repository: str, revision: str | None, config: Path) -> Path:
    """Return a directory with the config of a model on the hub and the headers of its weights.

    Each file has the size of its original, but is sparse: only the header takes disk space.

    config: the path of the model's config.json, which has already been fetched.

    Raises CheckpointError for a repository without safetensors, and OSError or ValueError for errors of the
    hub.
    """
    from huggingface_hub import HfFileSystem, hf_hub_download

    hub = HfFileSystem()
    entries: list[Any] = hub.ls(repository, revision=revision)
    names = [Path(entry["name"]).name for entry in entries if entry["type"] == "file"]
    directory = _new_directory()
    (directory / HEADERS_ALONE).touch()
    shutil.copyfile(config, directory / config.name)
    for name in names:
        if name == _QUANTIZATION or ".safetensors.index" in name:
            shutil.copyfile(hf_hub_download(repository, name, revision=revision), directory / name)
        elif name.endswith((".safetensors", ".gguf")):
            (directory / name).touch()
    for file in find_weight_files(directory):
        with hub.open(f"{repository}/{file.name}", revision=revision, block_size=_CHUNK) as remote:
            write_header(remote, file)
    return directory


def fetch_gguf_headers(repository: str, revision: str | None, names: Sequence[str]) -> Path:
    """Return a directory with the config and the headers of a GGUF model on the hub.

    names: the names of the model's files: one, or one per part.
    """
    from huggingface_hub import HfFileSystem

    hub = HfFileSystem()
    with ExitStack() as stack:
        sources = [
            stack.enter_context(hub.open(f"{repository}/{name}", revision=revision, block_size=_CHUNK))
            for name in names
        ]
        return write_gguf_headers(dict(zip((Path(name).name for name in names), sources, strict=True)))


def write_gguf_headers(sources: Mapping[str, Any]) -> Path:
    """Make a directory with a config.json and sparse copies of GGUF files that hold only their headers.

    sources: the open files by name, the first part first.
    """
    directory = _new_directory()
    for name, source in sources.items():
        with (directory / name).open("wb") as local:
            local.truncate(source.seek(0, os.SEEK_END))
    first = directory / next(iter(sources))
    with open_gguf(first, lambda path: _CopiedGguf(path, sources[path.name])) as gguf:
        config = config_of(gguf, Metadata(first, gguf.metadata))
    (directory / "config.json").write_text(json.dumps(config))
    (directory / HEADERS_ALONE).touch()
    return directory


class _CopiedGguf(GgufFile):
    """A GGUF file whose bytes are copied from another file when they are read."""

    def __init__(self, path: Path, source: Any) -> None:
        self._source = source
        super().__init__(path)

    def read_into(self, memory: memoryview, start: int) -> None:
        """Fill memory with the bytes of the file from `start` on."""
        self._source.seek(start)
        with self.path.open("r+b") as local:
            local.seek(start)
            local.write(self._source.read(len(memory)))
        super().read_into(memory, start)


def write_header(source: Any, file: Path) -> None:
    """Write a sparse safetensors file with the header and the size of `source`, but no data.

    source: an open local or remote file.
    """
    length = int.from_bytes(source.read(_LENGTH_BYTES), "little")
    if length > HEADER_CEILING:
        raise CheckpointError(f"{file.name} is no safetensors file: its header would have {length:,} bytes")
    try:
        header = json.loads(source.read(length))
        header["__metadata__"] = {HEADER_ONLY: ""}
        size = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file.name}: has a damaged header: {error}") from error
    text = json.dumps(header).encode()
    with file.open("wb") as local:
        local.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        local.truncate(_LENGTH_BYTES + len(text) + size)


def _new_directory() -> Path:
    """Make a directory for this run."""
    directory = Path(tempfile.mkdtemp(prefix="paged-headers-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def has_weights(directory: Path) -> bool:
    """Return whether a directory contains files of a model's weights."""
    try:
        find_weight_files(directory)
    except CheckpointError:
        return False
    return True
