"""Routes of the operator that pin the KV of a prompt."""

from __future__ import annotations

from typing import Any

import msgspec

from ...base.errors import RequestError, UsageError
from ...options.lora_request import LoRARequest
from ...protocol.endpoints import POST_PIN, POST_UNPIN, Endpoint
from ..front_end import FrontEnd
from ..http.exchange import Exchange, until_disconnect
from ..http.failures import HttpError


class PinFields(msgspec.Struct, forbid_unknown_fields=True):
    """What is pinned: a text, token ids, or the messages that a chat begins with."""

    prompt: str | list[int] | msgspec.UnsetType = msgspec.UNSET
    messages: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    cache_salt: str | None = None

    @classmethod
    def of(cls, body: bytes) -> PinFields:
        """Return the fields of a body that says what is pinned. Raises RequestError."""
        try:
            given = msgspec.json.decode(body, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RequestError(
                f"the body must have prompt or messages, and perhaps cache_salt: {error}"
            ) from None
        if (given.prompt is msgspec.UNSET) == (given.messages is msgspec.UNSET):
            raise RequestError("the body must have one of prompt and messages")
        return given


async def pin(front: FrontEnd, exchange: Exchange) -> None:
    """Pin the KV of a prompt in the model of the server, or in one of its adapters."""
    await _pin_here(front, exchange, POST_PIN)


async def unpin(front: FrontEnd, exchange: Exchange) -> None:
    """Let the KV of a prompt be evicted that was pinned in the model or in an adapter."""
    await _pin_here(front, exchange, POST_UNPIN)


async def _pin_here(front: FrontEnd, exchange: Exchange, endpoint: Endpoint) -> None:
    name = exchange.take_parameter(endpoint)
    front.check_model(name, None)
    adapter = front.adapter_of(name)
    given = PinFields.of(await exchange.read_body())
    async with until_disconnect(exchange):
        await answer_pin(front, exchange, endpoint, given, adapter)


async def answer_pin(
    front: FrontEnd,
    exchange: Exchange,
    endpoint: Endpoint,
    given: PinFields,
    adapter: LoRARequest | None = None,
) -> None:
    """Pin the KV of a prompt in a model that is loaded, or unpin it, and send how many tokens it has."""
    prompt: Any = given.prompt
    if given.messages is not msgspec.UNSET:
        messages = given.messages
        if front.system is not None and not any(each.get("role") == "system" for each in messages):
            messages = [{"role": "system", "content": front.system}, *messages]
        prompt = front.engine.text.render_chat(
            messages,
            add_generation_prompt=False,
            chat_template=front.options.chat_template,
            chat_template_kwargs=front.options.chat_template_kwargs,
        )
        if "multi_modal_data" in prompt:
            raise RequestError("messages with images are not pinned", param="messages")
    try:
        num = await front.engine.pin_prefix(
            prompt, given.cache_salt, is_pinned=endpoint is POST_PIN, lora_request=adapter
        )
    except UsageError as error:
        raise HttpError(400, str(error)) from None
    name = front.names[0] if adapter is None else adapter.lora_name
    await exchange.respond_json(200, {"model": name, endpoint.path.rpartition("/")[2]: num})
