"""Routes of the operator: the requests in progress, and what becomes of the server."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ...base.errors import ConfigError
from ...base.validation import shown
from ...protocol.endpoints import POST_END, POST_LOAD, POST_PIN, POST_REPLICAS, POST_UNLOAD, POST_UNPIN
from ..front_end import FrontEnd
from ..http.exchange import Exchange
from ..http.failures import HttpError
from ..telemetry.records import RequestRecord

OF_MODELS = {"load": POST_LOAD, "unload": POST_UNLOAD, "pin": POST_PIN, "unpin": POST_UNPIN}
MOST_DIGITS = 6  # of a number in a path


class RequestsRoute:
    """Lists the requests in progress, oldest first, without prompts and answers."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front

    async def __call__(self, exchange: Exchange) -> None:
        now = time.monotonic()
        data = [_described(record, now) for record in self._front.open_records]
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


class EndRoute:
    """Ends the requests with an id. Clients may have given several requests the same id."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front

    async def __call__(self, exchange: Exchange) -> None:
        request_id = exchange.route.removeprefix("/admin/requests/").removesuffix("/end")
        exchange.route = POST_END.path  # for the metrics
        num = await self._front.end_requests(request_id)
        if not num:
            raise HttpError(404, f"no request {request_id!r} is in progress", code="not_found")
        await exchange.respond_json(200, {"ended": num})


class ReplicasRoute:
    """Adds or removes engine processes. The response is sent when this is done; 400 if it is impossible."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front

    async def __call__(self, exchange: Exchange) -> None:
        number = exchange.route.removeprefix("/admin/replicas/")
        exchange.route = POST_REPLICAS.path  # for the metrics
        if not (number.isascii() and number.isdigit()) or len(number) > MOST_DIGITS:
            raise HttpError(400, f"replicas must be a number, got {shown(number)}", param="replicas")
        try:
            await self._front.resize(int(number))
        except ConfigError as error:
            raise HttpError(400, str(error), param="replicas") from None
        await exchange.respond_json(200, {"replicas": int(number)})


class PauseRoute:
    """Pauses the server: new requests are refused until it is resumed."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front

    async def __call__(self, exchange: Exchange) -> None:
        self._front.is_paused = True
        await exchange.respond_json(200, {"paused": True})


class ResumeRoute:
    """Accepts new requests again."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front

    async def __call__(self, exchange: Exchange) -> None:
        self._front.is_paused = False
        await exchange.respond_json(200, {"paused": False})


class DrainRoute:
    """Ends the server after the response is sent."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front

    async def __call__(self, exchange: Exchange) -> None:
        await exchange.respond_json(200, {"draining": True})
        asyncio.get_running_loop().call_soon(self._front.drain)


class ResetPrefixCacheRoute:
    """Forgets the cached prefixes of all tenants."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front

    async def __call__(self, exchange: Exchange) -> None:
        await self._front.engine.reset_prefix_cache()
        await exchange.respond_json(200, {"reset": True})


class ReloadKeysRoute:
    """Reads the keys file again. If it is wrong, the status is 400 and the earlier keys stay in force."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front

    async def __call__(self, exchange: Exchange) -> None:
        try:
            num = await self._front.reload_keys()
        except ConfigError as error:
            raise HttpError(400, str(error)) from None
        await exchange.respond_json(200, {"keys": num})


class OneModelRoute:
    """Refuses to load, unload or pin anything of the model of a server that has one."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front

    async def __call__(self, exchange: Exchange) -> None:
        verb = exchange.route.rpartition("/")[2]
        exchange.route = OF_MODELS[verb].path
        raise HttpError(
            400,
            f"this server has one model, {self._front.names[0]!r}, which stays loaded; one with several "
            f"names or --models can {verb} them",
        )
