"""What a name means: an entry of models.toml, a path, or a model in the hub's cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ...base.errors import MissingModelError
from .local import find_local
from .models_file import ModelEntry, ModelsFile


def entry_of(name: str, file: ModelsFile) -> ModelEntry:
    """Return the model that a command or a request names.

    The name is looked up in models.toml first, then as a path, then in the hub's cache, where the part behind
    the owner is enough. Any other name is a hub id. A full hub id is not looked up in the cache, so that the
    hub is asked for its newest commit.

    Raises CheckpointError for a name that several models of the cache have.
    """
    found = file.find(name)
    if found is not None:
        return located(found)
    if name == "demo" or _is_path(name) or ("/" in name and ":" in name):
        return ModelEntry(name=name, checkpoint=name)
    local = find_local(name)
    if local is None or local.name == name:
        return ModelEntry(name=name, checkpoint=name)
    return ModelEntry(name=local.name, checkpoint=str(local.path))


def located(entry: ModelEntry) -> ModelEntry:
    """Return an entry with the path of its checkpoint, if that is a short name of a model in the hub's cache.

    Raises CheckpointError for a name that several models of the cache have.
    """
    checkpoint = entry.checkpoint
    if checkpoint == "demo" or "/" in checkpoint or _is_path(checkpoint):
        return entry
    local = find_local(checkpoint)
    if local is None or local.name == checkpoint:
        return entry
    return replace(entry, checkpoint=str(local.path))


def check_is_here(entry: ModelEntry) -> None:
    """Raise MissingModelError if the checkpoint of an entry is not on this machine. The hub is not asked."""
    checkpoint = entry.checkpoint
    if checkpoint == "demo" or Path(checkpoint).expanduser().exists():
        return
    if _is_path(checkpoint):
        raise MissingModelError(f"no such directory or GGUF file: {checkpoint}")
    if find_local(checkpoint) is None:
        raise MissingModelError(
            f"the model {entry.name} is not on this machine, and a server of several models downloads none; "
            f"paged pull {checkpoint}, or paged models lists what is here"
        )


def _is_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()
