"""Make the directory of a GGUF file's model: config.json and tokenizer beside a link to the file.

Everything else then reads it like any checkpoint. Directories are kept in the user's cache, each under a hash
of all that it depends on.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, UnsupportedModelError
from ..gguf_names import NO_TOKENIZER_KEY
from ..hf_config import from_hf
from ..weights.gguf_file import Gguf, open_gguf
from .config import make_config
from .metadata import Metadata
from .tokenizer import make_tokenizer, read_ends

logger = logging.getLogger(__name__)

# From fields of the metadata to those of generation_config.json.
_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def gguf_directory(path: Path) -> Path:
    """Return the directory of a GGUF file's model; it is made if it is not there.

    path: of the file, or of one of its parts.

    Raises CheckpointError for a damaged file, and UnsupportedModelError for what is not implemented.
    """
    path = path.absolute()
    with open_gguf(path) as gguf:
        name = _name_of(gguf)
        directory = _cache() / name
        if not _is_whole(directory, gguf):
            files = _files_of(gguf)
            try:
                _write(files, gguf, directory)
            except OSError as error:
                raise CheckpointError(
                    f"{directory} cannot be written: {error.strerror}; XDG_CACHE_HOME names another cache"
                ) from error
    return directory


def _is_whole(directory: Path, gguf: Gguf) -> bool:
    """Return whether a directory has its config, and its links lead somewhere. A cleaned cache has a part."""
    names = ["config.json", *(file.path.name for file in gguf.files)]
    return all((directory / name).exists() for name in names)


def _name_of(gguf: Gguf) -> str:
    """Return the hash of the files' places, their headers, and the code that reads them."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    for file in gguf.files:
        digest.update(os.fsencode(file.path) + b"\0" + file.digest)
    return digest.hexdigest()[:32]


def _files_of(gguf: Gguf) -> dict[str, Any]:
    """Return the contents of the JSON files by name."""
    metadata = Metadata(gguf.files[0].path, gguf.metadata)
    config = make_config(gguf, metadata)
    try:
        model = from_hf(config)
    except (UnsupportedModelError, CheckpointError) as error:
        raise type(error)(f"{metadata.path}: the config that its metadata make: {error}") from None
    if model.exceeds_float16 and config["dtype"] == "float16":
        config["dtype"] = "bfloat16"
    files = {"config.json": config}
    if metadata.text("tokenizer.ggml.model", "no_vocab") != "no_vocab":
        try:
            files["tokenizer.json"], files["tokenizer_config.json"] = make_tokenizer(metadata)
        except UnsupportedModelError as error:  # another may be given
            config[NO_TOKENIZER_KEY] = str(error)
        generation = {theirs: metadata.number(key, None) for key, theirs in _SAMPLING.items()}
        generation["top_k"] = metadata.integer("general.sampling.top_k", None)
        given = {key: value for key, value in generation.items() if value is not None}
        files["generation_config.json"] = {"eos_token_id": read_ends(metadata), **given}
    return files


def _write(files: dict[str, Any], gguf: Gguf, directory: Path) -> None:
    """Write the files of a directory, which appears as a whole."""
    unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=directory.parent))
    try:
        for name, content in files.items():
            (unfinished / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        for file in gguf.files:
            (unfinished / file.path.name).symlink_to(file.path)
        try:
            unfinished.rename(directory)
        except OSError:
            if _is_whole(directory, gguf):  # another process was quicker
                return
            shutil.rmtree(directory)
            unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _cache() -> Path:
    """Return where directories are kept: in the user's cache, or for this run where it cannot be written."""
    with suppress(OSError, RuntimeError):  # no home directory
        found = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "paged" / "gguf"
        found.mkdir(parents=True, exist_ok=True)
        if os.access(found, os.W_OK | os.X_OK):
            return found
    temporary = Path(tempfile.mkdtemp(prefix="paged-gguf-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    logger.warning("the cache cannot be written: the tokenizer's files are made in %s", temporary)
    return temporary
