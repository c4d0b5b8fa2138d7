"""Find a model's directory: the demo's, a local one, that of a GGUF file, or one fetched from the hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from ..errors import CheckpointError
from .config import DEMO
from .gguf_paths import PART_NAME, gguf_files, is_gguf, part_paths

# What an engine reads of a repository.
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
# Some repositories have the weights a second time, in their author's own layout.
_IGNORED = ["consolidated*", "original/*"]


def resolve(model: str, revision: str | None = None) -> Path:
    """Return the directory of a model.

    model: "demo", a directory, a GGUF file, or a hub id, in a repository of GGUF files with a quantisation:
        "owner/name:Q4_K_M". What is on the hub is downloaded to the hub's cache.
    revision: branch, tag or commit on the hub; None takes the default branch.
    """

    def fetch() -> str:
        from huggingface_hub import snapshot_download

        return snapshot_download(model, revision=revision, allow_patterns=_FILES, ignore_patterns=_IGNORED)

    if (found := _local(model, revision)) is not None:
        return found
    if ":" in model:
        return _fetched_gguf(model, revision)
    directory = _fetched(model, fetch)
    if not any(directory.glob("*.safetensors")):
        _require_no_gguf(model, revision)
    return directory


def resolve_config(model: str, revision: str | None = None) -> Path:
    """Return the directory with a model's config.json. Of a hub id nothing else is fetched."""

    def fetch() -> str:
        from huggingface_hub import hf_hub_download

        return str(Path(hf_hub_download(model, "config.json", revision=revision)).parent)

    if (found := _local(model, revision)) is not None:
        return found
    return _fetched_gguf(model, revision) if ":" in model else _fetched(model, fetch)


def resolve_headers(model: str, revision: str | None = None) -> Path:
    """Return the directory of a model, or of a hub id one with its config and the headers of its weights.

    What the hub's cache has is not fetched again.
    """
    if (found := _local(model, revision)) is not None:
        return found
    from .headers import fetch_gguf_headers, fetch_headers

    if ":" not in model:
        return _fetched(model, lambda: str(fetch_headers(model, revision)))

    def fetch() -> str:
        from huggingface_hub import try_to_load_from_cache

        repository, names = _gguf_parts(model, revision)
        cached = [try_to_load_from_cache(repository, name, revision=revision) for name in names]
        paths = [path for path in cached if isinstance(path, str)]
        if len(paths) == len(names):
            return str(_of_gguf(Path(paths[0])))
        return str(fetch_gguf_headers(repository, revision, names))

    return _fetched(model, fetch)


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
        raise CheckpointError(f"no such directory or GGUF file: {model}")
    return None


def _with_gguf(directory: Path) -> Path:
    """Return the directory itself, or that of the one GGUF file in it if it has no other weights."""
    names = gguf_files(directory)
    if not names or any(directory.glob("*.safetensors")):
        return directory
    models = _models(names)
    if len(models) > 1:
        raise CheckpointError(f"{directory} has several GGUF files; give the path of one: {_listed(names)}")
    return _of_gguf(directory / models[0])


def _of_gguf(path: Path) -> Path:
    from .gguf.directory import gguf_directory  # which needs torch

    return gguf_directory(path)


def _models(names: Iterable[str]) -> list[str]:
    """Return the names of GGUF files that are models, and of such in parts, of the first part."""
    firsts = {PART_NAME.sub(r"\1-00001-of-\3\4", name) for name in names}
    return sorted(name for name in firsts if "mmproj" not in name.lower())


def _listed(names: Iterable[str]) -> str:
    models = _models(names)
    more = f" and {len(models) - 20} more" if len(models) > 20 else ""
    return f"there are {', '.join(models[:20])}{more}"


def _fetched_gguf(model: str, revision: str | None) -> Path:
    """Return the directory of a GGUF file that is fetched from the hub: the one of a quantisation."""

    def fetch() -> str:
        from huggingface_hub import hf_hub_download

        repository, names = _gguf_parts(model, revision)
        first, *_ = [hf_hub_download(repository, name, revision=revision) for name in names]
        return first

    return _of_gguf(_fetched(model, fetch))


def _gguf_parts(model: str, revision: str | None) -> tuple[str, list[str]]:
    """Return the repository of a model in GGUF files on the hub, and the names of its file or parts."""
    repository, _, quantisation = model.partition(":")
    names = _gguf_names(repository, revision)
    name = _of_quantisation(model, quantisation, names)
    return repository, [str(part) for part in part_paths(Path(name), exists=names.__contains__)]


def _require_no_gguf(model: str, revision: str | None) -> None:
    """Raise CheckpointError for a repository without safetensors that has GGUF files."""
    names = list[str]()
    with suppress(OSError, ValueError):  # not reached: the engine finds out what is missing
        names = _gguf_names(model, revision)
    if names:
        raise CheckpointError(
            f"{model} has no safetensors, but GGUF files: give {model}:QUANTISATION; {_listed(names)}"
        )


def _gguf_names(repository: str, revision: str | None) -> list[str]:
    """Return the names of the GGUF files of a repository; if the hub is not reached, of those in its cache.

    Raises OSError and ValueError, as the hub does.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    # The base of the errors of the HTTP library that this version of the hub uses.
    any_http_error: type[BaseException] = HfHubHTTPError.__bases__[0]
    try:
        # In one request. Without a network, the list of a tree is asked for six times within 23 seconds.
        names = [file.rfilename for file in HfApi().model_info(repository, revision=revision).siblings or []]
    except (any_http_error, OSError) as error:
        names = _cached_names(repository, revision)
        if not names:
            raise OSError(str(error) or type(error).__name__) from error
    return [name for name in names if is_gguf(name)]


def _cached_names(repository: str, revision: str | None) -> list[str]:
    """Return the names of the GGUF files of a repository that are in the hub's cache."""
    from huggingface_hub import snapshot_download

    with suppress(OSError):  # none
        directory = Path(snapshot_download(repository, revision=revision, local_files_only=True))
        found = (file.relative_to(directory).as_posix() for file in directory.rglob("*"))
        return [name for name in found if is_gguf(name)]
    return []


def _of_quantisation(model: str, quantisation: str, names: Iterable[str]) -> str:
    """Return the file whose name has the quantisation. Raises CheckpointError, with those that there are."""
    word = re.compile(rf"(?<![a-z0-9]){re.escape(quantisation.lower())}(?![a-z0-9_])")
    found = [name for name in _models(names) if quantisation and word.search(name.lower())]
    if len(found) == 1:
        return found[0]
    problem = f"{len(found)} GGUF files" if found else "no GGUF file"
    raise CheckpointError(f"{model}: {problem} of this quantisation; {_listed(names)}")


def _fetched(model: str, fetch: Callable[[], str]) -> Path:
    try:
        return Path(fetch())
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{model!r} is neither a directory nor a model that could be fetched from the hub: {reason}"
        ) from error
