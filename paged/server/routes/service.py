"""Routes about the server itself: its models, its state and its version."""

from __future__ import annotations

from functools import cache
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


async def list_models(front: FrontEnd, exchange: Exchange) -> None:
    """List the names of the model, with its maximum context length."""
    models = [_model(front, name) for name in front.names_for(exchange.key)]
    await exchange.respond_json(200, {"object": "list", "data": models})


async def describe_model(front: FrontEnd, exchange: Exchange) -> None:
    """Describe the model under one of its names; any other name is 404."""
    name = exchange.take_parameter(GET_MODEL)
    if not name:
        raise HttpError(404, "there is no '/v1/models/' here, but /v1/models and /v1/models/{model}")
    front.check_model(name, exchange.key)
    await exchange.respond_json(200, _model(front, name))


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


async def tell_health(front: FrontEnd, exchange: Exchange) -> None:
    """Return 200 if every engine process is alive or being replaced in time, else 503. Compute nothing."""
    if front.engine.dead_error is not None:
        raise front.engine.dead_error
    for trouble in await front.engine.troubles():
        raise HttpError(503, trouble)
    await exchange.respond_json(200, {"status": "ok"})


async def tell_readiness(front: FrontEnd, exchange: Exchange) -> None:
    """Return 200 if requests are accepted, else 503 with the reason."""
    if front.is_draining:
        raise HttpError(503, STOPPING)
    front.check_serving()
    if not await front.engine.is_fit():
        raise HttpError(503, "no engine process serves: all are being replaced, or have sent nothing lately")
    await exchange.respond_json(200, {"status": "ready"})


async def tell_version(front: FrontEnd, exchange: Exchange) -> None:  # noqa: ARG001
    """Return the version of the server."""
    await exchange.respond_json(200, {"version": __version__})


async def export_metrics(front: FrontEnd, exchange: Exchange) -> None:
    """Return metrics for Prometheus."""
    try:
        stats = dict(enumerate(await front.engine.stats_by_engine()))
    except EngineDeadError:
        stats = {}  # what the server counted is still there
    removed = front.engine.removed_stats()
    await exchange.respond(200, front.metrics.render(stats, removed), CONTENT_TYPE)


async def describe_api(front: FrontEnd, exchange: Exchange) -> None:  # noqa: ARG001
    """Return the OpenAPI description of all routes."""
    await exchange.respond(200, _api())


@cache
def _api() -> bytes:
    return encode_json(openapi())
