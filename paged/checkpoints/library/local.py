"""The models in the cache of the hub: what they are called, and how they are removed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ...architectures.gguf_paths import is_gguf, part_paths
from ...architectures.gguf_tags import quantisation_of, stem_of, tags_of
from ...base.errors import CheckpointError, ResourceError

_FOLDER = re.compile(r"models--(.+)")


class LocalModel(NamedTuple):
    """A model in the cache of the hub.

    name: owner/name, for a GGUF file with its quantisation: owner/name:Q4_K_M; see `gguf_tags.tags_of`.
    format: "safetensors", or "GGUF" and the quantisation.
    snapshot: the directory of the repository's newest commit here.
    files: the files of the weights in it.
    num_bytes: of these files. last_use: when they were read last, in seconds since 1970.
    """

    name: str
    format: str
    snapshot: Path
    files: tuple[Path, ...]
    num_bytes: int
    last_use: float

    @property
    def repository(self) -> str:
        """The name of the repository."""
        return self.name.partition(":")[0]

    @property
    def path(self) -> Path:
        """What an engine loads: the GGUF file, or the directory."""
        return self.files[0] if is_gguf(self.files[0].name) else self.snapshot


def hub_cache() -> Path:
    """Return the folder of the hub's cache, which need not exist."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def local_models() -> list[LocalModel]:
    """Return the models in the hub's cache by name. Repositories without whole weights are left out."""
    found = list[LocalModel]()
    with suppress(OSError):
        for folder in sorted(hub_cache().iterdir()):
            if (match := _FOLDER.fullmatch(folder.name)) and (snapshot := _newest_snapshot(folder)):
                found += _models_in(match[1].replace("--", "/"), snapshot)
    return found


def find_local(name: str) -> LocalModel | None:
    """Return a model by its name, or by the part of the name behind the owner if no other model has it.

    Case does not matter. The quantisation may be left out if there is only one.

    Raises CheckpointError if several models fit the name.
    """
    wanted = name.casefold()
    models = local_models()
    for names_of in (_full_names, _short_names):
        found = [model for model in models if wanted in names_of(model)]
        exact = [model for model in found if model.name.casefold() == wanted]
        if len(exact or found) == 1:
            return (exact or found)[0]
        if found:
            listed = ", ".join(model.name for model in found)
            raise CheckpointError(f"{name} may be {listed}; give the whole name")
    return None


def _full_names(model: LocalModel) -> set[str]:
    names = {model.name, model.repository}
    if ":" in model.name:  # of files of one quantisation that the hub has, one may be here
        names.add(f"{model.repository}:{stem_of(model.path.name)}")
    return {name.casefold() for name in names}


def _short_names(model: LocalModel) -> set[str]:
    return {name.rpartition("/")[2] for name in _full_names(model)}


def _newest_snapshot(folder: Path) -> Path | None:
    """Return the snapshot of the main branch, else the newest."""
    snapshots = folder / "snapshots"
    with suppress(OSError, ValueError):
        main = snapshots / (folder / "refs" / "main").read_text().strip()
        if main.parent == snapshots and main.is_dir():
            return main
    with suppress(OSError):
        return max(snapshots.iterdir(), key=lambda each: each.stat().st_mtime, default=None)
    return None


def _models_in(repository: str, snapshot: Path) -> Iterator[LocalModel]:
    names = [each.relative_to(snapshot).as_posix() for each in snapshot.rglob("*") if each.is_file()]
    tensors = sorted(snapshot / name for name in names if name.endswith(".safetensors") and "/" not in name)
    if tensors and "config.json" in names:
        yield _model(repository, "safetensors", snapshot, tensors)
    for tag, name in tags_of(names).items():
        files = [snapshot / part for part in part_paths(Path(name), exists=names.__contains__)]
        yield _model(f"{repository}:{tag}", f"GGUF {quantisation_of(name)}", snapshot, files)


def _model(name: str, format: str, snapshot: Path, files: Sequence[Path]) -> LocalModel:
    statuses = [each.stat() for each in files]
    size = sum(each.st_size for each in statuses)
    last_use = max(max(each.st_atime, each.st_mtime) for each in statuses)
    return LocalModel(name, format, snapshot, tuple(files), size, last_use)


def remove_local(model: LocalModel) -> int:
    """Remove a model's files from the cache, except files that other models need. Return the freed bytes.

    Processes that have mapped the files can still use them. Raises ResourceError if they cannot be removed.
    """
    folder = model.snapshot.parents[1]
    others = [each for each in _models_in(model.repository, model.snapshot) if each.name != model.name]
    try:
        if not others:
            size = sum(each.stat().st_size for each in (folder / "blobs").glob("*") if each.is_file())
            shutil.rmtree(folder)
            return size
        needed = {each.resolve() for other in others for each in other.files}
        removed = 0
        for link in model.files:
            blob = link.resolve()
            link.unlink()
            # Another commit's snapshot may have the same file.
            if blob not in needed and not _is_linked(folder, blob):
                removed += blob.stat().st_size
                blob.unlink()
        return removed
    except OSError as error:
        raise ResourceError(f"{error.filename or folder} cannot be removed: {error.strerror}") from None


def _is_linked(folder: Path, blob: Path) -> bool:
    links = (each for each in (folder / "snapshots").rglob("*") if each.is_symlink())
    return any(os.path.realpath(each) == str(blob) for each in links)
