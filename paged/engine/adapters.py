"""Adapters: the LoRA adapters that an engine has read, by name, number and content."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from ..architectures.config import ModelConfig
from ..base.errors import CheckpointError, RequestError
from ..base.validation import shown
from ..checkpoints.lora_adapter import LoraAdapter, read_adapter
from ..model.lora import LoraSlots
from ..options.lora_request import LoRARequest

WITHOUT_SLOTS = "the engine takes no LoRA adapters: make it with enable_lora=True"


@dataclass(frozen=True, slots=True)
class _Known:
    """An adapter that was asked for. number: that of its content, for the scheduler and the runner."""

    request: LoRARequest
    number: int
    namespace: bytes  # that of its KV


class Adapters:
    """The adapters of an engine.

    model: its config, with the names that tensors have in transformers' checkpoints.
    memory: the adapters in host memory, by number; the runner copies them into slots.
    in_use: returns the numbers of unfinished requests' adapters.
    most: how many adapters stay in memory, beside those in use.
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
        self._most = most
        self._in_use = in_use
        self._by_name: dict[str, _Known] = {}
        self._used = OrderedDict[int, None]()  # the numbers in memory, the longest unused first
        self._number_of: dict[bytes, int] = {}  # by digest
        self._numbers = itertools.count(1)

    @property
    def requests(self) -> list[LoRARequest]:
        """The adapters that are known, in the order in which they came."""
        return [known.request for known in self._by_name.values()]

    def find(self, request: Any) -> tuple[int, bytes]:
        """Return the number of a request's adapter, and what the namespace of its KV begins with.

        Reads the adapter if it is not in memory.

        Raises RequestError for what is no LoRARequest or contradicts an adapter that is known, and for an
        adapter that cannot be read.
        """
        if not isinstance(request, LoRARequest):
            raise RequestError(
                f"lora_request must be a LoRARequest, got {shown(request)}", param="lora_request"
            )
        known = self._known(request)
        if known is None or known.number not in self._memory:
            known = self._load(request)
        self._used[known.number] = None
        self._used.move_to_end(known.number)
        return known.number, known.namespace

    def _known(self, request: LoRARequest) -> _Known | None:
        """Return an adapter that is known by this name, number and path; None if it is to be read."""
        same_name = self._by_name.get(request.lora_name)
        same_id = next(
            (k for k in self._by_name.values() if k.request.lora_int_id == request.lora_int_id), None
        )
        if same_name is same_id and (same_name is None or same_name.request.lora_path == request.lora_path):
            return same_name
        if request.load_inplace:
            return None
        other = same_name or same_id
        assert other is not None
        raise RequestError(
            f"adapter {request.lora_name!r} with number {request.lora_int_id} and path "
            f"{request.lora_path!r} contradicts {other.request.lora_name!r} with number "
            f"{other.request.lora_int_id} and path {other.request.lora_path!r}, which is loaded: remove that "
            "one, or give load_inplace=True",
            param="lora_request",
        )

    def _load(self, request: LoRARequest) -> _Known:
        try:
            adapter = read_adapter(request.lora_path, self._model)
            self._slots.check(adapter)
        except CheckpointError as error:
            raise RequestError(
                f"adapter {request.lora_name!r} cannot be used: {error}", param="lora_request"
            ) from error
        number = self._number_of.get(adapter.digest)
        if number is None:
            number = self._number_of[adapter.digest] = next(self._numbers)
        for name, known in [*self._by_name.items()]:
            if known.request.lora_int_id == request.lora_int_id or name == request.lora_name:
                del self._by_name[name]
        self._memory[number] = adapter
        self._used[number] = None
        known = self._by_name[request.lora_name] = _Known(request, number, b"lora" + adapter.digest)
        self._evict()
        return known

    def _evict(self) -> None:
        """Drop the longest unused adapters from memory, but those of unfinished requests."""
        if len(self._used) <= self._most:
            return
        in_use = self._in_use()
        newest = next(reversed(self._used))
        for number in [*self._used]:
            if len(self._used) <= self._most:
                break
            if number not in in_use and number != newest:
                del self._used[number], self._memory[number]

    def remove(self, lora_int_id: int) -> bool:
        """Forget an adapter; unfinished requests keep it. Return whether it was known."""
        for name, known in self._by_name.items():
            if known.request.lora_int_id == lora_int_id:
                del self._by_name[name]
                shared = any(other.number == known.number for other in self._by_name.values())
                if not shared and known.number in self._memory and known.number not in self._in_use():
                    del self._used[known.number], self._memory[known.number]
                return True
        return False
