"""Routes about the server itself: its models, its state and its version."""

from __future__ import annotations

from typing import Any

from ... import __version__
from ...errors import EngineDeadError
from ...protocol.endpoints import GET_MODEL
from ...protocol.openapi import openapi
from .. import connection
from ..front_end import STOPPING, FrontEnd
from ..http.exchange import Exchange, encode_json
from ..http.failures import HttpError
from ..telemetry.metrics import CONTENT_TYPE


class ModelsRoute:
    """The names of the model, with the longest context."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front

    async def __call__(self, exchange: Exchange) -> None:
        models = [_model(self._front, name) for name in self._front.names]
        await exchange.respond_json(200, {"object": "list", "data": models})


class ModelRoute:
    """One name of the model; another one is 404."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front

    async def __call__(self, exchange: Exchange) -> None:
        name = exchange.route.removeprefix("/v1/models/")
        if not name:
            raise HttpError(404, "there is no '/v1/models/' here, but /v1/models and /v1/models/{model}")
        exchange.route = GET_MODEL.path  # for the metrics
        self._front.check_model(name)
        await exchange.respond_json(200, _model(self._front, name))


def _model(front: FrontEnd, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": front.created,
        "owned_by": "paged",
        "root": front.engine.config.model,
        "parent": None,
        "max_model_len": front.engine.max_model_len,
    }


class HealthRoute:
    """Whether all engine processes run: 200, or 503 if one has stopped or is silent."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front

    async def __call__(self, exchange: Exchange) -> None:
        if self._front.engine.dead_error is not None:
            raise self._front.engine.dead_error
        if self._front.engine.errored:
            raise HttpError(503, "an engine process has ended, others run; the server's log says why")
        silent = await self._front.engine.silent_s()
        check_heard({replica: s for replica, s in silent.items() if s > connection.SILENT_S})
        await exchange.respond_json(200, {"status": "ok"})


class ReadyRoute:
    """Whether requests are accepted: 200, or 503 with the reason, such as that all processes are silent."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front

    async def __call__(self, exchange: Exchange) -> None:
        if self._front.is_draining:
            raise HttpError(503, STOPPING)
        self._front.check_serving()
        silent = await self._front.engine.silent_s()
        if min(silent.values()) > connection.SILENT_S:
            check_heard(silent)
        await exchange.respond_json(200, {"status": "ready"})


def check_heard(silent: dict[int, float]) -> None:
    """Raise HttpError, naming the engine process, if one has been silent for too long."""
    for replica, seconds in silent.items():
        raise HttpError(
            503,
            f"engine process {replica} has sent nothing for {seconds:.0f} s, and it sends a "
            "heartbeat every second: it hangs, or the machine is overloaded",
        )


class VersionRoute:
    """The version of the server."""

    def __init__(self, front: FrontEnd) -> None:
        pass

    async def __call__(self, exchange: Exchange) -> None:
        await exchange.respond_json(200, {"version": __version__})


class MetricsRoute:
    """Counts for Prometheus."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front

    async def __call__(self, exchange: Exchange) -> None:
        try:
            stats = dict(enumerate(await self._front.engine.stats_by_engine()))
        except EngineDeadError:
            stats = {}  # what the server counted is still there
        await exchange.respond(200, self._front.metrics.render(stats), CONTENT_TYPE)


class OpenAPIRoute:
    """The description of all routes."""

    def __init__(self, front: FrontEnd) -> None:  # noqa: ARG002
        self._body = encode_json(openapi())

    async def __call__(self, exchange: Exchange) -> None:
        await exchange.respond(200, self._body)
