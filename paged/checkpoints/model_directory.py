"""The directory of a model: the demo's, a local one, one made of a GGUF file, or one fetched from the hub."""

from __future__ import annotations

from pathlib import Path

from ..architectures.config import DEMO
from ..architectures.gguf_paths import PART_NAME, gguf_files, is_gguf, listed, models_of
from ..base.errors import CheckpointError, MissingModelError


def resolve(model: str, revision: str | None = None) -> Path:
    """Return the directory of a model.

    model: "demo", a directory, a GGUF file, or a hub id; for a repository of GGUF files, the hub id is
        followed by a quantisation: "owner/name:Q4_K_M". A model on the hub is downloaded to the hub's cache.
    revision: branch, tag or commit on the hub; None takes the default branch.
    """
    if (found := _local(model, revision)) is not None:
        return found
    from .hub import fetched_model

    return fetched_model(model, revision)


def resolve_config(model: str, revision: str | None = None) -> Path:
    """Return the directory with a model's config.json. For a hub id, only the config is fetched."""
    if (found := _local(model, revision)) is not None:
        return found
    from .hub import fetched_config

    return fetched_config(model, revision)


def resolve_headers(model: str, revision: str | None = None) -> Path:
    """Return the directory of a model. For a hub id, it holds only the config and the headers of the weights.

    Files in the hub's cache are not fetched again.
    """
    if (found := _local(model, revision)) is not None:
        return found
    from .hub import fetched_headers

    return fetched_headers(model, revision)


def _local(model: str, revision: str | None) -> Path | None:
    """Return the directory of a model on this machine, or None for a hub id. Raises CheckpointError."""
    path = DEMO if model == "demo" else Path(model).expanduser()
    if path.exists() and revision is not None:
        kind = "directory" if path.is_dir() else "file"
        raise CheckpointError(f"revision {revision!r} names a version on the hub, but {model} is a {kind}")
    if path.is_dir():
        return _with_gguf(path)
    if is_gguf(path.name) and (path.exists() or PART_NAME.fullmatch(path.name)):
        return _of_gguf(path)
    if path.exists():
        raise CheckpointError(
            f"{model} is a file; give the directory that holds config.json, or a .gguf file"
        )
    is_file = is_gguf(path.name) and path.parent.is_dir()
    if is_file or model.count("/") > 1 or model.startswith((".", "/", "~")) or not model.isprintable():
        raise MissingModelError(f"no such directory or GGUF file: {model}")
    return None


def _with_gguf(directory: Path) -> Path:
    """Return the directory, or the directory made of its only GGUF file if it has no other weights."""
    names = gguf_files(directory)
    if not names or any(directory.glob("*.safetensors")):
        return directory
    models = models_of(names)
    if len(models) > 1:
        raise CheckpointError(f"{directory} has several GGUF files; give the path of one: {listed(names)}")
    return _of_gguf(directory / models[0])


def _of_gguf(path: Path) -> Path:
    from .gguf.directory import gguf_directory  # which needs torch

    return gguf_directory(path)
