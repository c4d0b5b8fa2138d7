"""Lobby: the front end of a server of several models, which passes each request to that of its model."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import quote

from ...base.byte_sizes import parse_bytes
from ...base.errors import ConfigError, PagedError, QueueFullError
from ...base.validation import shown
from ...checkpoints.library.models_file import ModelEntry
from ...checkpoints.library.names import check_is_here
from ...options.config import EngineConfig
from ...protocol.endpoints import ROUTES
from ..access.limits import KeyUsage, RateLimitError
from ..app import App
from ..engine_client import EngineClient
from ..front_end import STOPPING, FrontEnd
from ..http.budgets import SEEING_BODY_BYTES
from ..http.exchange import Exchange
from ..http.failures import FailureResponse, HttpError, failure_of
from ..options import ServeOptions
from ..shared import Shared
from ..telemetry.metrics import ServerMetrics
from ..telemetry.records import CLIENT_GONE, RATE_LIMIT, Observer, Observers, RequestRecord
from ..telemetry.request_log import announce
from .catalog import Catalog
from .host import Host, in_thread
from .weigh import ModelWeight, weigh

logger = logging.getLogger(__name__)

KEEP_S = 60.0  # for which an engine may write its pinned prefixes before it ends
FREE_SHARE = 0.8  # of the memory that is free at the start, without --memory


class PinnedPlace(NamedTuple):
    """Where the pinned prefixes of a model are kept, and how many bytes those of all models may take."""

    folder: str
    most_bytes: int

    @classmethod
    def of(cls, options: ServeOptions, name: str) -> Self | None:
        """Return the place of a model; None without prefix_dir."""
        if options.prefix_dir is None:
            return None
        # Of any name: none has a file of another, and none leaves the folder.
        own = Path(options.prefix_dir).expanduser().absolute() / f"model-{quote(name, safe='')}"
        return cls(str(own), options.most_prefix_bytes)


class ModelFrontEnd(FrontEnd):
    """The front end of one of several models. The lobby has found out that a request is for it."""

    def check_model(self, name: str | None, key: KeyUsage | None) -> None:
        """Do nothing: the lobby has checked the name."""


class LoadedModel:
    """A model with its engine, as it is served."""

    def __init__(
        self,
        entry: ModelEntry,
        client: EngineClient,
        front: ModelFrontEnd,
        pinned: PinnedPlace | None = None,
    ) -> None:
        self.entry = entry
        self.pinned = pinned
        self.num_sharing = 1  # engines that were busy when its engine was last told
        self.client = client
        self.front = front
        self.app = App(front)

    @property
    def is_dead(self) -> bool:
        """Whether its engine has ended for good."""
        return self.client.dead_error is not None

    @property
    def shares_threads(self) -> bool:
        """Whether its engine is one process whose number of threads no operator has chosen."""
        return self.client.config.num_threads is None and self.client.config.num_ranks == 1

    def share_threads(self, num_engines: int) -> None:
        """Have its engine compute with a share of the CPU threads, as so many engines are busy."""
        self.num_sharing = num_engines
        self.client.share_threads(num_engines)

    async def aclose(self) -> None:
        """Keep its pinned prefixes, and end its engine."""
        if self.pinned is not None and not self.is_dead:
            try:
                async with asyncio.timeout(KEEP_S):
                    await self.client.keep_pinned(*self.pinned)
            except (PagedError, RuntimeError, TimeoutError) as error:
                logger.warning("the pinned prefixes of %s are lost: %s", self.entry.name, error or "too slow")
        await self.client.__aexit__()


class Lobby:
    """What the routes of a server of several models share.

    catalog: the models by name.
    host: loads and unloads them.
    engine_options: returns the options of a model's engine, without its memory.
    read_template: returns the template that a template option of models.toml stands for, such as a file's.
    free: the bytes of memory that are free.

    The attributes that `FrontEnd` has, too, mean the same.
    """

    def __init__(
        self,
        catalog: Catalog,
        options: ServeOptions,
        observers: Sequence[Observer],
        *,
        engine_options: Callable[[ModelEntry], dict[str, Any]],
        free: int,
        read_template: Callable[[str | None], str | None] = lambda text: text,
    ) -> None:
        self.catalog = catalog
        self.options = options
        self.created = int(time.time())
        config = EngineConfig("demo")
        self.shared = Shared.of(options, config.scheduling_policy)
        self.gate = self.shared.gate
        self.keep_alive = self.shared.keep_alive
        # A model that sees no images takes less, which its own front end checks.
        self.max_request_bytes = options.max_request_bytes or SEEING_BODY_BYTES
        self.body_budget = self.shared.body_budget
        self.response_budget = self.shared.response_budget
        self.responses = self.shared.responses
        self.metrics = ServerMetrics(
            "",
            config,
            max_model_len=1,
            routes=[route.path for route in ROUTES],
            prefix=options.metrics_prefix,
            num_engines=0,
        )
        self.metrics_of: dict[str, ServerMetrics] = {}
        self.observers = Observers(self.metrics, *observers)
        self._observers = observers
        self._engine_options = engine_options
        self._read_template = read_template
        memory = int(FREE_SHARE * free) if options.memory is None else parse_bytes("memory", options.memory)
        self.host = Host(
            memory,
            weigh=self._weigh,
            load=self._load,
            keep_alive=options.keep_alive_s,
            most_wait_s=options.load_wait_s,
        )
        self.host.on_use = self._share_threads
        self.lengths: dict[str, int] = {}
        self.drain: Callable[[], None] = self.stop
        self.is_paused = False
        self.is_draining = False
        self.is_closed = False
        self._num_waiting = 0

    # Models

    def names_for(self, key: KeyUsage | None) -> list[str]:
        """Return the names of the models that requests with this key may use, after a look at models.toml."""
        self._refresh()
        allowed = None if key is None else key.entry.models
        names = [entry.name for entry in self.catalog.entries()]
        return names if allowed is None else [name for name in names if name in allowed]

    def _refresh(self) -> None:
        """Read models.toml again if it has changed. What is wrong is logged once, and changes nothing."""
        try:
            if self.catalog.refresh():
                self._unload_unknown()
                announce(f"{self.catalog.file.path} has changed, and was read again")
        except PagedError as error:
            logger.error(
                "%s has changed, but is not in force, what was before is: %s", self.catalog.file.path, error
            )

    def _unload_unknown(self) -> None:
        """Unload the models that no request can name any more."""
        for name in [*self.loaded]:
            if self.catalog.find(name) is None:
                self.host.unload(name)

    def entry_of(self, name: object, key: KeyUsage | None) -> ModelEntry:
        """Return the model that a request names. Raises HttpError if there is none, or not for its key."""
        names = self.names_for(key)
        there = f"this server has {', '.join(map(repr, names))}" if names else "none is here for this key"
        if name is None:
            if len(names) == 1:
                name = names[0]
            else:
                raise HttpError(400, f"model is missing: {there}", param="model")
        if not isinstance(name, str):
            raise HttpError(400, f"model must be a string, got {shown(name)}", param="model")
        try:
            entry = self.catalog.find(name)
        except PagedError as error:
            raise HttpError(404, str(error), param="model", code="model_not_found") from None
        if entry is None or (key is not None and key.entry.models is not None and entry.name not in names):
            raise HttpError(
                404,
                f"the model {shown(name)} is not here; {there}",
                param="model",
                code="model_not_found",
            )
        return entry

    def context_of(self, entry: ModelEntry) -> int | None:
        """Return the longest context that a load gives a model: of its last load, else by its options."""
        context: int | None = self.lengths.get(entry.name) or self._engine_options(entry).get("max_model_len")
        return context

    @property
    def loaded(self) -> dict[str, LoadedModel]:
        """The models that are loaded, by name."""
        return {name: model for name, model in self.host.loaded.items() if isinstance(model, LoadedModel)}

    @property
    def fronts(self) -> Iterator[ModelFrontEnd]:
        """The front ends of the models that are loaded."""
        return (model.front for model in self.loaded.values())

    def _share_threads(self) -> None:
        """Divide the CPU threads among the engines that are busy now.

        With all threads each, engines would wait for each other's threads within every operation.
        """
        users = self.host.residency.models
        busy = [model for name, model in self.loaded.items() if users[name].users]
        for model in busy:
            if model.num_sharing != len(busy) and not model.is_dead and model.shares_threads:
                model.share_threads(len(busy))

    def _weigh(self, entry: ModelEntry) -> ModelWeight:
        check_is_here(entry)
        return weigh(self._engine_options(entry), self.host.residency.memory)

    async def _load(self, entry: ModelEntry, weight: ModelWeight) -> LoadedModel:
        options = {
            **self._engine_options(entry),
            "num_blocks": weight.num_blocks,
            "max_model_len": weight.max_model_len,
        }
        terms = self.options
        pinned = PinnedPlace.of(terms, entry.name)
        announce(f"{entry.name} is being loaded; it takes {weight.num_bytes / 2**30:,.2f} GiB")
        client = await in_thread(
            lambda: EngineClient(
                **options,
                router=terms.router,
                stream_interval_s=terms.stream_interval_s,
                log_format=terms.log_format,
                resume=terms.resume,
                max_restarts=terms.max_restarts,
                step_timeout=terms.step_timeout,
                prefixes="" if pinned is None else pinned.folder,
            )
        )
        await client.__aenter__()
        try:
            client.text.set_defaults(entry.sampling)
            front = self._front_of(entry, client)
        except BaseException:
            await client.__aexit__()
            raise
        self.lengths[entry.name] = client.max_model_len
        announce(f"{entry.name} is loaded: {client.describe()}")
        return LoadedModel(entry, client, front, pinned)

    def _front_of(self, entry: ModelEntry, client: EngineClient) -> ModelFrontEnd:
        metrics = self.metrics_of.get(entry.name)
        if metrics is None:
            metrics = self.metrics_of[entry.name] = ServerMetrics(
                entry.name,
                client.config,
                max_model_len=client.max_model_len,
                routes=[route.path for route in ROUTES],
                prefix=self.options.metrics_prefix,
            )
        template = self.template_of(entry)
        return ModelFrontEnd(
            client,
            replace(self.options, served_model_name=(entry.name,), chat_template=template),
            self._observers,
            shared=self.shared,
            metrics=metrics,
            system=entry.system,
        )

    def template_of(self, entry: ModelEntry) -> str | None:
        """Return the template in place of the checkpoint's. Raises ConfigError if its file cannot be read."""
        try:
            return self.options.chat_template or self._read_template(entry.template)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(
                f"the template {entry.template} of {entry.name} cannot be read: {reason}"
            ) from None

    # Requests

    def check_serving(self) -> None:
        """Raise HttpError if no request can be served now."""
        if self.is_closed:
            raise HttpError(503, STOPPING, headers=((b"connection", b"close"),))
        if self.is_paused:
            raise HttpError(503, "the server is paused by its operator; try again later")

    @property
    def num_accepted(self) -> int:
        """How many accepted requests have no whole response yet."""
        return self._num_waiting + sum(front.num_accepted for front in self.fronts)

    def on_wait(self, change: int) -> None:
        """Count a request that waits for its model, or does so no longer."""
        self._num_waiting += change

    @property
    def is_idle(self) -> bool:
        """Whether no request is being read, prepared or answered."""
        return not self._num_waiting and all(front.is_idle for front in self.fronts)

    @property
    def open_records(self) -> list[RequestRecord]:
        """The records of the requests that are being answered, the oldest first."""
        records = [record for front in self.fronts for record in front.open_records]
        return sorted(records, key=lambda record: record.received)

    async def end_requests(self, request_id: str) -> int:
        """Abort the requests with this id, which then get an error. Return how many there were."""
        return sum([await front.end_requests(request_id) for front in [*self.fronts]])

    async def end_record(self, record: RequestRecord) -> None:
        """Abort a request, which then gets an error."""
        for front in self.fronts:
            if record in front.open_records:
                await front.end_record(record)
                return

    def end(self, exchange: Exchange, status: int, error: BaseException | None) -> None:
        """Count a request that was refused here, or a response of the server itself."""
        if exchange.is_passed_on:  # its model's front end counts it
            return
        limited = RATE_LIMIT if isinstance(error, RateLimitError) else None
        if status != CLIENT_GONE and (400 <= status < 500 or (exchange.method == "POST" and status >= 500)):
            self.observers.refused(exchange.route, status, limited, request_id=exchange.request_id)
        else:
            self.observers.responded(exchange.route, status)

    async def failure_of(self, error: Exception, request_id: str) -> FailureResponse:
        """Return the response for an error."""
        return failure_of(error, 5 if isinstance(error, QueueFullError) else 1, request_id)

    # The whole server

    async def reload_keys(self) -> int:
        """Read the keys file again; see `FrontEnd.reload_keys`."""
        keys = self.shared.keys
        if keys is None:
            raise ConfigError("this server has no keys file; start it with --api-keys")
        keys.replace(await asyncio.to_thread(keys.read))
        return len(keys)

    def on_hangup(self) -> None:
        """Read the keys file and models.toml again, and log the result."""

        async def reload() -> None:
            try:
                self.catalog.reload()
                self._unload_unknown()
                more = ""
                if self.shared.keys is not None:
                    more = f", the keys file too: {await self.reload_keys()} keys"
                announce(f"{self.catalog.file.path} has been read again{more}")
            except Exception as error:  # of any kind: what was before stays in force
                logger.error("what SIGHUP reads again is not in force, what was before is: %s", error)

        self._reloading = asyncio.get_running_loop().create_task(reload())  # or it might be collected

    async def preload(self, entries: Sequence[ModelEntry]) -> None:
        """Load models before the first request. What fails is logged, and tried again by a request."""
        for entry in entries:
            try:
                async with self.host.using(entry):
                    pass
            except PagedError as error:
                logger.error("%s", error)

    def stop(self) -> None:
        """Refuse new requests, and abort the requests in progress."""
        self.is_draining = True
        self.is_closed = True
        self.host.stop()
        for front in self.fronts:
            front.stop()
