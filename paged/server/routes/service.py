"""Routes about the server itself: its models, its state and its version."""

from __future__ import annotations

from typing import Any

from ... import __version__
from ...base.errors import EngineDeadError
from ...engine.model_text import ModelText
from ...protocol.endpoints import GET_MODEL
from ...protocol.openapi import openapi
from ..front_end import STOPPING, FrontEnd
from ..http.exchange import Exchange, encode_json
from ..http.failures import HttpError
from ..telemetry.metrics import CONTENT_TYPE

SHOWN_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class ModelsRoute:
    """Lists the names of the model, with its maximum context length."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front

    async def __call__(self, exchange: Exchange) -> None:
        models = [_model(self._front, name) for name in self._front.names_for(exchange.key)]
        await exchange.respond_json(200, {"object": "list", "data": models})


class ModelRoute:
    """Describes the model under one of its names; any other name is 404."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front

    async def __call__(self, exchange: Exchange) -> None:
        name = exchange.route.removeprefix("/v1/models/")
        if not name:
            raise HttpError(404, "there is no '/v1/models/' here, but /v1/models and /v1/models/{model}")
        exchange.route = GET_MODEL.path  # for the metrics
        self._front.check_model(name, exchange.key)
        await exchange.respond_json(200, _model(self._front, name))


def shown_defaults(text: ModelText) -> dict[str, float]:
    """Return the numbers that shape the sampling of requests that give none, for /v1/models."""
    return {name: getattr(text.default_params, name) for name in SHOWN_DEFAULTS}


def _model(front: FrontEnd, name: str) -> dict[str, Any]:
    adapter = front.adapter_of(name)
    return {
        "id": name,
        "object": "model",
        "created": front.created,
        "owned_by": "paged",
        "root": front.engine.config.model if adapter is None else adapter.lora_path,
        "parent": None if adapter is None else front.names[0],
        "max_model_len": front.engine.max_model_len,
        "chat_defaults": front.engine.text.chat_defaults,
        "sampling_defaults": shown_defaults(front.engine.text),
    }


class HealthRoute:
    """Returns 200 if every engine process is alive or being replaced in time, else 503. Computes nothing."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front

    async def __call__(self, exchange: Exchange) -> None:
        if self._front.engine.dead_error is not None:
            raise self._front.engine.dead_error
        for trouble in await self._front.engine.troubles():
            raise HttpError(503, trouble)
        await exchange.respond_json(200, {"status": "ok"})


class ReadyRoute:
    """Returns 200 if requests are accepted, else 503 with the reason."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front

    async def __call__(self, exchange: Exchange) -> None:
        if self._front.is_draining:
            raise HttpError(503, STOPPING)
        self._front.check_serving()
        if not await self._front.engine.is_fit():
            raise HttpError(
                503, "no engine process serves: all are being replaced, or have sent nothing lately"
            )
        await exchange.respond_json(200, {"status": "ready"})


class VersionRoute:
    """Returns the version of the server."""

    def __init__(self, front: FrontEnd) -> None:
        pass

    async def __call__(self, exchange: Exchange) -> None:
        await exchange.respond_json(200, {"version": __version__})


class MetricsRoute:
    """Returns metrics for Prometheus."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front

    async def __call__(self, exchange: Exchange) -> None:
        try:
            stats = dict(enumerate(await self._front.engine.stats_by_engine()))
        except EngineDeadError:
            stats = {}  # what the server counted is still there
        removed = self._front.engine.removed_stats()
        await exchange.respond(200, self._front.metrics.render(stats, removed), CONTENT_TYPE)


class OpenAPIRoute:
    """Returns the OpenAPI description of all routes."""

    def __init__(self, front: FrontEnd) -> None:  # noqa: ARG002
        self._body = encode_json(openapi())

    async def __call__(self, exchange: Exchange) -> None:
        await exchange.respond(200, self._body)
