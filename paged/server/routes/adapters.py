"""Routes of the operator that load and unload LoRA adapters while requests run."""

from __future__ import annotations

from ...protocol.calls.adapters import LoadAdapterCall, UnloadAdapterCall
from ..front_end import FrontEnd
from ..http.exchange import Exchange
from ..http.failures import HttpError

PLAIN_TEXT = "text/plain; charset=utf-8"


async def load_adapter(front: FrontEnd, exchange: Exchange) -> None:
    """Load an adapter from the path in the body. The response is sent when all engines have the adapter."""
    _check_is_here(front, exchange)
    call = await front.read_call(exchange, LoadAdapterCall)
    await front.load_adapter(call)
    text = f"Success: LoRA adapter '{call.name}' added successfully."
    await exchange.respond(200, text.encode(), PLAIN_TEXT)


async def unload_adapter(front: FrontEnd, exchange: Exchange) -> None:
    """Forget an adapter. Requests that have begun keep it."""
    _check_is_here(front, exchange)
    call = await front.read_call(exchange, UnloadAdapterCall)
    await front.unload_adapter(call)
    text = f"Success: LoRA adapter '{call.name}' removed successfully."
    await exchange.respond(200, text.encode(), PLAIN_TEXT)


def _check_is_here(front: FrontEnd, exchange: Exchange) -> None:
    """Raise HttpError unless the operator has allowed these routes at the start."""
    if not front.options.allow_runtime_lora_updating:
        raise HttpError(
            404,
            f"{exchange.route} is not here: it needs paged serve --enable-lora --allow-runtime-lora-updating",
            code="not_here",
        )
