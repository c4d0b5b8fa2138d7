"""Pull: download a model of the hub into its cache, resumed and compared with the hub's digests.

The cache has the hub's own layout, so that other programs find what is pulled here. The hub's library starts
an interrupted file anew and compares sizes alone; here a part that is there is continued, and each file has
the digest that the hub says, or is no file of the cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from ...architectures.gguf_paths import is_gguf, listed, part_paths
from ...architectures.gguf_tags import tags_of
from ...architectures.missing_config import instead_of_config
from ...base.errors import CheckpointError, MissingModelError, ResourceError
from ..hub import HUB_FILES, HUB_IGNORED
from .local import hub_cache

_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_HUB = re.compile(r"^(https?://)?(hf\.co|huggingface\.co)/", re.IGNORECASE)
_READ = 2**20
_TRIES = 5  # of a file whose download is cut, as long as each brings something
_SPARE_BYTES = 2**28  # of disk space that stay free
_LOOK_S = 0.1  # between two looks whether another process has finished a file


class HubError(MissingModelError):
    """A model that the hub does not have, does not give, or cannot send.

    status: the HTTP status of a server that answers so: 404, 403 or 502.
    """

    def __init__(self, message: str, status: int = 502) -> None:
        super().__init__(message)
        self.status = status


class RemoteFile(NamedTuple):
    """A file of a repository. digest: of git's object, or sha256 of a large file, in hexadecimal."""

    name: str
    size: int
    digest: str


class Progress(NamedTuple):
    """The progress of a pull. done, total: bytes of all its files. file: the file that is downloaded."""

    file: RemoteFile
    done: int
    total: int


def without_hub(name: str) -> str:
    """Return a name without the hub's address, which users of Ollama write before it."""
    return _HUB.sub("", name)


OnProgress = Callable[[Progress], None]


class RemoteModel:
    """A repository on the hub, as of its newest commit.

    files: all its files.

    Raises HubError if the hub has none, or does not answer.
    """

    def __init__(self, name: str, revision: str | None = None) -> None:
        from huggingface_hub import HfApi

        if not _REPOSITORY.fullmatch(name) or ".." in name or "--" in name:
            raise HubError(
                f"{name!r} is no repository of the hub: give owner/name or owner/name:QUANT", status=400
            )
        self.name = name
        with _telling_reasons(name):
            info = HfApi().model_info(name, revision=revision, files_metadata=True)
        self.commit = str(info.sha)
        self.files = [_file_of(name, each) for each in info.siblings or []]
        if not _DIGEST.fullmatch(self.commit):
            raise HubError(f"the hub gives no commit of {name}")

    @property
    def quantisations(self) -> dict[str, list[RemoteFile]]:
        """The GGUF models by their quantisation, each with its parts; the largest first. See `tags_of`."""
        by_name = {file.name: file for file in self.files}
        found = dict[str, list[RemoteFile]]()
        for tag, first in tags_of(by_name).items():
            parts = part_paths(Path(first), exists=by_name.__contains__)
            found[tag] = [by_name[str(part)] for part in parts]
        sizes = {name: sum(file.size for file in files) for name, files in found.items()}
        return dict(sorted(found.items(), key=lambda item: -sizes[item[0]]))

    @property
    def has_safetensors(self) -> bool:
        """Whether the repository has weights in safetensors."""
        return any(file.name.endswith(".safetensors") and "/" not in file.name for file in self.files)

    def files_of(self, quantisation: str | None) -> list[RemoteFile]:
        """Return the files of a GGUF model, or of the safetensors checkpoint. Raises CheckpointError."""
        if quantisation is None:
            chosen = [
                f for f in self.files if _matches(f.name, HUB_FILES) and not _matches(f.name, HUB_IGNORED)
            ]
            if not self.has_safetensors:
                raise CheckpointError(f"{self.name} has neither safetensors nor GGUF files on the hub")
            if not any(file.name == "config.json" for file in chosen):
                instead = instead_of_config(file.name for file in self.files)
                raise CheckpointError(f"{self.name} has no config.json on the hub{instead}")
            return chosen
        named = {name.casefold(): files for name, files in self.quantisations.items()}
        if quantisation.casefold() not in named:
            names = [file.name for file in self.files if is_gguf(file.name)]
            there = listed(names) if names else "it has no GGUF files"
            raise CheckpointError(f"{self.name}:{quantisation}: no GGUF file of this quantisation; {there}")
        return named[quantisation.casefold()]

    def pull(self, files: Sequence[RemoteFile], on_progress: OnProgress = lambda _: None) -> Path:
        """Download files that the cache lacks. Return the directory of this commit in the cache.

        on_progress: is called at every piece of a file; an error that it raises ends the pull, of which the
        next one goes on.

        Raises ResourceError without disk space, which is looked for first, and HubError if the hub does not
        answer, or for a file that does not have the digest that the hub says.
        """
        folder = hub_cache() / f"models--{self.name.replace('/', '--')}"
        blobs = folder / "blobs"
        total = sum(file.size for file in files)
        try:
            blobs.mkdir(parents=True, exist_ok=True)
            self._check_space(blobs, files)
            done = 0
            for file in files:
                _Download(self, file, blobs / file.digest).run(_counting(on_progress, file, done, total))
                done += file.size
                on_progress(Progress(file, done, total))
            return self._link(folder, files)
        except OSError as error:
            raise ResourceError(
                f"{self.name} cannot be kept in {folder}: {error.strerror or error}"
            ) from None

    def _check_space(self, blobs: Path, files: Sequence[RemoteFile]) -> None:
        missing = [file for file in files if not (blobs / file.digest).exists()]
        there = sum(_size_of(_unfinished(blobs / file.digest)) for file in missing)
        wanted = sum(file.size for file in missing) - there
        free = shutil.disk_usage(blobs).free
        if wanted and wanted + _SPARE_BYTES > free:
            raise ResourceError(
                f"{self.name} takes {wanted / 1e9:,.3g} GB of disk space, and {blobs} has {free / 1e9:,.3g} "
                "GB free; make room, or set HF_HOME to another disk"
            )

    def _link(self, folder: Path, files: Sequence[RemoteFile]) -> Path:
        """Make the snapshot of the commit as the hub's library does. Whole models alone have one."""
        snapshot = folder / "snapshots" / self.commit
        for file in files:
            link = snapshot / file.name
            link.parent.mkdir(parents=True, exist_ok=True)
            target = os.path.relpath(folder / "blobs" / file.digest, link.parent)
            if not (link.is_symlink() and os.readlink(link) == target):
                new = _new(link)
                new.symlink_to(target)
                new.replace(link)
        refs = folder / "refs"
        refs.mkdir(exist_ok=True)
        new = _new(refs / "main")
        new.write_text(self.commit)
        new.replace(refs / "main")
        return snapshot


def _new(path: Path) -> Path:
    """Return a path at which nothing is, where this thread writes what will replace another path."""
    new = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.new")
    new.unlink(missing_ok=True)  # of a process with the same number that was killed
    return new


def _counting(on_progress: OnProgress, file: RemoteFile, before: int, total: int) -> Callable[[int], None]:
    """Return a callback for the bytes of a file, behind others that are there."""
    return lambda size: on_progress(Progress(file, before + size, total))


class _Download:
    """One file on its way into the cache."""

    def __init__(self, model: RemoteModel, file: RemoteFile, blob: Path) -> None:
        self._model = model
        self._file = file
        self._blob = blob

    def run(self, on_size: Callable[[int], None]) -> None:
        """Download the file, unless the cache has it. Two processes take turns: the second finds it there."""
        unfinished = _unfinished(self._blob)
        while not self._blob.exists():
            with unfinished.open("a+b") as part:
                _lock(part, on_size)
                if not _is_at(unfinished, part):  # another process has finished or removed it
                    continue
                self._fill(part, on_size)
                self._check(part)
                part.flush()
                os.fsync(part.fileno())
                unfinished.rename(self._blob)

    def _fill(self, part: BinaryIO, on_size: Callable[[int], None]) -> None:
        tries = 0
        while (size := part.seek(0, os.SEEK_END)) < self._file.size:
            tries += 1
            try:
                with _telling_reasons(self._model.name):
                    self._fetch(part, size, on_size)
            except HubError:
                got = part.seek(0, os.SEEK_END)
                if got == size or tries >= _TRIES:
                    raise
            else:
                if part.seek(0, os.SEEK_END) == size:
                    raise HubError(
                        f"{self._model.name}: {self._file.name} ends at {size:,} of {self._file.size:,} "
                        "bytes; pull it again"
                    )

    def _fetch(self, part: BinaryIO, begin: int, on_size: Callable[[int], None]) -> None:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils._headers import build_hf_headers
        from huggingface_hub.utils._http import get_session, hf_raise_for_status

        url = hf_hub_url(self._model.name, self._file.name, revision=self._model.commit)
        headers = {**build_hf_headers(), "accept-encoding": "identity"}
        if begin:
            headers["range"] = f"bytes={begin}-"
        with get_session().stream(
            "GET", url, headers=headers, follow_redirects=True, timeout=30.0
        ) as response:
            hf_raise_for_status(response)
            if begin and response.status_code != 206:  # it sends the whole file
                part.truncate(0)
                begin = 0
            for piece in response.iter_raw():  # as it comes: a cut loses nothing
                begin += len(piece)
                if begin > self._file.size:
                    break
                part.write(piece)
                on_size(begin)

    def _check(self, part: BinaryIO) -> None:
        """Compare the digest. A file of another one is removed, so that the next pull begins anew."""
        file = self._file
        part.seek(0)
        if len(file.digest) == 64:
            digest = hashlib.file_digest(part, "sha256").hexdigest()  # type: ignore[arg-type]
        else:
            sha1 = hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)
            while piece := part.read(_READ):
                sha1.update(piece)
            digest = sha1.hexdigest()
        if digest != file.digest:
            _unfinished(self._blob).unlink()
            raise HubError(
                f"{self._model.name}: {file.name} came with the digest {digest[:12]}…, and the hub says "
                f"{file.digest[:12]}…; it was removed, pull it again"
            )


def _file_of(name: str, sibling: Any) -> RemoteFile:
    """Return a file of the hub's answer. Raises CheckpointError for a file that must not be stored."""
    path = PurePosixPath(sibling.rfilename)
    if path.is_absolute() or ".." in path.parts or not sibling.rfilename.isprintable() or path.name == "":
        raise CheckpointError(f"{name} has a file {sibling.rfilename!r}, whose name leaves the folder")
    lfs = sibling.lfs
    digest = str(sibling.blob_id if lfs is None else lfs.sha256)
    if not _DIGEST.fullmatch(digest) or not isinstance(sibling.size, int) or sibling.size < 0:
        raise CheckpointError(f"the hub gives no digest and size of {sibling.rfilename!r} in {name}")
    return RemoteFile(str(path), sibling.size, digest)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _unfinished(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.paged-part")


def _lock(part: BinaryIO, on_size: Callable[[int], None]) -> None:
    """Lock an unfinished file, and tell its size while another process downloads it."""
    while True:
        try:
            fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            on_size(os.fstat(part.fileno()).st_size)
            time.sleep(_LOOK_S)


def _is_at(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


@contextmanager
def _telling_reasons(name: str) -> Iterator[None]:
    """Turn what the hub and the network raise into one HubError."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    any_http_error: type[BaseException] = HfHubHTTPError.__bases__[0]
    try:
        yield
    except GatedRepoError:
        raise HubError(
            f"{name} is gated: accept its terms on the hub, and give the token of your account "
            "(HF_TOKEN, or hf auth login)",
            status=403,
        ) from None
    except RepositoryNotFoundError:
        raise HubError(
            f"the hub has no model {name!r}, or your token may not see it (HF_TOKEN, or hf auth login)",
            status=404,
        ) from None
    except (any_http_error, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise HubError(f"{name} cannot be fetched from the hub: {reason}", _status_of(error)) from None
    except OSError as error:
        if error.filename is not None or (error.errno is not None and not isinstance(error, ConnectionError)):
            raise  # of the disk
        raise HubError(f"{name} cannot be fetched from the hub: {error}") from None


def _status_of(error: BaseException) -> int:
    """Return the status of an answer of the hub that refuses; that of a failed gateway for all others."""
    status = getattr(getattr(error, "response", None), "status_code", 502)
    return {401: 403, 403: 403, 404: 404}.get(status, 502)
