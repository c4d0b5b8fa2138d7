"""What a name means: an entry of models.toml, a path, or a model in the hub's cache."""

from __future__ import annotations

from pathlib import Path

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
        return found
    if name == "demo" or _is_path(name) or ("/" in name and ":" in name):
        return ModelEntry(name=name, checkpoint=name)
    local = find_local(name)
    if local is None or local.name == name:
        return ModelEntry(name=name, checkpoint=name)
    return ModelEntry(name=local.name, checkpoint=str(local.path))


def _is_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()
