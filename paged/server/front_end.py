"""FrontEnd: what all routes share: the engine, the options, and the names of the model."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from ..engine.async_base import AsyncEngine, Deadline
from ..errors import EngineDeadError, QueueFullError
from ..protocol.calls.call import Call
from ..protocol.chat_output.chat_format import ChatFormat
from ..protocol.endpoints import ROUTES, parse_call
from ..protocol.limits import Limits
from ..requests.seeds import derived_seed
from ..sampling_params import MAX_SEED, SamplingParams
from .connection import ProcessEndError
from .http.body_budget import MAX_BODY_BYTES_IN_PROGRESS, BodyBudget
from .http.exchange import Exchange
from .http.failures import FailureResponse, FinishRate, HttpError, failure_of
from .http.response_budget import ResponseBudget
from .http.streams import KeepAlive
from .options import ServeOptions
from .telemetry.metrics import ServerMetrics
from .telemetry.records import CLIENT_GONE, SLOW_CLIENT, Observer, Observers, RequestRecord
from .telemetry.trace_context import TraceContext

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=Call)
T = TypeVar("T")
STOPPING = "the server is shutting down"
STOPPED = "the engine has stopped; the server's log says why"


class FrontEnd:
    """The engine, and what the routes know about its requests.

    names: of the model, the first one in responses.
    created: when the server started, in seconds since 1970.
    metrics: what GET /metrics says.
    observers: of each request's beginning and end.
    body_budget: of the bodies of requests in progress.
    response_budget: of the whole responses that are being sent.
    is_draining: whether the server is about to end, so that it is not ready.
    is_closed: whether new requests are refused.
    is_stopping: whether the requests in progress end.
    num_accepted: requests that were accepted, and have no whole response yet.
    """

    def __init__(
        self,
        engine: AsyncEngine[Any],
        options: ServeOptions,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.engine = engine
        self.options = options
        self.names = tuple(options.served_model_name) or (engine.config.model,)
        self.created = int(time.time())
        self.metrics = ServerMetrics(
            self.names[0],
            engine.config,
            max_model_len=engine.max_model_len,
            routes=[route.path for route in ROUTES],
            prefix=options.metrics_prefix,
            num_engines=options.replicas,
        )
        self.observers = Observers(self.metrics, *observers)
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
        )
        self.keep_alive = KeepAlive()
        self.body_budget = BodyBudget(max(MAX_BODY_BYTES_IN_PROGRESS, options.max_request_bytes))
        self.response_budget = ResponseBudget()
        self._rate = FinishRate()
        self._deaths: set[str] = set()  # messages of engines that have stopped, logged here
        self._num_open = 0  # requests that are being answered
        self._num_preparing = 0
        self.num_accepted = 0
        self.is_draining = False
        self.is_closed = False
        self.is_stopping = False

    def check_model(self, name: str | None) -> None:
        """Raise HttpError if a request names another model."""
        if name is not None and name not in self.names:
            raise HttpError(
                404,
                f"the model {name!r} is not here; this server has {', '.join(map(repr, self.names))}",
                param="model",
                code="model_not_found",
            )

    def check_serving(self) -> None:
        """Raise HttpError or EngineDeadError if no request can be served now."""
        if self.is_closed:
            raise HttpError(503, STOPPING, headers=((b"connection", b"close"),))
        if self.engine.dead_error is not None:
            raise self.engine.dead_error

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Count a request that is rendered or tokenized. Raises QueueFullError if max_waiting are already."""
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
        """Call a function in a pool of threads. Raises RequestTimeoutError if the call's timeout_s passes."""
        deadline = Deadline(exchange.time_left(call.timeout_s))
        running = asyncio.get_running_loop().run_in_executor(pool, function, *args)
        return await deadline.wait_for(running)

    async def read_call(self, exchange: Exchange, path: str, kind: type[C]) -> C:
        """Return the call that a request's body makes.

        Raises RequestError and its like if the body is wrong, EngineDeadError if no request can be served.
        """
        self.check_serving()
        exchange.is_accepted = True
        self.num_accepted += 1
        limits = self._limits
        call = await exchange.read_json(lambda body: parse_call(path, body, limits))
        assert isinstance(call, kind)
        self.check_model(call.model)
        if call.ignored:
            exchange.extra_headers.append((b"x-paged-ignored", ", ".join(call.ignored).encode()))
        return call

    def begin(
        self, exchange: Exchange, call: Call, num_requests: int, params: SamplingParams | None = None
    ) -> RequestRecord:
        """Begin the record of a request whose body was accepted.

        num_requests: that it makes of the engine.
        """
        record = exchange.record = RequestRecord(
            exchange.request_id,
            exchange.route,
            call.tenant,
            self.names[0],
            call.stream,
            exchange.received,
            params=params,
            num_requests=num_requests,
            trace=TraceContext.parse(exchange.header("traceparent"), exchange.header("tracestate")),
        )
        self.observers.begin(record)
        if record.trace is not None:
            exchange.extra_headers.append((b"traceparent", record.trace.traceparent.encode()))
        self._num_open += 1
        return record

    def end(self, exchange: Exchange, status: int, error: BaseException | None) -> None:
        """End the record of a request, or count a request that has none."""
        self.num_accepted -= exchange.is_accepted
        if exchange.record is not None:
            self._num_open -= 1
            for progress in exchange.record.progress.values():
                if progress.finished_at is not None:
                    self._rate.on_finish()
            # A stream that began had the status 200, however it ended.
            reason = "error" if error is not None and status < 400 else None
            if exchange.is_too_slow:
                reason = SLOW_CLIENT
            self.observers.end(exchange.record, status=status, reason=reason, error=error)
        elif status != CLIENT_GONE and (400 <= status < 500 or (exchange.method == "POST" and status >= 500)):
            self.observers.refused(exchange.route, status, request_id=exchange.request_id)
        else:
            self.observers.responded(exchange.route, status)

    def identity_of(self, exchange: Exchange, call: Call) -> str:
        """Return the id of the response, from which seeds are derived: the body's own, or a unique one.

        It begins with the request's own id, which another request may have, too.
        """
        return call.request_id or f"{exchange.request_id}-{uuid.uuid4().hex[:8]}"

    def engine_id_of(self, call: Call, identity: str) -> str:
        """Return the id of the engine's requests, which is unique: clients may give the same id twice."""
        return identity if call.request_id is None else f"{identity}-{uuid.uuid4().hex[:8]}"

    def seed_for(self, request_id: str) -> int:
        """Return the seed of a request that gives none.

        It is chosen here, so that the request can be repeated by another engine.
        """
        return derived_seed(self.engine.config.seed, request_id) & MAX_SEED

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered or prepared."""
        return not (self._num_open or self._num_preparing)

    def stop(self) -> None:
        """Refuse new requests, and end the requests in progress."""
        if not self.is_stopping:
            self.is_draining = True
            self.is_closed = True
            self.is_stopping = True
            # It may block: it waits for the engine's thread or process to end.
            asyncio.get_running_loop().run_in_executor(None, self.engine.shutdown)

    async def failure_of(self, error: Exception, request_id: str) -> FailureResponse:
        """Return the response for an error."""
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
