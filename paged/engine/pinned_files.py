"""PinnedPrefixes: the pinned prefixes of an engine process, and the files that keep them after its end.

Each prefix has a file of `LLMEngine.save_prefix` in the folder of its model. The files of all models together
take at most a number of bytes: the least recently used are removed first.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from ..base.errors import PagedError, RequestError, ResourceError, UsageError
from ..options.lora_request import namespace_of
from ..text.prompt_parser import ParsedPrompt
from . import prefixes
from .engine import LLMEngine

logger = logging.getLogger(__name__)

PREFIX_FILE = ".prefix"
_HEADER_BYTES = 2**16  # more than a file has beside its tensors
Prefix = tuple[bytes, tuple[int, ...]]  # namespace, tokens


class PinnedPrefixes:
    """The prefixes of an engine that are pinned, the oldest first."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._pinned: dict[Prefix, None] = {}

    def pin(self, token_ids: list[int], namespace: bytes) -> int:
        """Pin the cached blocks of a prefix. Return their number of tokens. Raises as `pin_prefix` does."""
        prefixes.require_cache(self._engine.core)
        size = self._engine.block_manager.block_size
        whole = token_ids[: len(token_ids) // size * size]
        if not whole:
            raise RequestError(f"the prompt has {len(token_ids)} tokens and fills no block of {size}")
        num = prefixes.pin_cached(self._engine.core, ParsedPrompt(None, whole, namespace))
        self._pinned[namespace, tuple(whole)] = None
        return num

    def unpin(self, token_ids: list[int], namespace: bytes) -> int:
        """Allow a pinned prefix to be evicted. Return its number of tokens. Raises UsageError."""
        size = self._engine.block_manager.block_size
        whole = token_ids[: len(token_ids) // size * size]
        num = prefixes.unpin_parsed(self._engine.core, ParsedPrompt(None, whole, namespace))
        self._pinned.pop((namespace, tuple(whole)), None)
        return num

    def unpin_all_of(self, content_hash: str) -> None:
        """Allow the prefixes of a LoRA adapter to be evicted, which no request can name any more."""
        start = namespace_of(content_hash)
        for namespace, token_ids in [*self._pinned]:
            if namespace.startswith(start):
                with suppress(UsageError):  # a failed step has unpinned it
                    self.unpin([*token_ids], namespace)

    def forget(self) -> None:
        """Note that the engine has forgotten all prefixes."""
        self._pinned.clear()

    def keep(self, folder: Path, most_bytes: int) -> int:
        """Write the pinned prefixes to the folder of this model, in place of what is there. Return how many.

        most_bytes: that the files of all models may take. What does not fit is lost, and logged.

        Raises ResourceError if the folder cannot be written.
        """
        num = 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(folder.parent):
                for path in folder.glob(f"*{PREFIX_FILE}*"):
                    path.unlink()
                for namespace, token_ids in reversed(
                    self._pinned
                ):  # the newest is the likeliest to be of use
                    num += self._keep(folder, most_bytes, ParsedPrompt(None, [*token_ids], namespace))
        except OSError as error:
            raise ResourceError(f"{folder} cannot be written: {error.strerror}") from error
        return num

    def _keep(self, folder: Path, most_bytes: int, prompt: ParsedPrompt) -> bool:
        num_bytes = self._num_bytes(len(prompt.token_ids))
        what = f"a pinned prefix of {len(prompt.token_ids):,} tokens"
        if not _make_room(folder, num_bytes, most_bytes):
            logger.warning(
                "%s is lost: it takes %s bytes of the %s", what, f"{num_bytes:,}", f"{most_bytes:,}"
            )
            return False
        name = hashlib.sha256(repr((prompt.namespace, prompt.token_ids)).encode()).hexdigest()[:32]
        try:
            engine = self._engine
            prefixes.move_states(engine.core)
            path = folder / f"{name}{PREFIX_FILE}"
            prefixes.save(path, engine.block_manager, engine.runner, engine.fingerprint, prompt)
        except PagedError as error:
            logger.warning("%s is lost: %s", what, error)
            return False
        return True

    def _num_bytes(self, num_tokens: int) -> int:
        """Return what the file of a prefix takes at most."""
        engine = self._engine
        of_block = sum(_bytes_of_one(each) for each in engine.runner.read_blocks([], []).values())
        num_blocks = num_tokens // engine.block_manager.block_size * len(engine.block_manager.windows)
        of_state = 0
        if engine.block_manager.snapshots is not None:
            of_state = sum(_bytes_of_one(each) for each in engine.runner.read_states([]).values())
        tables = num_tokens * len(engine.block_manager.windows) * 4 + num_blocks * 24
        return num_blocks * (of_block + of_state) + tables + _HEADER_BYTES

    def load(self, folder: Path) -> int:
        """Load and pin the prefixes of this model's folder. Return how many. What cannot be is logged."""
        num = 0
        try:
            paths = sorted(folder.glob(f"*{PREFIX_FILE}"), key=lambda path: path.stat().st_mtime)
        except OSError as error:
            logger.warning("the pinned prefixes in %s are lost: %s", folder, error)
            paths = []
        for path in paths:
            try:
                self._engine.load_prefix(path)
                token_ids, namespace = _prefix_in(path)
                self.pin(token_ids, namespace)
            except (PagedError, OSError) as error:
                logger.warning("the pinned prefix in %s is lost: %s", path, error)
                continue
            os.utime(path)
            num += 1
        return num


def _bytes_of_one(empty: Tensor) -> int:
    """Return the bytes of one block in a tensor that has none: [num_layers, 0, ...]."""
    return math.prod(empty.shape[:1] + empty.shape[2:]) * empty.element_size()


def _prefix_in(path: Path) -> tuple[list[int], bytes]:
    """Return the tokens and the namespace of a file that holds one prefix."""
    with safe_open(path, framework="pt") as file:
        namespaces = json.loads((file.metadata() or {}).get("namespaces", "{}"))
        token_ids = file.get_tensor("token_ids")[file.get_tensor("groups") == 0]
    if not token_ids.numel():
        raise RequestError(f"{path} has no prefix")
    return token_ids.flatten().tolist(), bytes.fromhex(next(iter(namespaces.values()), ""))


def _make_room(folder: Path, num_bytes: int, most_bytes: int) -> bool:
    """Remove the least recently used files of other models until a file fits. Return whether it does."""
    if num_bytes > most_bytes:
        return False
    own = sum(path.stat().st_size for path in folder.glob(f"*{PREFIX_FILE}"))
    others = [path for path in folder.parent.glob(f"*/*{PREFIX_FILE}") if path.parent != folder]
    others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    used = own + sum(path.stat().st_size for path in others)
    while others and used + num_bytes > most_bytes:
        oldest = others.pop()
        used -= oldest.stat().st_size
        oldest.unlink()
        logger.warning("the pinned prefix in %s is lost: it makes room for another one", oldest)
    return used + num_bytes <= most_bytes


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Let one process at a time count and write files."""
    with (place / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
