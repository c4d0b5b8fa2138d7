"""Routes of a server of several models: those about the server, and the one that passes requests on."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from ...base.durations import parse_duration
from ...base.errors import EngineDeadError, RequestError
from ...base.validation import shown
from ...checkpoints.library.models_file import ModelEntry
from ...protocol import endpoints
from ...protocol.calls.call import AnswerCall
from ...protocol.endpoints import (
    GET_MODEL,
    POST_LOAD,
    POST_UNLOAD,
    ROUTES,
    Endpoint,
    error_in_form_of,
    is_of_messages,
)
from ...scheduler.stats import EngineStats
from ..app import App, with_origins
from ..front_end import STOPPING
from ..gallery import PERIOD_S
from ..http.exchange import LOADED_AFTER, Exchange, until_disconnect
from ..http.failures import HttpError
from ..http.streams import BLANK_LINE, StreamedResponse, event, named_event
from ..routes.page import CLOSED_LOOK_S
from ..routes.pins import PinFields, answer_pin
from ..routes.service import shown_defaults
from ..routes.table import HANDLERS, Handler, with_front
from ..telemetry.metrics import CONTENT_TYPE, merged, rendered
from .lobby import LoadedModel, Lobby
from .ollama import (
    CopyRoute,
    DeleteRoute,
    ManyLmStudioRoute,
    ManyPsRoute,
    ManyShowRoute,
    ManyTagsRoute,
    PullRoute,
)

WAIT_S = 5.0  # for a model, between two blank lines of a stream
MOST_PEEKED = 2048  # bytes of a field that says which model
MOST_UNLOADING = 2**14  # bytes of a body that asks for no answer


class _Peek(msgspec.Struct):
    """The fields of a body that say which model it is for, as JSON."""

    model: msgspec.Raw = msgspec.Raw(b"null")
    stream: msgspec.Raw = msgspec.Raw(b"null")
    keep_alive: msgspec.Raw = msgspec.Raw(b"null")


_peek = msgspec.json.Decoder(_Peek)


def field_of(raw: msgspec.Raw, name: str) -> Any:
    """Return a field of a body. Raises RequestError for one that is much too long."""
    text = bytes(raw)
    if len(text) > MOST_PEEKED:
        raise RequestError(f"{name} has {len(text):,} bytes; {MOST_PEEKED:,} is the most", param=name)
    return json.loads(text)


def peeked(body: bytes) -> _Peek:
    """Return the fields that say where a body goes. Raises RequestError unless it is an object of JSON."""
    try:
        return _peek.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not an object of JSON: {error}") from None


class PassRoute:
    """Passes a request to the front end of its model, which is loaded first if it has to be."""

    def __init__(self, endpoint: Endpoint, lobby: Lobby) -> None:
        self._endpoint = endpoint
        self._lobby = lobby

    async def __call__(self, exchange: Exchange) -> None:
        lobby = self._lobby
        lobby.check_serving()
        body = await exchange.read_body()
        began = time.monotonic()
        fields = peeked(body)
        entry = lobby.entry_of(field_of(fields.model, "model"), exchange.key)
        keep_alive = field_of(fields.keep_alive, "keep_alive")
        keep_alive_s = None if keep_alive is None else parse_duration("keep_alive", keep_alive)
        if keep_alive_s == 0 and (ready := self._unloads_nothing(entry, body)) is not None:
            await exchange.respond_json(200, ready)
            return
        streams = self._endpoint.streamed == endpoints.EVENTS and bytes(fields.stream) == b"true"
        async with AsyncExitStack() as stack:
            try:
                async with until_disconnect(exchange):
                    model = await self._model(exchange, stack, entry, keep_alive_s, streams=streams)
            except Exception as error:  # of any kind: a stream that has begun ends with it
                if exchange.status is None:
                    raise
                await _end_with(exchange, *await _failure_of(lobby, exchange, error))
                return
            exchange.load_s = time.monotonic() - began
            exchange.end()  # its model's front end counts the body from now on
            await pass_on(exchange, model.app, body)

    def _unloads_nothing(self, entry: ModelEntry, body: bytes) -> dict[str, Any] | None:
        """Return the answer to a body that unloads a model which is not here, and must not be loaded for it.

        Returns None for any other body.
        """
        resident = self._lobby.host.residency.models.get(entry.name)
        if (resident is not None and resident.is_here) or len(body) > MOST_UNLOADING:
            return None
        if self._endpoint not in (endpoints.POST_OLLAMA_CHAT, endpoints.POST_OLLAMA_GENERATE):
            return None
        call = endpoints.parse_call(self._endpoint.path, json.loads(body))
        assert isinstance(call, AnswerCall)
        return call.immediate(entry.name)

    async def _model(
        self,
        exchange: Exchange,
        stack: AsyncExitStack,
        entry: ModelEntry,
        keep_alive: float | None,
        *,
        streams: bool,
    ) -> LoadedModel:
        """Return the model, which stays loaded until the context of `stack` ends."""
        lobby = self._lobby
        lobby.on_wait(1)
        waiting = asyncio.ensure_future(stack.enter_async_context(lobby.host.using(entry, keep_alive)))
        response = StreamedResponse(exchange)
        try:
            while not (await asyncio.wait([waiting], timeout=WAIT_S))[0]:
                if streams:  # so that the client does not give up
                    await response.write(BLANK_LINE)
            found = waiting.result()
        except BaseException:
            waiting.cancel()
            with suppress(BaseException):
                await waiting
            raise
        finally:
            lobby.on_wait(-1)
        assert isinstance(found, LoadedModel)
        return found


async def _failure_of(lobby: Lobby, exchange: Exchange, error: Exception) -> tuple[int, dict[str, Any]]:
    exchange.error = error
    failure = await lobby.failure_of(error, exchange.request_id)
    return failure.status, failure.body


async def _end_with(exchange: Exchange, status: int, body: dict[str, Any]) -> None:
    """End a stream of events that has begun with an error."""
    await exchange.write(_error_event(exchange, status, body), more=False)


def _error_event(exchange: Exchange, status: int, body: dict[str, Any]) -> bytes:
    value = error_in_form_of(exchange.route, status, body, exchange.request_id)
    return named_event(value) if is_of_messages(exchange.route) else event(value)


async def pass_on(exchange: Exchange, app: ASGIApp, body: bytes) -> None:
    """Have another application answer a request whose body was read, perhaps after a stream has begun."""
    has_begun = exchange.status is not None
    is_given = False
    exchange.is_passed_on = True
    failed: int | None = None
    parts = list[bytes]()

    async def receive() -> Message:
        nonlocal is_given
        if is_given:
            return await exchange.receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal failed
        if message["type"] == "http.response.start":
            exchange.status = exchange.status or message["status"]
            if has_begun and message["status"] != 200:
                failed = message["status"]
            if has_begun:
                return
        elif failed is not None:  # the body of an error becomes the last event
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                await exchange.write(_as_event(exchange, b"".join(parts)), more=False)
            return
        elif not message.get("more_body", False):
            exchange.is_complete = True
        await exchange.send(message)

    headers = [each for each in exchange.scope["headers"] if each[0] != b"x-request-id"]
    headers.append((b"x-request-id", exchange.request_id.encode()))
    scope = {**exchange.scope, "headers": headers, LOADED_AFTER: exchange.load_s}
    await app(scope, receive, send)


def _as_event(exchange: Exchange, body: bytes) -> bytes:
    """Return the body of an error as an event; it has the form of its API already."""
    value = json.loads(body)
    return named_event(value) if is_of_messages(exchange.route) else event(value)


async def list_models(lobby: Lobby, exchange: Exchange) -> None:
    """List the models, loaded or not."""
    allowed = {*lobby.names_for(exchange.key)}
    entries = [each for each in lobby.catalog.entries() if each.name in allowed]
    await exchange.respond_json(
        200, {"object": "list", "data": [model_card(lobby, each) for each in entries]}
    )


async def describe_model(lobby: Lobby, exchange: Exchange) -> None:
    """Describe a model."""
    entry = lobby.entry_of(exchange.take_parameter(GET_MODEL), exchange.key)
    await exchange.respond_json(200, model_card(lobby, entry))


def model_card(lobby: Lobby, entry: ModelEntry) -> dict[str, Any]:
    """Return what /v1/models says of a model. What only an engine knows is null until it was loaded once."""
    loaded = lobby.loaded.get(entry.name)
    resident = lobby.host.residency.models.get(entry.name)
    return {
        "id": entry.name,
        "object": "model",
        "created": lobby.created,
        "owned_by": "paged",
        "root": entry.checkpoint,
        "parent": None,
        "max_model_len": lobby.lengths.get(entry.name),
        "chat_defaults": {} if loaded is None else loaded.front.engine.text.chat_defaults,
        "sampling_defaults": {} if loaded is None else shown_defaults(loaded.front.engine.text),
        "load_seconds": lobby.host.load_seconds.get(entry.name),
        "state": "absent" if resident is None else resident.stage.value,
    }


async def tell_health(lobby: Lobby, exchange: Exchange) -> None:
    """Return 200 if the engine processes of all loaded models are alive, or being replaced; else 503."""
    for name, model in lobby.loaded.items():
        for trouble in await model.front.engine.troubles():
            raise HttpError(503, f"{name}: {trouble}")
    await exchange.respond_json(200, {"status": "ok"})


async def tell_readiness(lobby: Lobby, exchange: Exchange) -> None:
    """Return 200 if requests are accepted, even if no model is loaded; else 503 with the reason."""
    if lobby.is_draining:
        raise HttpError(503, STOPPING)
    lobby.check_serving()
    await exchange.respond_json(200, {"status": "ready", "loaded": [*lobby.loaded]})


async def export_metrics(lobby: Lobby, exchange: Exchange) -> None:
    """Return the metrics of all models for Prometheus."""
    parts = [lobby.metrics.families({})]
    loaded = lobby.loaded
    for name, metrics in lobby.metrics_of.items():
        stats: dict[int, EngineStats] = {}
        if name in loaded:
            with suppress(EngineDeadError):
                stats = dict(enumerate(await loaded[name].front.engine.stats_by_engine()))
        parts.append(metrics.families(stats))
    await exchange.respond(200, rendered(merged(parts)), CONTENT_TYPE)


def last_used(lobby: Lobby, wanted: str | None) -> LoadedModel | None:
    """Return the model of a name, or by default the one that was used last; None if it is not loaded."""
    if wanted is not None:
        return lobby.loaded.get(wanted)
    models = lobby.host.residency.models
    return max(lobby.loaded.values(), key=lambda each: models[each.entry.name].last_use, default=None)


class ManyWatchRoute:
    """Streams pictures of the engine of one model: ?model=NAME, else the one that was used last."""

    def __init__(self, lobby: Lobby) -> None:
        self._lobby = lobby

    async def __call__(self, exchange: Exchange) -> None:
        lobby = self._lobby
        if not lobby.options.page:
            raise HttpError(404, "there is no '/watch' here: the server was started with --no-page")
        name = exchange.query.get("model")
        wanted = None if name is None else lobby.entry_of(name, exchange.key).name
        response = StreamedResponse(exchange)
        lobby.keep_alive.on_write(response)
        try:
            async with until_disconnect(exchange):
                while not lobby.is_closed:
                    await self._show(response, exchange, last_used(lobby, wanted))
                await response.write(b"", more=False)
        finally:
            lobby.keep_alive.remove(response)

    async def _show(self, response: StreamedResponse, exchange: Exchange, model: LoadedModel | None) -> None:
        """Send a picture, or that there is none."""
        if model is None:
            await response.write(event({"scope": "all", "engines": []}))
            await asyncio.sleep(CLOSED_LOOK_S)
            return
        gallery = model.front.gallery
        with gallery.watching(), suppress(TimeoutError):
            async with asyncio.timeout(CLOSED_LOOK_S):
                await gallery.wait()
            await response.write(b"data: " + gallery.view(exchange.owner) + b"\n\n")
            self._lobby.keep_alive.on_write(response)
        await asyncio.sleep(PERIOD_S)


async def load(lobby: Lobby, exchange: Exchange) -> None:
    """Load a model, and answer when it is loaded."""
    entry = lobby.entry_of(exchange.take_parameter(POST_LOAD), None)
    async with lobby.host.using(entry):
        await exchange.respond_json(200, model_card(lobby, entry))


async def unload(lobby: Lobby, exchange: Exchange) -> None:
    """Unload a model once no request uses it, and answer at once."""
    entry = lobby.entry_of(exchange.take_parameter(POST_UNLOAD), None)
    was_here = lobby.host.unload(entry.name)
    await exchange.respond_json(200, {"model": entry.name, "unloads": was_here})


class PinRoute:
    """Pins the KV of a prompt in a model, which is loaded first if it has to be, or unpins it."""

    def __init__(self, endpoint: Endpoint, lobby: Lobby) -> None:
        self._lobby = lobby
        self._endpoint = endpoint

    async def __call__(self, exchange: Exchange) -> None:
        entry = self._lobby.entry_of(exchange.take_parameter(self._endpoint), None)
        given = PinFields.of(await exchange.read_body())
        async with until_disconnect(exchange), self._lobby.host.using(entry) as loaded:
            assert isinstance(loaded, LoadedModel)
            await answer_pin(loaded.front, exchange, self._endpoint, given)


async def reset_prefix_cache(lobby: Lobby, exchange: Exchange) -> None:
    """Forget the cached prefixes of all loaded models."""
    for front in [*lobby.fronts]:
        await front.engine.reset_prefix_cache()
    await exchange.respond_json(200, {"reset": True})


async def refuse_replicas(lobby: Lobby, exchange: Exchange) -> None:  # noqa: ARG001
    """Refuse to add engine processes: each model of a server of several has one."""
    number = exchange.take_parameter(endpoints.POST_REPLICAS)
    raise HttpError(400, f"replicas {shown(number)}: each of several models has one engine process")


async def refuse_adapters(lobby: Lobby, exchange: Exchange) -> None:  # noqa: ARG001
    """Refuse to load and unload LoRA adapters, which only a server of one model has."""
    raise HttpError(
        404,
        f"{exchange.route} is not here: this server has several models, and adapters go with one",
        code="not_here",
    )


class OfModelRoute:
    """Answers for a model that is loaded: ?model=NAME, else the one that was used last."""

    def __init__(self, route: Callable[[Any], Handler], lobby: Lobby) -> None:
        self._route = route
        self._lobby = lobby

    async def __call__(self, exchange: Exchange) -> None:
        lobby = self._lobby
        name = exchange.query.get("model")
        wanted = None if name is None else lobby.entry_of(name, exchange.key).name
        model = last_used(lobby, wanted)
        if model is None:
            which = "no model is" if wanted is None else f"{wanted} is not"
            raise HttpError(404, f"{which} loaded; a request loads one", param="model", code="not_loaded")
        lobby.entry_of(model.entry.name, exchange.key)
        await self._route(model.front)(exchange)


def _handlers() -> Iterator[tuple[Endpoint, Callable[[Any], Handler]]]:
    for each in ROUTES:
        if each.call is not None and each not in _OWN:
            yield each, partial(PassRoute, each)
        else:
            yield each, _OWN.get(each, HANDLERS[each])


# The other routes are those of a server of one model.
_OWN: dict[Endpoint, Callable[[Any], Handler]] = {
    endpoints.GET_MODELS: with_front(list_models),
    endpoints.GET_MODEL: with_front(describe_model),
    endpoints.GET_HEALTH: with_front(tell_health),
    endpoints.GET_PROPS: partial(OfModelRoute, HANDLERS[endpoints.GET_PROPS]),
    endpoints.GET_SLOTS: partial(OfModelRoute, HANDLERS[endpoints.GET_SLOTS]),
    endpoints.GET_TAGS: ManyTagsRoute,
    endpoints.GET_PS: ManyPsRoute,
    endpoints.POST_OLLAMA_SHOW: ManyShowRoute,
    endpoints.POST_OLLAMA_PULL: PullRoute,
    endpoints.POST_OLLAMA_COPY: CopyRoute,
    endpoints.DELETE_OLLAMA: DeleteRoute,
    endpoints.GET_LMSTUDIO_MODELS: ManyLmStudioRoute,
    endpoints.GET_LMSTUDIO_MODEL: ManyLmStudioRoute,
    endpoints.GET_READY: with_front(tell_readiness),
    endpoints.GET_METRICS: with_front(export_metrics),
    endpoints.GET_WATCH: ManyWatchRoute,
    endpoints.POST_LOAD: with_front(load),
    endpoints.POST_UNLOAD: with_front(unload),
    endpoints.POST_PIN: partial(PinRoute, endpoints.POST_PIN),
    endpoints.POST_UNPIN: partial(PinRoute, endpoints.POST_UNPIN),
    endpoints.POST_REPLICAS: with_front(refuse_replicas),
    endpoints.POST_LOAD_ADAPTER: with_front(refuse_adapters),
    endpoints.POST_UNLOAD_ADAPTER: with_front(refuse_adapters),
    endpoints.POST_RESET_PREFIX_CACHE: with_front(reset_prefix_cache),
}
LOBBY_HANDLERS = dict(_handlers())


def new_lobby_app(lobby: Lobby) -> ASGIApp:
    """Return the application that serves several models."""
    return with_origins(App(lobby, handlers=LOBBY_HANDLERS), lobby.options)


def new_lobby_metrics_app(lobby: Lobby) -> ASGIApp:
    """Return the application of --metrics-port, which needs no key."""
    return App(lobby, endpoints.MONITORED, is_open=True, handlers=LOBBY_HANDLERS)
