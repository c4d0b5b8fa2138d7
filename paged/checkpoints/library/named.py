"""Which packed weights belong to the models that models.toml names: they are evicted last."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ...architectures.gguf_paths import is_gguf, part_paths
from ...base.errors import PagedError
from ..open_file import stamp_of
from ..weights_cache.content import known_digest
from ..weights_cache.folder import WeightsCache
from .local import find_local
from .models_file import ModelsFile


def named_digests(cache: WeightsCache, file: ModelsFile | None = None) -> dict[str, str]:
    """Return the digest of each named model's files by the model's name, as far as it was noted.

    file: the file of models, by default the user's. A wrong one names none.
    """
    found = dict[str, str]()
    with suppress(PagedError):
        for entry in (file or ModelsFile.of_user(must_exist=False)).entries.values():
            with suppress(PagedError, OSError):
                stamps = [stamp_of(path.stat()) for path in _files_of(entry.checkpoint)]
                digest = known_digest(cache, stamps) if stamps else None
                if digest is not None:
                    found[entry.name] = digest
    return found


def _files_of(checkpoint: str) -> list[Path]:
    """Return the files of a checkpoint's weights; none if it is not on this machine."""
    path = Path(checkpoint).expanduser()
    if path.is_dir():
        return sorted(path.glob("*.safetensors")) or sorted(path.glob("*.gguf"))
    if path.is_file() and is_gguf(path.name):
        return part_paths(path)
    local = find_local(checkpoint)
    return [] if local is None else [*local.files]
