"""Adapters: the LoRA adapters that an engine has read, by name, number and content."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..architectures.config import ModelConfig
from ..base.errors import CheckpointError, RequestError
from ..checkpoints.adapter_files import read_adapter, with_names_of_transformers
from ..checkpoints.lora_adapter import LoraAdapter
from ..model.lora import LoraSlots
from ..options.lora_request import LoRARequest, namespace_of
from ..requests.request import RequestGroup
from ..runner.model_runner import ModelRunner
from ..scheduler.scheduler import Scheduler
from .loaded_adapters import LoadedAdapters


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """A request for an adapter, and the adapter, read for it while the engine computes steps."""

    request: LoRARequest
    adapter: LoraAdapter


def new_adapters(
    runner: ModelRunner, scheduler: Scheduler, groups: Mapping[str, RequestGroup], directory: Path
) -> Adapters:
    """Return the adapters of an engine whose runner has slots for them.

    groups: the unfinished requests. directory: of the model.
    """
    config = runner.config
    scheduler.have_adapters(config.max_loras)

    def in_use() -> set[int]:
        made = (sample for group in groups.values() for sample in group.samples)
        return {r.inputs.adapter for r in (*made, *scheduler.running, *scheduler.waiting())}

    assert runner.lora is not None, "the runner has slots"
    most = config.max_cpu_loras or config.max_loras
    named = with_names_of_transformers(runner.model_config, directory)
    return Adapters(runner.lora, runner.adapters, named, most, in_use)


class Adapters:
    """The LoRA adapters that an engine knows.

    model: its config, with the names that tensors have in transformers' checkpoints.
    memory: the adapters in host memory, by number; the runner copies them into slots. A number stands for a
        content, under whatever names.
    most: how many adapters stay in memory besides those in use. The longest unused leave first, and are read
        again when a request needs them.
    in_use: returns the numbers of unfinished requests' adapters.

    loaded: the adapters that requests may name.
    """

    def __init__(
        self,
        slots: LoraSlots,
        memory: dict[int, LoraAdapter],
        model: ModelConfig,
        most: int,
        in_use: Callable[[], Collection[int]],
    ) -> None:
        self._slots = slots
        self._memory = memory
        self._model = model
        self.most = most
        self._in_use = in_use
        self.loaded = LoadedAdapters()
        self._used = OrderedDict[int, None]()  # the numbers in memory, the longest unused first
        self._number_of: dict[str, int] = {}  # by the hash of the content
        self._numbers = itertools.count(1)

    @property
    def requests(self) -> list[LoRARequest]:
        """The adapters that are known, in the order in which they came."""
        return self.loaded.requests

    def prepare(self, request: Any) -> Any:
        """Return what `find` takes without reading a file. Any thread may call this.

        Raises RequestError as `find` does.
        """
        if isinstance(request, ReadAdapter):
            return request
        wanted = self._hash_of(request)
        return request if self._has(wanted) else ReadAdapter(request, self._read(request, wanted))

    def is_in_memory(self, request: Any) -> bool:
        """Return whether `find` reads no file for a request. Raises RequestError as `find` does."""
        return self._has(self._hash_of(request))

    def find(self, given: LoRARequest | ReadAdapter) -> tuple[int, bytes]:
        """Return the number of a request's adapter, and what the namespace of its KV begins with.

        Reads the adapter if it is not in memory.

        Raises RequestError for what is no LoRARequest or contradicts an adapter that is known, and for an
        adapter that cannot be read, or has another content than it had when it was loaded.
        """
        request = given.request if isinstance(given, ReadAdapter) else given
        wanted = self._hash_of(request)
        number = 0 if wanted is None else self._number_of.get(wanted, 0)
        if number not in self._memory:
            is_other = isinstance(given, ReadAdapter) and wanted not in (None, given.adapter.digest.hex())
            found = self.load(request if is_other else given)
            number = self._number_of[found]
            if wanted is None:
                self.loaded.add(request, found)
            wanted = found
        assert wanted is not None
        self._used.move_to_end(number)
        return number, namespace_of(wanted)

    def namespace_of(self, given: LoRARequest | ReadAdapter) -> bytes:
        """Return what the namespace of a request's KV begins with. Reads an adapter that is not known.

        Raises RequestError as `find` does.
        """
        wanted = self._hash_of(given.request if isinstance(given, ReadAdapter) else given)
        return self.find(given)[1] if wanted is None else namespace_of(wanted)

    def load(self, given: LoRARequest | ReadAdapter) -> str:
        """Read an adapter into memory, if it is not there. Return the hash of its content."""
        if not isinstance(given, ReadAdapter):
            given = self.prepare(given)
        if not isinstance(given, ReadAdapter):
            wanted = self._hash_of(given)
            assert wanted is not None, "an adapter in memory has no hash"
            return wanted
        content_hash = given.adapter.digest.hex()
        number = self._number_of.get(content_hash)
        if number is None:
            number = self._number_of[content_hash] = next(self._numbers)
        self._memory[number] = given.adapter
        self._used[number] = None
        self._used.move_to_end(number)
        self._evict()
        return content_hash

    def _hash_of(self, request: Any) -> str | None:
        """Return the hash of a request's adapter; None if it is to be read whatever is in memory."""
        if isinstance(request, LoRARequest) and request.content_hash is not None:
            return request.content_hash
        known = self.loaded.find(request)
        return None if known is None else known.content_hash

    def _has(self, content_hash: str | None) -> bool:
        return content_hash is not None and self._number_of.get(content_hash) in self._memory

    def _read(self, request: LoRARequest, wanted: str | None) -> LoraAdapter:
        """Read an adapter, whose content must have the hash `wanted` unless that is None."""
        try:
            adapter = read_adapter(request.lora_path, self._model)
            self._slots.check(adapter)
        except CheckpointError as error:
            raise RequestError(
                f"adapter {request.lora_name!r} cannot be used: {error}", param="lora_request"
            ) from error
        if wanted not in (None, found := adapter.digest.hex()):
            raise RequestError(
                f"adapter {request.lora_name!r} cannot be used: {request.lora_path!r} has other weights than "
                f"when it was loaded, with the hash {found} in place of {wanted}; load it again, with "
                "load_inplace=True",
                param="lora_request",
            )
        return adapter

    def _evict(self) -> None:
        """Drop the longest unused adapters from memory. Adapters of unfinished requests stay."""
        if len(self._used) <= self.most:
            return
        in_use = self._in_use()
        newest = next(reversed(self._used))
        for number in [*self._used]:
            if len(self._used) <= self.most:
                break
            if number not in in_use and number != newest:
                self._drop(number)

    def _drop(self, number: int) -> None:
        del self._used[number], self._memory[number]

    def remove(self, lora_int_id: int) -> bool:
        """Forget an adapter. Return whether it was known. Unfinished requests continue with it."""
        known = self.loaded.remove(lora_int_id)
        content_hash = None if known is None else known.content_hash
        if content_hash is not None and not self.loaded.has_content(content_hash):
            self.forget(content_hash)
        return known is not None

    def forget(self, content_hash: str) -> None:
        """Free the memory of an adapter, unless an unfinished request has it."""
        number = self._number_of.get(content_hash, 0)
        if number in self._memory and number not in self._in_use():
            self._drop(number)
