"""Routes of the operator: the requests in progress, and what becomes of the server."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ...base.errors import ConfigError
from ...base.validation import shown
from ...protocol.endpoints import POST_END, POST_LOAD, POST_REPLICAS, POST_UNLOAD
from ..front_end import FrontEnd
from ..http.exchange import Exchange
from ..http.failures import HttpError
from ..telemetry.records import RequestRecord

OF_MODELS = {"load": POST_LOAD, "unload": POST_UNLOAD}
MOST_DIGITS = 6  # of a number in a path


async def list_requests(front: FrontEnd, exchange: Exchange) -> None:
    """List the requests in progress, oldest first, without prompts and answers."""
    now = time.monotonic()
    data = [_described(record, now) for record in front.open_records]
    await exchange.respond_json(200, {"object": "list", "data": data})


def _described(record: RequestRecord, now: float) -> dict[str, Any]:
    progress = [*record.progress.values()]
    return {
        "id": record.request_id,
        "tenant": record.tenant,
        "user": record.user,
        "route": record.route,
        "stream": record.stream,
        "seconds": round(now - record.received, 3),
        "prompts": record.num_prompts,
        "engines": sorted({own.engine for own in progress}),
        "prompt_tokens": sum(own.num_prompt_tokens or 0 for own in progress),
        "generated_tokens": sum(sum(own.num_generated) for own in progress),
    }


async def end_requests(front: FrontEnd, exchange: Exchange) -> None:
    """End the requests with an id. Clients may have given several requests the same id."""
    request_id = exchange.take_parameter(POST_END)
    num = await front.end_requests(request_id)
    if not num:
        raise HttpError(404, f"no request {request_id!r} is in progress", code="not_found")
    await exchange.respond_json(200, {"ended": num})


async def resize(front: FrontEnd, exchange: Exchange) -> None:
    """Add or remove engine processes, then respond; 400 if it is impossible."""
    number = exchange.take_parameter(POST_REPLICAS)
    if not (number.isascii() and number.isdigit()) or len(number) > MOST_DIGITS:
        raise HttpError(400, f"replicas must be a number, got {shown(number)}", param="replicas")
    try:
        await front.resize(int(number))
    except ConfigError as error:
        raise HttpError(400, str(error), param="replicas") from None
    await exchange.respond_json(200, {"replicas": int(number)})


async def pause(front: FrontEnd, exchange: Exchange) -> None:
    """Pause the server: new requests are refused until it is resumed."""
    front.is_paused = True
    await exchange.respond_json(200, {"paused": True})


async def resume(front: FrontEnd, exchange: Exchange) -> None:
    """Accept new requests again."""
    front.is_paused = False
    await exchange.respond_json(200, {"paused": False})


async def drain(front: FrontEnd, exchange: Exchange) -> None:
    """End the server after the response is sent."""
    await exchange.respond_json(200, {"draining": True})
    asyncio.get_running_loop().call_soon(front.drain)


async def reset_prefix_cache(front: FrontEnd, exchange: Exchange) -> None:
    """Forget the cached prefixes of all tenants."""
    await front.engine.reset_prefix_cache()
    await exchange.respond_json(200, {"reset": True})


async def reload_keys(front: FrontEnd, exchange: Exchange) -> None:
    """Read the keys file again. If it is wrong, the status is 400 and the earlier keys stay in force."""
    try:
        num = await front.reload_keys()
    except ConfigError as error:
        raise HttpError(400, str(error)) from None
    await exchange.respond_json(200, {"keys": num})


async def refuse_model_change(front: FrontEnd, exchange: Exchange) -> None:
    """Refuse to load or unload the one model of a server."""
    verb = exchange.route.rpartition("/")[2]
    exchange.route = OF_MODELS[verb].path
    raise HttpError(
        400,
        f"this server has one model, {front.names[0]!r}, which stays loaded; one with several "
        f"names or --models can {verb} them",
    )
