"""Load weights that an earlier start has packed, or store this start's packed weights for the next."""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
from contextlib import ExitStack, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..architectures.hf_config import read_hf
from ..checkpoints.open_file import FileTensor, OpenFile
from ..checkpoints.weights_cache import content, file
from ..checkpoints.weights_cache.folder import NAME_DIGITS, CacheError, WeightsCache, warn_once
from ..kernels.panels import HAS_TILES, TARGET
from ..model.weights.kept import (
    KeepsWeights,
    KeptError,
    KeptLoader,
    LoadsWeights,
    RecordingLoader,
    describe,
    kept_loader,
    packer,
    recording_loader,
)
from ..model.weights.loading import Loader
from .sizes import Sizes

logger = logging.getLogger(__name__)

_LOWEST = 19  # priority of a thread on Linux
_LEAST_WAIT_S = 5.0
# Of config.json: where it lay, and what wrote it.
_NO_CONTENT = ("_name_or_path", "transformers_version")


class KeptWeights(KeepsWeights):
    """The packed weights of one model, or of a part of it, in a cache on disk.

    facts: everything besides the checkpoint's content that determines the packed bytes.
    files: the files of the checkpoint.
    """

    def __init__(
        self, cache: WeightsCache, facts: dict[str, Any], files: list[OpenFile], sizes: Sizes
    ) -> None:
        self.cache = cache
        self.facts: dict[str, Any] = json.loads(json.dumps(facts))
        self.key = sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()[:24]
        self.files = {each.path: each.stamp for each in files}
        self.title = _title(sizes)
        self.seconds = 0.0  # that packing took
        self._verify = sizes.config.verify_weights_cache
        self.path: Path | None = None  # where the weights are kept, once they are
        self._recorder: RecordingLoader | None = None
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()

    @classmethod
    def of(cls, sizes: Sizes, directory: Path, loader: Loader, *, create: bool = True) -> KeptWeights | None:
        """Return the packed weights that belong to a loader; None if they cannot be cached.

        create: whether to make the cache folder if it does not exist.
        """
        files = _files_of(loader)
        if not all(each.has_data for each in files):
            return None
        cache = WeightsCache.chosen(sizes.config.weights_cache, create=create)
        return None if cache is None else cls(cache, _facts(sizes, directory, loader), files, sizes)

    def load(self, model: LoadsWeights, loader: Loader) -> bool:
        """Load the weights from the cache, or else from the checkpoint, recording them for the cache.

        Returns False if an intact file turned out to belong to another model; the model is then only partly
        loaded.
        """
        found = self.find(loader)
        try:
            if found is not None:
                model.load(found)
                return True
        except KeptError as error:
            assert self.path is not None, "what was found has a file"
            self._discard(self.path, str(error))
            self.path = None
            return False
        self._recorder = recording_loader(loader)
        started = time.perf_counter()
        model.load(self._recorder)
        self.seconds = time.perf_counter() - started
        return True

    def find(self, loader: Loader) -> KeptLoader | None:
        """Return a loader that reads the weights from the cache; None if the cache does not have them."""
        digest = None if self._verify else content.known_digest(self.cache, self.files.values())
        if digest is None and self.cache.has_any(self.key):
            # Of a copy of the checkpoint, perhaps: reading it takes less time than packing it.
            digest = content.compute_digest(self.cache, self.files)
        found = None if digest is None else self._open(digest)
        if found is None:
            return None
        header, tensors = found
        return kept_loader(loader, header, tensors)

    def seconds_saved(self) -> float | None:
        """Return the seconds that packing the cached weights took; None if no cached weights are known."""
        digest = content.known_digest(self.cache, self.files.values())
        if digest is None:
            return None
        with suppress(CacheError), ExitStack() as stack:
            stream = self.cache.open(self._name(digest), is_use=False)
            if stream is not None:
                packed = file.read_header(stack.enter_context(stream))
                return float(packed.header["seconds"])
        return None

    def _open(self, digest: str) -> tuple[dict[str, Any], file.PackedTensors] | None:
        """Open the file of a checkpoint with this digest. A damaged one is removed, and said once."""
        name = self._name(digest)
        path = self.cache.path(name)
        try:
            stream = self.cache.open(name)
            if stream is None:
                return None
            with stream:
                packed = file.read_header(stream)
                if packed.header.get("facts") != self.facts or packed.header.get("content") != digest:
                    raise CacheError("it has the weights of another model")
                tensors = file.PackedTensors(packed)
        except CacheError as error:
            self._discard(path, str(error))
            return None
        except OSError as error:
            warn_once(f"packed weights are not kept: {path} cannot be mapped: {error.strerror}")
            return None
        logger.info("%s packed weights from %s", "mapped" if tensors.is_mapped else "copied", path)
        self.path = path
        return packed.header, tensors

    def _discard(self, path: Path, reason: str) -> None:
        """Remove a file that is of no use."""
        logger.debug("%s: %s", path, reason)
        warn_once(f"packed weights in {path} are damaged, or not those of the model: they are made again")
        self.cache.remove(path)

    def start_keeping(self) -> None:
        """Write the packed weights into the cache, by a thread of the lowest priority.

        If the process ends earlier, it waits for the thread: at most as long as packing took, but at least 5
        s.
        """
        if self._recorder is None or self._thread is not None:
            return
        self._thread = threading.Thread(target=self._keep, name="paged-weights", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def wait(self) -> Path | None:
        """Wait until the weights are cached. Return their file; None if they cannot be cached."""
        self.start_keeping()
        if self._thread is not None:
            self._thread.join()
        return self.path

    def _end(self) -> None:
        assert self._thread is not None
        with suppress(KeyboardInterrupt):
            self._thread.join(max(_LEAST_WAIT_S, self.seconds))
        self._is_over.set()
        self._thread.join(_LEAST_WAIT_S)

    def _keep(self) -> None:
        if sys.platform == "linux":  # elsewhere a priority is that of the process
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
        try:
            self._write()
        except InterruptedError:
            logger.info("packed weights were not kept: the process ended")
        except (OSError, MemoryError) as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            warn_once(f"packed weights are not kept in {self.cache.place}: {reason}")
        finally:
            self._recorder = None
            atexit.unregister(self._end)

    def _write(self) -> None:
        started = time.perf_counter()
        if not self.cache.is_writable:
            warn_once(f"packed weights are not kept: {self.cache.place} cannot be written")
            return
        recorder = self._recorder
        described = None if recorder is None else describe(recorder)
        if described is None:
            return
        values, tensors = described
        num_bytes = file.places_for(tensors)[1]
        digest = content.known_digest(self.cache, self.files.values())
        digest = digest or content.compute_digest(self.cache, self.files, self._is_over.is_set)
        if digest is None:
            logger.info("packed weights were not kept: the checkpoint changed, or the process ended")
            return
        name = self._name(digest)
        path = self.cache.path(name)
        if path.exists():  # of a copy of the checkpoint, or by another process
            self.path = path
            return
        header = {
            "title": self.title,
            "seconds": self.seconds,
            "facts": self.facts,
            "content": digest,
            **values,
        }
        if not self.cache.make_room(num_bytes, self._named_digests):
            warn_once(
                f"packed weights are not kept in {self.cache.place}: {self.cache.describe_room(num_bytes)}"
            )
            return
        with self.cache.writing(name) as stream:
            if stream is None:  # another process writes them
                return
            file.write(stream, header, tensors, self._is_over.is_set)
        self.path = path
        took = time.perf_counter() - started
        logger.info("kept packed weights for the next start: %.3g GB in %.1f s", num_bytes / 1e9, took)

    def _name(self, digest: str) -> str:
        return f"{self.key}-{digest[:NAME_DIGITS]}"

    def _named_digests(self) -> dict[str, str]:
        from ..checkpoints.library.named import named_digests  # seldom needed

        return named_digests(self.cache)


def _files_of(loader: Loader) -> list[OpenFile]:
    """Return the open files of a checkpoint, in the order of their tensors."""
    return [*dict.fromkeys(each.file for each in loader.sources.values() if isinstance(each, FileTensor))]


def _facts(sizes: Sizes, directory: Path, loader: Loader) -> dict[str, Any]:
    """Return what decides how weights are packed, but what the files hold. No path is in it."""
    config = {name: value for name, value in read_hf(directory).items() if name not in _NO_CONTENT}
    tensors = sorted((name, str(each.dtype), each.shape) for name, each in loader.sources.items())
    part = sizes.part
    # With adapters, gates and ups are not packed for a product that multiplies them.
    of_experts = "experts" in (sizes.config.lora_target_modules or ())
    apart = {"gates": "apart, of experts too" if of_experts else "apart"} if sizes.config.enable_lora else {}
    return apart | {
        "config": _digest_of(config),
        "tensors": _digest_of(tensors),
        "bytes": [each.size for each in _files_of(loader)],
        "dtype": sizes.dtype,
        "quantization": sizes.config.quantization,
        "part": None if part is None else [part.layers.start, part.layers.stop, part.num_layers],
        "shard": [sizes.shard.index, sizes.shard.count],
        "target": [sys.byteorder, *TARGET[1:], HAS_TILES],
        "packer": packer(),
    }


def _digest_of(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _title(sizes: Sizes) -> str:
    """Describe weights, for the list of the cache."""
    config = sizes.config
    part = sizes.part
    parts = [Path(config.model).name or config.model, config.quantization or sizes.dtype]
    if part is not None:
        parts.append(f"layers {part.layers.start} to {part.layers.stop - 1}")
    if sizes.shard.count > 1:
        parts.append(f"shard {sizes.shard.index + 1} of {sizes.shard.count}")
    return ", ".join(parts)
