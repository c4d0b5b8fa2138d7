"""EngineClient: engines in processes of their own, with the methods of `AsyncLLMEngine`."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import weakref
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Self

from ..base.arguments import show_arguments_of
from ..base.validation import check_int, shown
from ..config import EngineConfig
from ..engine.answer_memory import AnswerAccount, AnswerBudget, comes_in_parts
from ..engine.async_base import STREAM_INTERVAL_S, AsyncEngine, RequestStream, check_interval
from ..engine.embedding import EmbeddingSpec
from ..engine.model_text import ModelText
from ..engine.request_spec import Prepared, ReportTerms, RequestSpec
from ..engine.scoring import ScoreSpec
from ..errors import ConfigError, RequestError, UsageError
from ..model.hf_config import read_config
from ..model.hub import resolve
from ..routing.router import new_router
from ..sampling_params import RequestOutputKind, SamplingParams
from ..scheduler.stats import EngineStats
from ..speculative_config import SpeculativeConfig
from ..text.prompt_parser import ParsedPrompt
from . import frames
from .connection import EngineConnection, SentRequest
from .inbox import Inbox
from .telemetry.log_lines import LogFormat


class EngineClient(AsyncEngine[EngineConnection]):
    """Serves one model to the coroutines of one event loop, from engines in processes of their own.

    >>> async with EngineClient("demo") as engine:
    ...     async for output in engine.generate("def add(a, b):", SamplingParams(max_tokens=16)):
    ...         print(output.outputs[0].text)

    Prompts are tokenized and chats rendered in this process, which does not import torch. Its methods, their
    results and their errors are those of `AsyncLLMEngine`, with the options of `LLMEngine`. Functions cannot
    cross to another process: `call` does not exist, and logits_processors are refused. A process that ends
    fails its requests with EngineDeadError. New ones go to processes that have sent heartbeats lately.

    An output of a stream counts as held until its reader asks for the next one.

    replicas: engine processes, each with a GPU of its own or its share of the cores.
    router: which of them gets a request: "round-robin", "least-loaded" or "prefix-aware".
    stream_interval_s: see `AsyncLLMEngine`.
    log_format: of the lines that the processes write to stderr, "text" or "json".

    lost: is set when all processes have ended by themselves.

    Raises ConfigError, CheckpointError or UnsupportedModelError, as `LLMEngine` does, and EngineDeadError if
    a process ends before its engine is made.
    """

    def __init__(
        self,
        model: str,
        *,
        replicas: int = 1,
        router: str = "least-loaded",
        stream_interval_s: float = STREAM_INTERVAL_S,
        log_format: LogFormat = "text",
        **options: Any,
    ) -> None:
        check_interval(stream_interval_s)
        check_int(ConfigError, "replicas", replicas, 1, 1024)
        self.config = config = EngineConfig(model, **options)
        new_router(router, 16)  # before anything starts
        directory = resolve(config.model, config.revision)  # downloaded once, for all processes
        model_config = read_config(directory)
        sent = {"model": model, **_sendable_options(config, options, replicas)}
        self._connections: list[EngineConnection] = []
        self._engines = self._connections
        self.lost = asyncio.Event()
        on_death = partial(_on_death, self._connections, self.lost)
        self._finalizer = weakref.finalize(self, _close, self._connections)
        try:
            for replica in range(replicas):
                start = frames.Start(sent, stream_interval_s, log_format, replica, replicas)
                self._connections.append(EngineConnection(start, on_death))
            self.text = ModelText(config, directory, model_config)  # while the engines start
            ready = [connection.wait_ready() for connection in self._connections]
        except BaseException:
            self._finalizer()
            raise
        self._router = new_router(router, ready[0].block_size)
        # With shares of one machine's memory, engines may have caches of different sizes.
        self.max_model_len = min(each.max_model_len for each in ready)
        self.prompts = self.text.new_parser(self.max_model_len)
        self._description = ready[0].description
        self._keys = itertools.count()
        self._ids = itertools.count()
        self.budget = AnswerBudget()
        self._attached: asyncio.Future[Any] | None = None  # to an event loop

    async def _abort(self, request_id: str) -> None:
        if (connection := self._holder(request_id)) is not None:
            connection.end(request_id)

    async def stats_by_engine(self) -> list[EngineStats]:
        """Return the stats of each engine process as of its last heartbeat, at most a second old."""
        await self._attach()
        return [connection.stats for connection in self._connections]

    def describe(self) -> str:
        """Return a line about the model and its KV cache."""
        num = len(self._connections)
        return self._description if num == 1 else f"{num} engines, each {self._description}"

    def shutdown(self) -> None:
        """Abort all requests, whose readers get EngineDeadError, and end the processes."""
        self._finalizer()

    async def __aenter__(self) -> Self:
        await self._attach()
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._connections:
            await connection.aclose()
        self.shutdown()

    def count_together(self, streams: Sequence[RequestStream], *, is_whole: bool) -> None:
        """Bound what all streams of one reader hold.

        is_whole: whether the reader sends all of it together, when all are finished.
        """
        account = AnswerAccount(self.budget, is_whole=is_whole)
        for stream in streams:
            stream.account = account

    # How requests reach the processes

    async def _attach(self) -> None:
        """Bind the client to the running event loop. Raises UsageError in another one."""
        loop = asyncio.get_running_loop()
        if self._attached is None:
            attaching = (connection.attach(loop) for connection in self._connections)
            self._attached = asyncio.gather(*attaching)
        elif self._attached.get_loop() is not loop:
            raise UsageError("an EngineClient serves one event loop, that of its first call")
        if not self._attached.done():
            await asyncio.shield(self._attached)

    def _next_id(self) -> str:
        return next(i for i in map(str, self._ids) if self._holder(i) is None)

    def _prepare(self, spec: RequestSpec) -> RequestSpec:
        """Return the request with its prompt parsed. What else takes long, the processes prepare."""
        assert spec.sampling_params is not None
        if isinstance(spec.prompt, ParsedPrompt):
            return spec
        assert not isinstance(spec.prompt, Prepared)
        return replace(spec, prompt=self.prompts.parse(spec.prompt, spec.sampling_params.cache_salt))

    def _choose(self, token_ids: Sequence[int]) -> EngineConnection:
        running = self._running()
        if len(self._connections) == 1:
            return running[0]
        # A process that hangs gets requests only if all do.
        fit = [connection for connection in running if not connection.hangs] or running
        # A router knows replicas by their number; one that is not fit is never the least loaded.
        loads = [each.load if each in fit else 2**62 for each in self._connections]
        for _ in self._connections:
            chosen = self._connections[self._router.choose(token_ids, loads)]
            if chosen in fit:
                return chosen
        return min(fit, key=lambda connection: connection.load)

    def _begin(self, request_id: str, spec: RequestSpec, account: AnswerAccount | None) -> SentRequest:
        parsed = spec.prompt
        params = spec.sampling_params
        assert isinstance(parsed, ParsedPrompt)
        assert params is not None
        given = [*spec.generated_token_ids]
        kind = params.output_kind
        account = account or self._new_account(kind)
        account.expect(
            params,
            len(parsed.token_ids),
            max_model_len=self.max_model_len,
            vocab_size=self.text.model_config.vocab_size,
        )
        # Deltas would leave out the text of the given tokens.
        in_full = bool(given) and kind is RequestOutputKind.CUMULATIVE
        inbox = Inbox(request_id, parsed.text, parsed.token_ids, kind, account=account, in_full=in_full)
        sent = params if in_full else _sent_as(params)
        wire = frames.params_to_wire(replace(sent, timeout_s=spec.timeout_s))
        arguments = (parsed.token_ids, parsed.namespace, wire, spec.tenant, given)
        order = frames.Generate(next(self._keys), request_id, *arguments)
        return self._send(self._choose(parsed.token_ids), order, inbox)

    def _begin_report(
        self, engine: EngineConnection, request_id: str, spec: EmbeddingSpec | ScoreSpec, terms: ReportTerms
    ) -> SentRequest:
        order: frames.Embed | frames.ScoreTokens
        if isinstance(spec, EmbeddingSpec):
            order = frames.Embed(next(self._keys), request_id, spec, terms)
        else:
            order = frames.ScoreTokens(next(self._keys), request_id, spec, terms)
        inbox = Inbox(request_id, None, spec.prompt.token_ids, RequestOutputKind.FINAL_ONLY)
        return self._send(engine, order, inbox)

    async def _fork(self, request_id: str, new_request_id: str, params: SamplingParams | None) -> SentRequest:
        connection = self._holder(request_id)
        parent = None if connection is None else connection.unfinished(request_id)
        if connection is None or parent is None:
            self._running()  # raises if all have ended
            raise RequestError(f"there is no unfinished request {request_id!r} to fork")
        kind = parent.kind if params is None else params.output_kind
        wire = None if params is None else frames.params_to_wire(_sent_as(params))
        account = self._new_account(kind)
        inbox = Inbox(new_request_id, parent.prompt, parent.token_ids, kind, account=account)
        order = frames.Fork(next(self._keys), request_id, new_request_id, wire)
        return self._send(connection, order, inbox)

    def _send(
        self,
        connection: EngineConnection,
        order: frames.Generate | frames.Fork | frames.Embed | frames.ScoreTokens,
        inbox: Inbox,
    ) -> SentRequest:
        if self._holder(inbox.request_id) is not None:
            raise RequestError(f"request id {inbox.request_id!r} is in use by an unfinished request")
        return connection.begin(order, inbox)

    def _new_account(self, kind: RequestOutputKind) -> AnswerAccount:
        return AnswerAccount(self.budget, is_whole=not comes_in_parts(kind))

    def _holder(self, request_id: str) -> EngineConnection | None:
        """Return the process that computes the unfinished request with this id."""
        return next((each for each in self._connections if each.unfinished(request_id) is not None), None)


show_arguments_of(EngineConfig, EngineClient.__init__)


def _sendable_options(config: EngineConfig, options: dict[str, Any], replicas: int) -> dict[str, Any]:
    """Return options of an engine as plain values. Raises ConfigError for what cannot be sent."""
    if not isinstance(config.scheduling_policy, str):
        policy = shown(config.scheduling_policy)
        raise ConfigError(f"scheduling_policy of an engine in another process must be a name, got {policy}")
    # With device "auto" each process finds out, as does one on another system than Linux.
    is_shared = replicas > 1 and config.device == "cpu" and sys.platform == "linux"
    if is_shared and replicas > (cores := len(os.sched_getaffinity(0))):
        raise ConfigError(f"{replicas} replicas need as many CPU cores; there are {cores}")
    if replicas > 1 and ":" in config.device:
        raise ConfigError(f"{replicas} replicas have a GPU each; give device 'cuda', got {config.device!r}")
    sent = dict(options)
    if "dtype" in sent:
        sent["dtype"] = config.dtype  # the name of torch's
    speculation = SpeculativeConfig.of(config.speculative_config)
    if speculation is not None:
        sent["speculative_config"] = asdict(speculation)
    return sent


def _on_death(connections: list[EngineConnection], lost: asyncio.Event) -> None:
    """Note that all processes have ended. Not a method: a client that is not used any more is collected."""
    if all(connection.dead is not None for connection in connections):
        lost.set()


def _close(connections: list[EngineConnection]) -> None:
    for connection in connections:
        connection.close()


def _sent_as(params: SamplingParams) -> SamplingParams:
    """Return parameters for an engine process, which sends only what is new.

    Log-probabilities are sent as they come, so that they are counted before they are too many.
    """
    is_large = params.logprobs is not None and params.output_kind is RequestOutputKind.FINAL_ONLY
    if params.output_kind is RequestOutputKind.CUMULATIVE or is_large:
        return replace(params, output_kind=RequestOutputKind.DELTA)
    return params
