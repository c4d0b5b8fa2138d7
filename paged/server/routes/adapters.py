"""Routes of the operator that load and unload LoRA adapters while requests run."""

from __future__ import annotations

from ...protocol.calls.adapters import LoadAdapterCall, UnloadAdapterCall
from ..front_end import FrontEnd
from ..http.exchange import Exchange
from ..http.failures import HttpError

PLAIN_TEXT = "text/plain; charset=utf-8"


class _AdapterRoute:
    """A route that exists only if the operator has said so at the start."""

    def __init__(self, path: str, front: FrontEnd) -> None:
        self._path = path
        self._front = front

    def check_is_here(self) -> None:
        """Raise HttpError unless adapters may be loaded and unloaded."""
        if not self._front.options.allow_runtime_lora_updating:
            raise HttpError(
                404,
                f"{self._path} is not here: it needs paged serve --enable-lora --allow-runtime-lora-updating",
                code="not_here",
            )


class LoadAdapterRoute(_AdapterRoute):
    """Loads an adapter from a path that the body names. The response is sent when all engines have it."""

    async def __call__(self, exchange: Exchange) -> None:
        self.check_is_here()
        call = await self._front.read_call(exchange, self._path, LoadAdapterCall)
        await self._front.load_adapter(call)
        text = f"Success: LoRA adapter '{call.name}' added successfully."
        await exchange.respond(200, text.encode(), PLAIN_TEXT)


class UnloadAdapterRoute(_AdapterRoute):
    """Forgets an adapter. Requests that have begun keep it."""

    async def __call__(self, exchange: Exchange) -> None:
        self.check_is_here()
        call = await self._front.read_call(exchange, self._path, UnloadAdapterCall)
        await self._front.unload_adapter(call)
        text = f"Success: LoRA adapter '{call.name}' removed successfully."
        await exchange.respond(200, text.encode(), PLAIN_TEXT)
