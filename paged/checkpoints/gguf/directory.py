"""Make the directory of a GGUF file's model: config.json, a tokenizer and a link to the file.

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
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ...architectures.generation_config import sampling_defaults
from ...architectures.gguf_paths import NO_TOKENIZER_KEY, OVERRIDDEN_KEY
from ...architectures.hf_config import MAX_JSON_BYTES, check_file, from_hf, read_json
from ...base.errors import CheckpointError, UnsupportedModelError
from ...base.validation import shown
from .config import make_config
from .gguf_file import Gguf, open_gguf
from .metadata import Metadata
from .tokenizer import make_tokenizer, read_ends, read_vocabulary

logger = logging.getLogger(__name__)

_SUMS = "sha256.json"  # of the other files
_UNFINISHED = "unfinished-"
_MAX_KEPT = 32  # directories, of up to 35 MB each
_KEPT_SECONDS = 24 * 60 * 60  # since the last use, beyond so many

# From fields of the metadata to those of generation_config.json.
_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def gguf_directory(path: Path) -> Path:
    """Return the directory with a GGUF model's config and tokenizer; make it if it does not exist.

    path: the path of the file, or of one of its parts.

    Raises CheckpointError for a damaged file, and UnsupportedModelError for features that are not
    implemented.
    """
    path = path.absolute()
    with open_gguf(path) as gguf:
        directory = _cache() / _name_of(gguf)
        if not _is_whole(directory, gguf):
            files = _files_of(gguf)
            try:
                _write(files, gguf, directory)
            except OSError as error:
                raise CheckpointError(
                    f"{directory} cannot be written: {error.strerror}; XDG_CACHE_HOME names another cache"
                ) from error
    if overridden := read_json(directory / "config.json").get(OVERRIDDEN_KEY):
        logger.warning(
            "%s: %s should be of type CONTROL; as in llama.cpp, they are taken to be, and ends of turns end "
            "an answer",
            path,
            ", ".join(map(shown, overridden)),
        )
    with suppress(OSError):  # of another user
        os.utime(directory)
        _remove_oldest(directory.parent)
    return directory


def _is_whole(directory: Path, gguf: Gguf) -> bool:
    """Return whether a directory has its files, as they were written, and links to the GGUF files."""
    try:
        sums = read_json(directory / _SUMS)
        for name in sums:
            check_file(directory / name, MAX_JSON_BYTES)
        files = {name: _sum_of((directory / name).read_bytes()) for name in sums}
        links = [os.readlink(directory / file.path.name) for file in gguf.files]
    except (OSError, ValueError, CheckpointError):
        return False
    return "config.json" in files and files == sums and links == [str(file.path) for file in gguf.files]


def _sum_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _name_of(gguf: Gguf) -> str:
    """Return the hash of the files' places, their headers, and the code that reads them."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    for file in gguf.files:
        digest.update(os.fsencode(file.path) + b"\0" + file.digest)
    return digest.hexdigest()[:32]


def config_of(gguf: Gguf, metadata: Metadata) -> dict[str, Any]:
    """Return the contents of config.json for a GGUF file. Raises CheckpointError, UnsupportedModelError."""
    config = make_config(gguf, metadata)
    try:
        model = from_hf(config)
    except (UnsupportedModelError, CheckpointError) as error:
        raise type(error)(f"{metadata.path}: the config that its metadata make: {error}") from None
    if model.exceeds_float16 and config["dtype"] == "float16":
        config["dtype"] = "bfloat16"
    return config


def _files_of(gguf: Gguf) -> dict[str, Any]:
    """Return the contents of the JSON files by name."""
    metadata = Metadata(gguf.files[0].path, gguf.metadata)
    config = config_of(gguf, metadata)
    files = {"config.json": config}
    if metadata.text("tokenizer.ggml.model", "no_vocab") != "no_vocab":
        try:
            files["tokenizer.json"], files["tokenizer_config.json"] = make_tokenizer(metadata)
        except UnsupportedModelError as error:  # another may be given
            config[NO_TOKENIZER_KEY] = str(error)
        if overridden := read_vocabulary(metadata).overridden:
            config[OVERRIDDEN_KEY] = overridden
        generation = {theirs: metadata.number(key, None) for key, theirs in _SAMPLING.items()}
        generation["top_k"] = metadata.integer("general.sampling.top_k", None)
        given = {key: value for key, value in generation.items() if value is not None}
        sampling_defaults(given, f"{metadata.path}: general.sampling")
        files["generation_config.json"] = {"eos_token_id": read_ends(metadata), **given}
    return files


def _write(files: dict[str, Any], gguf: Gguf, directory: Path) -> None:
    """Write the files of a directory: each appears as a whole, and the sums of all of them at last.

    Another process that does so at the same time writes the same.
    """
    directory.mkdir(exist_ok=True)
    for file in gguf.files:
        _put(directory / file.path.name, partial(Path.symlink_to, target=file.path))
    contents = {name: json.dumps(each, ensure_ascii=False).encode() for name, each in files.items()}
    sums = {name: _sum_of(content) for name, content in contents.items()}
    for name, content in {**contents, _SUMS: json.dumps(sums).encode()}.items():
        _put(directory / name, partial(Path.write_bytes, data=content))


def _put(file: Path, make: Callable[[Path], Any]) -> None:
    """Make a file under another name first, so that it appears or is replaced as a whole."""
    unfinished = file.with_name(f"{_UNFINISHED}{os.getpid()}-{threading.get_ident()}")
    unfinished.unlink(missing_ok=True)
    try:
        make(unfinished)
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


def _remove_oldest(cache: Path) -> None:
    """Remove directories, but the last used ones, and all of the last day, which may be in use."""
    used = []
    for directory in cache.iterdir():
        with suppress(OSError):  # another process removes it
            used.append((directory.stat().st_mtime, directory))
    for last, directory in sorted(used, reverse=True)[_MAX_KEPT:]:
        if last < time.time() - _KEPT_SECONDS:
            removed = directory.with_name(f"{_UNFINISHED}{directory.name}")  # which no process looks for
            with suppress(OSError):
                directory.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)


def _cache() -> Path:
    """Return the parent of these directories: in the user's cache, or temporary if that cannot be written."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    with suppress(OSError, RuntimeError):  # no home directory
        # A relative path is to be ignored: https://specifications.freedesktop.org/basedir-spec/latest
        found = (given if given.is_absolute() else Path("~/.cache").expanduser()) / "paged" / "gguf"
        found.mkdir(parents=True, exist_ok=True)
        if os.access(found, os.W_OK | os.X_OK):
            return found
    temporary = Path(tempfile.mkdtemp(prefix="paged-gguf-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    logger.warning("the cache cannot be written: the tokenizer's files are made in %s", temporary)
    return temporary
