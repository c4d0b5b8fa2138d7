"""LoadedAdapters: the LoRA adapters that users may name, without their tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..base.errors import RequestError
from ..base.validation import check_int, shown
from ..options.lora_request import LoRARequest


class LoadedAdapters:
    """The adapters by their names, in the order in which they came, each with the hash of its content."""

    def __init__(self) -> None:
        self._by_name: dict[str, LoRARequest] = {}

    @property
    def requests(self) -> list[LoRARequest]:
        """The adapters in the order in which they came."""
        return [*self._by_name.values()]

    def find(self, request: Any) -> LoRARequest | None:
        """Return the adapter of this name, number and path; None if it is to be read.

        Raises RequestError for anything but a LoRARequest, and if it contradicts a loaded adapter.
        """
        if not isinstance(request, LoRARequest):
            raise RequestError(
                f"lora_request must be a LoRARequest, got {shown(request)}", param="lora_request"
            )
        if request.load_inplace:
            return None
        same_name = self._by_name.get(request.lora_name)
        same_id = self._of_number(request.lora_int_id)
        if same_name is same_id and (same_name is None or same_name.lora_path == request.lora_path):
            return same_name
        other = same_name or same_id
        assert other is not None
        raise RequestError(
            f"adapter {request.lora_name!r} with number {request.lora_int_id} and path "
            f"{request.lora_path!r} contradicts {other.lora_name!r} with number {other.lora_int_id} and path "
            f"{other.lora_path!r}, which is loaded: remove that one, or give load_inplace=True",
            param="lora_request",
        )

    def _of_number(self, lora_int_id: int) -> LoRARequest | None:
        # A copy, as another thread may look while one is added.
        return next((each for each in [*self._by_name.values()] if each.lora_int_id == lora_int_id), None)

    def add(self, request: LoRARequest, content_hash: str) -> LoRARequest:
        """Note an adapter that was read, in place of any of its name or number. Return it with its hash."""
        while (other := self._of_number(request.lora_int_id)) is not None:
            del self._by_name[other.lora_name]
        self._by_name.pop(request.lora_name, None)
        known = replace(request, content_hash=content_hash, load_inplace=False)
        self._by_name[request.lora_name] = known
        return known

    def remove(self, lora_int_id: int) -> LoRARequest | None:
        """Forget an adapter. Return it; None if it is not here. Raises RequestError for what is no number."""
        check_int(RequestError, "lora_id", lora_int_id, 1, 2**63 - 1)
        known = self._of_number(lora_int_id)
        return known and self._by_name.pop(known.lora_name)

    def has_content(self, content_hash: str | None) -> bool:
        """Return whether an adapter of this content is here, under any name."""
        return any(each.content_hash == content_hash for each in self._by_name.values())
