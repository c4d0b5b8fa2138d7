"""Catalog: the models that a server of several models knows by name, loaded or not."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from ...base.errors import CheckpointError, ConfigError
from ...checkpoints.library.local import LocalModel, find_local, local_models
from ...checkpoints.library.models_file import ModelEntry, ModelsFile, version_of
from ...checkpoints.library.names import entry_of, located
from ..front_end import LATEST_TAG

SETTLED_S = 1.0  # after a change of the file of models, until a model that it lacks is taken for removed


class Catalog:
    """The models of a server: those that it was given by name, or all of a file and of the hub's cache.

    names: the names that were given; none for all.
    file: the file of models, which `reload` reads again, and `refresh` when it has changed.

    Raises ConfigError for two models of one name, and for a wrong file.
    """

    def __init__(self, names: Iterable[str], file: ModelsFile) -> None:
        self.file = file
        self._wrong: tuple[int, ...] | None = None  # the version of a file that was wrong
        self._names = [*names]
        self._given = given_entries(self._names, file)

    @property
    def is_open(self) -> bool:
        """Whether models may come and go: none were given by name."""
        return not self._given

    def entries(self) -> list[ModelEntry]:
        """Return the models by name."""
        if not self.is_open:
            return [*{entry.name: entry for entry in self._given.values()}.values()]
        found = {model.name: local_entry(model) for model in local_models()}
        return [*self.file.entries.values(), *found.values()]

    def find(self, name: str) -> ModelEntry | None:
        """Return the model that a request names; None if it is not here. Nothing is looked for on the hub.

        Raises CheckpointError if several models go by this name.
        """
        base = name.removesuffix(LATEST_TAG)
        for each in dict.fromkeys((name, base)):
            if not self.is_open:
                found = self._given.get(each.casefold())
            else:
                found = self.file.find(each)
                if found is not None:
                    return located(found)
                if (local := find_local(each)) is not None:
                    found = local_entry(local)
                if found is None and each == "demo":
                    found = ModelEntry(name="demo", checkpoint="demo")
            if found is not None:
                return found
        return None

    def refresh(self) -> bool:
        """Read the file of models again if it has changed. Return whether it was read.

        If it is wrong, raise ConfigError, once for each change, and keep the earlier models.
        """
        version = version_of(self.file.path)
        if version in (None, self.file.version, self._wrong):  # of a file that is gone, the models stay
            return False
        assert version is not None
        self._wrong = version
        file = ModelsFile(self.file.path)
        age = time.time() - version[-1] / 1e9
        if self.file.entries.keys() - file.entries.keys() and 0 <= age < SETTLED_S:
            self._wrong = None  # an editor may be writing it: look again
            return False
        self._take(file)
        return True

    def reload(self) -> None:
        """Read the file of models again. If it is wrong, raise ConfigError and keep the earlier models."""
        self._take(ModelsFile(self.file.path))

    def _take(self, file: ModelsFile) -> None:
        self._given = given_entries(self._names, file)
        self.file = file
        self._wrong = None


def given_entries(names: Iterable[str], file: ModelsFile) -> dict[str, ModelEntry]:
    """Return the models that are given by name, each by all its names in small letters.

    Raises ConfigError for two models of one name.
    """
    found = dict[str, ModelEntry]()
    for name in names:
        entry = entry_of(name, file)
        for each in {name.casefold(), entry.name.casefold()}:
            if each in found:
                raise ConfigError(f"{name} is given twice, or is the same model as {found[each].name}")
        found |= {name.casefold(): entry, entry.name.casefold(): entry}
    return found


def local_entry(model: LocalModel) -> ModelEntry:
    """Return a model of the hub's cache, as an engine takes it without asking the hub."""
    return ModelEntry(name=model.name, checkpoint=str(model.path))


def local_of(entry: ModelEntry) -> LocalModel | None:
    """Return the model of the hub's cache that an entry loads; None if it lies elsewhere."""
    for model in local_models():
        if entry.checkpoint in (str(model.path), model.name):
            return model
    try:
        return None if Path(entry.checkpoint).exists() else find_local(entry.checkpoint)
    except CheckpointError:
        return None
