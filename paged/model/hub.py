"""Find a model's directory: the demo's, a local one, or one that is fetched from the hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..errors import CheckpointError
from .config import DEMO

# What an engine reads of a repository.
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
# Some repositories have the weights a second time, in their author's own layout.
_IGNORED = ["consolidated*", "original/*"]


def resolve(model: str, revision: str | None = None) -> Path:
    """Return the directory of a model: "demo", a directory, or a hub id (downloaded to the hub's cache).

    revision: branch, tag or commit on the hub; None takes the default branch.
    """

    def fetch() -> str:
        from huggingface_hub import snapshot_download

        return snapshot_download(model, revision=revision, allow_patterns=_FILES, ignore_patterns=_IGNORED)

    return _local(model, revision) or _fetched(model, fetch)


def resolve_config(model: str, revision: str | None = None) -> Path:
    """Return the directory with a model's config.json. Of a hub id nothing else is fetched."""

    def fetch() -> str:
        from huggingface_hub import hf_hub_download

        return str(Path(hf_hub_download(model, "config.json", revision=revision)).parent)

    return _local(model, revision) or _fetched(model, fetch)


def _local(model: str, revision: str | None) -> Path | None:
    """Return the directory of a model on this machine, or None for a hub id. Raises CheckpointError."""
    path = DEMO if model == "demo" else Path(model).expanduser()
    if path.is_dir():
        if revision is not None:
            raise CheckpointError(
                f"revision {revision!r} names a version on the hub, but {model} is a directory"
            )
        return path
    if path.exists():
        raise CheckpointError(f"{model} is a file; give the directory that holds config.json")
    if model.count("/") > 1 or model.startswith((".", "/", "~")) or not model.isprintable():
        raise CheckpointError(f"no such directory: {model}")
    return None


def _fetched(model: str, fetch: Callable[[], str]) -> Path:
    try:
        return Path(fetch())
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{model!r} is neither a directory nor a model that could be fetched from the hub: {reason}"
        ) from error
