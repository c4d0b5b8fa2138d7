"""FrontEnd: what all routes share: the engine, the options, and the names of the model."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from ..base.errors import ConfigError, EngineDeadError, QueueFullError, RequestError
from ..base.validation import shown
from ..chat.chat_format import ChatFormat
from ..engine.async_base import AsyncEngine, Deadline, OnPrompt
from ..options.lora_request import LoRARequest, lora_modules_of
from ..options.sampling_params import MAX_SEED, SamplingParams
from ..protocol.answers.errors import TOO_MANY
from ..protocol.calls.adapters import LoadAdapterCall, UnloadAdapterCall
from ..protocol.calls.call import Call
from ..protocol.endpoints import ROUTES, parse_call
from ..protocol.limits import Limits
from ..requests.request import derived_seed
from .access.keys import priorities_of, priority_of, salt_of
from .access.limits import KeyUsage, RateLimitError, num_new_tokens
from .connection import ProcessEndError
from .gallery import Gallery
from .http.budgets import BODY_BYTES, SEEING_BODY_BYTES
from .http.exchange import Exchange
from .http.failures import FailureResponse, FinishRate, HttpError, failure_of
from .options import ServeOptions
from .shared import Shared
from .telemetry.metrics import ServerMetrics
from .telemetry.records import CLIENT_GONE, RATE_LIMIT, SLOW_CLIENT, Observer, Observers, RequestRecord
from .telemetry.request_log import announce
from .telemetry.trace_context import TraceContext

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=Call)
T = TypeVar("T")
STOPPING = "the server is shutting down"
LATEST_TAG = ":latest"  # which clients of Ollama add to a name
STOPPED = "the engine has stopped; the server's log says why"


class FrontEnd:
    """The engine and the server's state about its requests, shared by all routes.

    names: the names of the model; responses use the first.
    adapters: the LoRA adapters by the names under which they are served.
    created: when the server started, in seconds since 1970.
    metrics: the counts behind GET /metrics.
    observers: listeners for the beginning and the end of each request.
    body_budget: the memory for bodies of requests in progress.
    response_budget: the memory for whole responses that are being sent.
    is_paused: whether the operator has paused the server; new requests are then refused.
    gallery: the pictures of the engines.
    drain: begins to end the server.
    keys: the keys of the tenants; None without a keys file.
    gate: decides which requests may use which routes.
    is_draining: whether the server is about to end and therefore not ready.
    is_closed: whether new requests are refused.
    is_stopping: whether the requests in progress are being ended.
    responses: the stored responses, and the responses in progress.
    num_accepted: how many accepted requests have no whole response yet.

    shared: what other front ends of the server have, too; by default it is made of the options. metrics: the
    counts of earlier front ends of the model. system: the system prompt of conversations without one.

    Raises ConfigError for a wrong keys file.
    """

    def __init__(
        self,
        engine: AsyncEngine[Any],
        options: ServeOptions,
        observers: Sequence[Observer] = (),
        *,
        shared: Shared | None = None,
        metrics: ServerMetrics | None = None,
        system: str | None = None,
    ) -> None:
        self.engine = engine
        self.options = options
        self.names = tuple(options.served_model_name) or (engine.config.model,)
        modules = {each.lora_name: each for each in lora_modules_of(options.lora_modules)}
        # With their hashes, where the engines have read them.
        self.adapters = modules | {each.lora_name: each for each in engine.loaded_adapters}
        self._adapter_numbers = itertools.count(1 + len(modules))
        if twice := self.adapters.keys() & {*self.names}:
            raise ConfigError(f"lora_modules has an adapter of the model's own name {min(twice)!r}")
        self.created = int(time.time())
        self.metrics = metrics or ServerMetrics(
            self.names[0],
            engine.config,
            max_model_len=engine.max_model_len,
            routes=[route.path for route in ROUTES],
            prefix=options.metrics_prefix,
            num_engines=options.replicas,
        )
        self.observers = Observers(self.metrics, *observers)
        shared = shared or Shared.of(options, engine.config.scheduling_policy)
        self.keys = shared.keys
        self.gate = shared.gate
        self.is_paused = False
        self.system = system
        self.gallery = Gallery(engine, options.replicas, self._owners)
        self.drain: Callable[[], None] = self.stop
        self._limits = Limits(
            max_logprobs=options.max_logprobs,
            cached_tokens=options.enable_prompt_tokens_details,
            trust_chat_template=options.trust_request_chat_template,
            chat_template=options.chat_template,
            chat_template_kwargs=options.chat_template_kwargs,
            chat_format=ChatFormat.of_model(
                engine.text,
                chat_template=options.chat_template,
                tool_call_parser=options.tool_call_parser,
                reasoning_parser=options.reasoning_parser,
                enable_auto_tool_choice=options.enable_auto_tool_choice,
            ),
            ignore_builtin_tools=options.ignore_builtin_tools,
            system=system,
            max_model_len=engine.max_model_len,
        )
        self.responses = shared.responses
        self.keep_alive = shared.keep_alive
        self.body_budget = shared.body_budget
        self.response_budget = shared.response_budget
        sees_images = engine.model_config.vision is not None
        self.max_request_bytes = options.max_request_bytes or (
            SEEING_BODY_BYTES if sees_images else BODY_BYTES
        )
        self._rate = FinishRate()
        self._deaths: set[str] = set()  # messages of engines that have stopped, logged here
        self._open: dict[RequestRecord, None] = {}  # of requests that are being answered, the oldest first
        self._num_preparing = 0
        self.num_accepted = 0
        self.is_draining = False
        self.is_closed = False
        self.is_stopping = False

    def names_for(self, key: KeyUsage | None) -> Sequence[str]:
        """Return the names of the model and of adapters that requests with this key may use."""
        allowed = None if key is None else key.entry.models
        names = (*self.names, *self.adapters)
        return names if allowed is None else [name for name in names if name in allowed]

    def name_of(self, call: Call) -> str:
        """Return the name of the model for the response to a call: its adapter's name, if it has one."""
        return self.names[0] if call.adapter is None else call.adapter.lora_name

    def adapter_of(self, name: str | None) -> LoRARequest | None:
        """Return the adapter of a name that `check_model` accepts; None for a name of the model itself."""
        if name is None or name in self.names:
            return None
        return self.adapters.get(name) or self.adapters.get(name.removesuffix(LATEST_TAG))

    async def load_adapter(self, call: LoadAdapterCall) -> None:
        """Have all engines read an adapter. From then on requests choose it by its name.

        Raises HttpError if it cannot be read, or if its name is taken; nothing has changed then.
        """
        known = self.adapters.get(call.name)
        if call.name in self.names:
            raise HttpError(400, f"lora_name {call.name!r} is the model's own name", param="lora_name")
        if known is not None and not call.load_inplace:
            raise HttpError(
                400,
                f"the adapter {call.name!r} is loaded already, from {known.lora_path!r}: unload it, or give "
                "load_inplace: true to read it again",
                param="lora_name",
            )
        number = next(self._adapter_numbers) if known is None else known.lora_int_id
        request = LoRARequest(call.name, number, call.path, call.load_inplace)
        try:
            await self.engine.add_lora(request)
        except RequestError as error:
            raise HttpError(400, str(error), param="lora_path") from None
        loaded = {each.lora_name: each for each in self.engine.loaded_adapters}
        self.adapters[call.name] = loaded[call.name]
        announce(f"the adapter {call.name!r} is loaded from {call.path!r}")

    async def unload_adapter(self, call: UnloadAdapterCall) -> None:
        """Forget an adapter. Requests that have begun keep it. Raises HttpError if it is not here."""
        known = self.adapters.get(call.name)
        if known is None or call.number not in (None, known.lora_int_id):
            there = ", ".join(f"{each.lora_name!r}" for each in self.adapters.values()) or "none"
            number = "" if call.number is None else f" with the number {call.number}"
            raise HttpError(
                404,
                f"the adapter {shown(call.name)}{number} is not here; this server has {there}",
                param="lora_name",
                code="not_found",
            )
        del self.adapters[call.name]
        await self.engine.remove_lora(known.lora_int_id)
        announce(f"the adapter {call.name!r} is unloaded")

    def check_model(self, name: str | None, key: KeyUsage | None) -> None:
        """Raise HttpError if a request names another model, or a model that its key does not allow."""
        names = self.names_for(key)
        if name is not None and name not in names:
            name = name.removesuffix(LATEST_TAG)
        if name is None and names and not {*names} & {*self.names}:
            raise HttpError(
                404,
                f"a model must be named: this key is for {', '.join(map(repr, names))}",
                param="model",
                code="model_not_found",
            )
        if not names or (name is not None and name not in names):
            there = f"this server has {', '.join(map(repr, names))}" if names else "none is for this key"
            raise HttpError(
                404,
                f"the model {shown(name)} is not here; {there}",
                param="model",
                code="model_not_found",
            )

    def check_serving(self) -> None:
        """Raise HttpError or EngineDeadError if no request can be served now."""
        if self.is_closed:
            raise HttpError(503, STOPPING, headers=((b"connection", b"close"),))
        if self.is_paused:
            raise HttpError(503, "the server is paused by its operator; try again later")
        if self.engine.dead_error is not None:
            raise self.engine.dead_error

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Count a request that is being prepared. Raises QueueFullError if max_waiting others are too."""
        most = self.engine.config.max_waiting
        if most is not None and self._num_preparing >= most:
            raise QueueFullError(
                f"{most} requests are being tokenized already and max_waiting is {most}; try again later"
            )
        self._num_preparing += 1
        try:
            yield
        finally:
            self._num_preparing -= 1

    async def in_pool(
        self,
        pool: ThreadPoolExecutor,
        exchange: Exchange,
        call: Call,
        function: Callable[..., T],
        *args: Any,
    ) -> T:
        """Call a function in a pool of threads. Raises RequestTimeoutError after the call's timeout_s."""
        deadline = Deadline(exchange.time_left(call.timeout_s))
        running = asyncio.get_running_loop().run_in_executor(pool, function, *args)
        return await deadline.wait_for(running)

    async def read_call(self, exchange: Exchange, kind: type[C]) -> C:
        """Read and parse the body of a request to the route of `exchange`.

        Raises an error such as RequestError if the body is wrong, and EngineDeadError if no request can be
        served.
        """
        self.check_serving()
        exchange.is_accepted = True
        self.num_accepted += 1
        if exchange.key is not None:  # before a body is read, which takes time and memory
            try:
                exchange.admission = exchange.key.admit()
            except RateLimitError:
                exchange.extra_headers.append((b"connection", b"close"))
                raise
        limits = self._limits
        call = await exchange.read_json(lambda body: parse_call(exchange.route, body, limits))
        assert isinstance(call, kind)
        call.load_s = exchange.load_s
        self.check_model(call.model, exchange.key)
        call.adapter = self.adapter_of(call.model)  # now, as it may be unloaded while the prompt is prepared
        if call.is_queued:
            self._check_queue()
        if exchange.key is not None:
            self._give_to(exchange.key, call)
        if call.ignored:
            exchange.extra_headers.append((b"x-paged-ignored", ", ".join(call.ignored).encode()))
        return call

    async def fetch_images(self, exchange: Exchange, call: Call) -> None:
        """Fetch the images at URLs in a call's messages, within its timeout_s. They count as its body.

        Raises RequestError, HttpError and RequestTimeoutError.
        """
        images = self.engine.text.images
        conversation = call.conversation
        if images is None or images.fetcher is None or conversation is None:
            return
        from ..text.chat_images import urls_to_fetch

        with call.naming_field(call.PROMPT_FIELD):
            urls = urls_to_fetch(conversation.messages, images)
            if urls:
                deadline = Deadline(exchange.time_left(call.timeout_s))
                fetching = images.fetcher.fetch_all(urls, exchange.hold)
                conversation.fetched = await deadline.wait_for(fetching)

    async def reload_keys(self) -> int:
        """Read the keys file again. Return the number of keys.

        Raises ConfigError naming a wrong line; the earlier keys then stay in force.
        """
        if self.keys is None:
            raise ConfigError("this server has no keys file; start it with --api-keys")
        entries = await asyncio.to_thread(self.keys.read)
        self.keys.replace(entries)
        if self.engine.config.scheduling_policy == "fair":
            await self.engine.set_tenant_weights(self.keys.weights)
        return len(self.keys)

    async def resize(self, replicas: int) -> None:
        """Set the number of engines. Raises ConfigError, and the errors of `EngineClient.resize`."""
        replace(self.options, replicas=replicas)  # checks the number
        try:
            await self.engine.resize(replicas)
        finally:  # what fails may have changed nothing, or be the last of several steps
            num = self.engine.num_engines
            self.options = replace(self.options, replicas=num)
            self.metrics.expect(num)
            self.gallery.resize(num)

    def on_hangup(self) -> None:
        """Read the keys file again in a separate task, and log the result."""
        if self.keys is None:
            announce("SIGHUP changes nothing: there is no keys file, --api-keys, to be read again")
            return

        async def reload() -> None:
            try:
                announce(f"the keys file has been read again: {await self.reload_keys()} keys")
            except Exception as error:  # of any kind: the keys of before stay in force
                logger.error("the keys file is not in force, the one before is: %s", error)

        self._reloading = asyncio.get_running_loop().create_task(reload())  # or it might be collected

    def _check_queue(self) -> None:
        """Raise QueueFullError, before anything is tokenized, if max_queued_tokens wait in all engines."""
        most = self.engine.config.max_queued_tokens
        if most is not None and (waiting := min(self.engine.queued_tokens)) >= most:
            raise QueueFullError(
                f"requests of {waiting:,} tokens wait already and max_queued_tokens is {most:,}; "
                "try again later"
            )

    def _give_to(self, key: KeyUsage, call: Call) -> None:
        """Make a request its tenant's. Raises HttpError for a priority that the key does not allow."""
        entry = key.entry
        try:
            call.priority = priority_of(entry, call.priority)
        except ValueError:
            first, last = priorities_of(entry)
            raise HttpError(
                403,
                f"priority {call.priority:g} is not allowed; this key has those from {first:g} to {last:g}",
                param="priority",
                code="not_allowed",
            ) from None
        call.give_to(entry.tenant, salt_of(entry, call.values.get("cache_salt")))

    def accepting(self, exchange: Exchange, params: SamplingParams | None = None) -> OnPrompt:
        """Return a callback that accepts an engine request and reserves its tokens, once its prompt is known.

        params: the sampling parameters; None if the request generates no tokens.
        """
        record = exchange.record
        admission = exchange.admission
        most = 0 if self.keys is None else self.keys.default_reservation
        max_model_len = self.engine.max_model_len

        def accept(request_id: str, num_prompt_tokens: int) -> None:
            if record is not None and record.is_ended:
                raise HttpError(503, "the server ended this request; send it again")
            if admission is not None:
                num_new = 0
                if params is not None:
                    num_new = num_new_tokens(params, num_prompt_tokens, most, max_model_len)
                admission.reserve(request_id, num_prompt_tokens, num_new)

        return accept

    def begin(
        self,
        exchange: Exchange,
        call: Call,
        engine_ids: Sequence[str],
        params: SamplingParams | None = None,
    ) -> RequestRecord:
        """Begin the record of a request whose body was accepted.

        engine_ids: the ids of the engine requests that it makes.

        Raises RequestError or RateLimitError for more sequences than the key allows.
        """
        if exchange.admission is not None:
            num_samples = 1 if params is None else params.num_samples
            exchange.admission.begin_sequences(len(engine_ids) * num_samples)
        record = exchange.record = RequestRecord(
            exchange.request_id,
            exchange.route,
            call.tenant,
            self.name_of(call),
            call.stream,
            exchange.received,
            params=params,
            num_requests=len(engine_ids),
            engine_ids=engine_ids,
            user=call.user,
            account="" if exchange.key is None else call.tenant,
            owner=exchange.owner,
            trace=TraceContext.parse(exchange.header("traceparent"), exchange.header("tracestate")),
        )
        self.observers.begin(record)
        if record.trace is not None:
            exchange.extra_headers.append((b"traceparent", record.trace.traceparent.encode()))
        self._open[record] = None
        return record

    def end(self, exchange: Exchange, status: int, error: BaseException | None) -> None:
        """End the record of a request. A request without a record is only counted."""
        self.num_accepted -= exchange.is_accepted
        self._give_back(exchange, status)
        limited = RATE_LIMIT if isinstance(error, RateLimitError) else None
        if exchange.record is not None:
            del self._open[exchange.record]
            for progress in exchange.record.progress.values():
                if progress.finished_at is not None:
                    self._rate.on_finish()
            # A stream that began had the status 200, however it ended.
            reason = "error" if error is not None and status < 400 else limited
            if exchange.is_too_slow:
                reason = SLOW_CLIENT
            self.observers.end(exchange.record, status=status, reason=reason, error=error)
        elif status != CLIENT_GONE and (400 <= status < 500 or (exchange.method == "POST" and status >= 500)):
            self.observers.refused(exchange.route, status, limited, request_id=exchange.request_id)
        else:
            self.observers.responded(exchange.route, status)

    def _give_back(self, exchange: Exchange, status: int) -> None:
        """Give back what a request has reserved and not used."""
        if exchange.admission is None:
            return
        progress = {} if exchange.record is None else exchange.record.progress
        exchange.admission.close(
            {
                request_id: sum(own.num_generated)
                for request_id, own in progress.items()
                if own.num_prompt_tokens is not None
            },
            was_refused=400 <= status < 500 and status != CLIENT_GONE,
            is_counted=status != TOO_MANY,
        )

    def identity_of(self, exchange: Exchange, call: Call) -> str:
        """Return the id of the response: the id in the body, or a unique one. Seeds are derived from it.

        A unique id begins with the HTTP request's id, which other requests may have too.
        """
        return call.request_id or f"{exchange.request_id}-{uuid.uuid4().hex[:8]}"

    def engine_id_of(self, call: Call, identity: str) -> str:
        """Return a unique id for the engine request, since clients may use the same id twice."""
        return identity if call.request_id is None else f"{identity}-{uuid.uuid4().hex[:8]}"

    def engine_ids_of(self, call: Call, identity: str, num: int) -> list[str]:
        """Return unique ids for `num` engine requests."""
        engine_id = self.engine_id_of(call, identity)
        return [f"{engine_id}-{i}" for i in range(num)]

    def seed_for(self, request_id: str) -> int:
        """Return the seed of a request that gives none.

        The front end chooses the seed, so that another engine can repeat the request.
        """
        return derived_seed(self.engine.config.seed, request_id) & MAX_SEED

    @property
    def is_idle(self) -> bool:
        """Whether no request is being read, prepared or answered."""
        return not (self.num_accepted or self._open or self._num_preparing)

    def _owners(self) -> dict[str, str | None]:
        """Return whose the engine's requests are that are in progress."""
        return {engine_id: record.owner for record in self._open for engine_id in record.engine_ids}

    @property
    def open_records(self) -> list[RequestRecord]:
        """The records of the requests that are being answered, oldest first."""
        return [*self._open]

    async def end_requests(self, request_id: str) -> int:
        """Abort the requests with this id; they get an error. Return how many there were."""
        found = [record for record in self._open if record.request_id == request_id]
        for record in found:
            await self.end_record(record)
        return len(found)

    async def end_record(self, record: RequestRecord) -> None:
        """Abort a request, which then gets an error."""
        record.is_ended = True  # what the engine has not got yet
        await self.engine.abort(record.engine_ids)

    def stop(self) -> None:
        """Refuse new requests, and abort the requests in progress."""
        if not self.is_stopping:
            self.is_draining = True
            self.is_closed = True
            self.is_stopping = True
            # It may block: it waits for the engine's thread or process to end.
            asyncio.get_running_loop().run_in_executor(None, self.engine.shutdown)

    async def failure_of(self, error: Exception, request_id: str) -> FailureResponse:
        """Return the response that reports an error."""
        seconds = 1  # where no queue has to move
        if isinstance(error, QueueFullError):
            seconds = self._rate.seconds_for(max(1, await self._num_waiting()))
        if isinstance(error, EngineDeadError):
            error = self._unavailable(error)
        return failure_of(error, seconds, request_id)

    async def _num_waiting(self) -> int:
        try:
            return sum(stats.num_waiting for stats in await self.engine.stats_by_engine())
        except EngineDeadError:
            return 0

    def _unavailable(self, error: EngineDeadError) -> HttpError:
        """Return an error without what happened inside the engine, which is logged."""
        if self.is_stopping:
            return HttpError(503, STOPPING)
        if str(error) not in self._deaths and not isinstance(error.__cause__, ProcessEndError):
            self._deaths.add(str(error))
            logger.error("%s", error, exc_info=error.__cause__)
        return HttpError(503, STOPPED)
