"""Fetch a model, its config or the headers of its weights from the hub."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ..architectures.gguf_paths import is_gguf, listed, models_of, part_paths
from ..architectures.gguf_tags import tags_of
from ..architectures.missing_config import instead_of_config
from ..base.errors import CheckpointError, MissingModelError

# What an engine reads of a repository.
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
# Some repositories have the weights a second time, in their author's own layout.
HUB_IGNORED = ["consolidated*", "original/*"]
OFFLINE = "HF_HUB_OFFLINE"  # of the environment: the hub's library asks the hub for nothing


def fetched_model(model: str, revision: str | None) -> Path:
    """Download a model from the hub. Return its directory; see `model_directory.resolve`."""
    if ":" in model:
        return _fetched_gguf(model, revision)

    def fetch() -> Path:
        repository = _Repository(model, revision)
        directory = repository.fetch(HUB_FILES, ignored=HUB_IGNORED)
        if not any(directory.glob("*.safetensors")):
            _require_no_gguf(model, repository.names)
        return directory

    return _fetched(model, fetch)


def fetched_config(model: str, revision: str | None) -> Path:
    """Download the config.json of a model on the hub. Return its directory."""
    if ":" in model:
        return _fetched_gguf(model, revision)
    return _fetched(model, lambda: _Repository(model, revision).fetch_config())


def fetched_headers(model: str, revision: str | None) -> Path:
    """Download the config and the headers of the weights of a model on the hub. Return their directory."""
    from .headers import fetch_gguf_headers, fetch_headers, has_weights

    if ":" not in model:

        def fetch() -> Path:
            repository = _Repository(model, revision)
            directory = repository.fetch_config()
            if has_weights(directory):
                return directory
            repository.require_answer()
            return fetch_headers(model, revision, directory / "config.json")

        return _fetched(model, fetch)

    def fetch_gguf() -> Path:
        from huggingface_hub import try_to_load_from_cache

        repository = _Repository(model.partition(":")[0], revision)
        names = _gguf_parts(model, repository.names)
        cached = [try_to_load_from_cache(repository.name, name, revision=revision) for name in names]
        paths = [path for path in cached if isinstance(path, str)]
        if len(paths) == len(names):
            from .gguf.directory import gguf_directory  # which needs torch

            return gguf_directory(Path(paths[0]))
        repository.require_answer()
        return fetch_gguf_headers(repository.name, revision, names)

    return _fetched(model, fetch_gguf)


def _fetched_gguf(model: str, revision: str | None) -> Path:
    """Return the directory of a GGUF file that is fetched from the hub: the one of a quantisation."""

    def fetch() -> Path:
        repository = _Repository(model.partition(":")[0], revision)
        names = _gguf_parts(model, repository.names)
        return repository.fetch([*map(glob.escape, names)]) / names[0]

    from .gguf.directory import gguf_directory  # which needs torch

    return gguf_directory(_fetched(model, fetch))


def _gguf_parts(model: str, names: Iterable[str]) -> list[str]:
    """Return the names of a quantisation's file, or of its parts, among the files of a repository."""
    names = [*filter(is_gguf, names)]
    name = _of_quantisation(model, model.partition(":")[2], names)
    return [str(part) for part in part_paths(Path(name), exists=names.__contains__)]


def _require_no_gguf(model: str, names: Iterable[str]) -> None:
    """Raise CheckpointError for a repository without safetensors that has GGUF files."""
    if names := [*filter(is_gguf, names)]:
        raise CheckpointError(
            f"{model} has no safetensors, but GGUF files: give {model}:QUANTISATION; {listed(names)}"
        )


class _Repository:
    """A repository on the hub, or what the hub's cache has of it if the hub does not answer.

    Most functions of huggingface_hub try to reach the hub six times within 23 seconds, with a line on stderr
    each. So one request asks first, and the others follow only if it was answered.

    names: the names of its files.

    Raises OSError if the hub does not answer and its cache has nothing, and ValueError for a name that no
    repository can have.
    """

    def __init__(self, name: str, revision: str | None) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        self.name = name
        self._revision = revision
        self._failure: OSError | None = None
        # The base of the errors of the HTTP library that this version of the hub uses.
        any_http_error: type[BaseException] = HfHubHTTPError.__bases__[0]
        try:
            # Its library reads the variable only once, when it is imported.
            if os.environ.get(OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE"):
                raise OSError(f"it is not in the hub's cache, and the hub is not asked; paged pull {name}")
            siblings = HfApi().model_info(name, revision=revision).siblings
            self.names = [file.rfilename for file in siblings or []]
        except (any_http_error, OSError) as error:
            self._failure = OSError(str(error) or type(error).__name__)
            self._failure.__cause__ = error
            cached = self.fetch([])
            self.names = [file.relative_to(cached).as_posix() for file in cached.rglob("*")]

    def fetch(self, patterns: Sequence[str], ignored: Sequence[str] = ()) -> Path:
        """Return the directory in the hub's cache with the files of these patterns. Raises OSError."""
        from huggingface_hub import snapshot_download

        try:
            directory = snapshot_download(
                self.name,
                revision=self._revision,
                allow_patterns=[*patterns],
                ignore_patterns=[*ignored],
                local_files_only=self._failure is not None,
            )
        except OSError:
            self.require_answer()
            raise
        return Path(directory)

    def fetch_config(self) -> Path:
        """Return the directory in the hub's cache with config.json. Raises OSError and CheckpointError."""
        if "config.json" not in self.names:
            _require_no_gguf(self.name, self.names)
            raise CheckpointError(f"{self.name} has no config.json on the hub{instead_of_config(self.names)}")
        return self.fetch(["config.json"])

    def require_answer(self) -> None:
        """Raise OSError if the hub has not answered."""
        if self._failure is not None:
            raise self._failure


def _of_quantisation(model: str, quantisation: str, names: Iterable[str]) -> str:
    """Return the file whose name has the quantisation. Raises CheckpointError, with those that there are."""
    # UD-Q4_K_M, for instance, has the word Q4_K_M in it, too.
    for tag, name in tags_of(names).items():
        if tag.casefold() == quantisation.casefold():
            return name
    word = re.compile(rf"(?<![a-z0-9]){re.escape(quantisation.lower())}(?![a-z0-9_])")
    found = [name for name in models_of(names) if quantisation and word.search(name.lower())]
    if len(found) == 1:
        return found[0]
    problem = f"{len(found)} GGUF files" if found else "no GGUF file"
    raise CheckpointError(f"{model}: {problem} of this quantisation; {listed(names)}")


def _fetched(model: str, fetch: Callable[[], Path]) -> Path:
    try:
        return fetch()
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise MissingModelError(
            f"{model!r} is neither a directory nor a model that could be fetched from the hub: {reason}"
        ) from error
