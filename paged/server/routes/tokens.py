"""Text to tokens and back, which needs no engine."""

from __future__ import annotations

from typing import Any

from ...engine.async_base import AsyncEngine
from ...protocol.calls.tokens import TextCall
from ..front_end import FrontEnd
from ..http.exchange import Exchange, encode_in_pieces


async def convert_text(front: FrontEnd, exchange: Exchange) -> None:
    """Convert text to tokens or tokens to text, with the tokenizer and the chat template alone."""
    text = front.engine.text
    call = await front.read_call(exchange, TextCall)  # type: ignore[type-abstract]
    with front.preparing():
        await front.fetch_images(exchange, call)
        pool = text.rendering if call.renders else text.tokenizing
        answer = await front.in_pool(pool, exchange, call, _answer, call, front.engine)
    await exchange.respond(200, answer)


def _answer(call: TextCall, engine: AsyncEngine[Any]) -> bytes:
    return encode_in_pieces(call.answer(engine.text, engine.max_model_len))
