"""EngineClient: engines in processes of their own, with the methods of `AsyncLLMEngine`."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Awaitable, Callable, Sequence, Sized
from dataclasses import replace
from typing import Any, Self, TypeVar

from ..base.arguments import show_arguments_of
from ..base.validation import check_int, shown
from ..config import EngineConfig
from ..engine.async_options import (
    MOST_AT_ONCE,
    STREAM_INTERVAL_S,
    Deadline,
    OnPlace,
    check_interval,
    ignore_place,
    paced,
)
from ..engine.embedding import EmbeddingRequestOutput, Pooling, check_pooling
from ..engine.model_text import ModelText
from ..engine.scoring import ScoreOutput, names_of_scores
from ..errors import ConfigError, EngineDeadError, RequestError, UsageError, reject_unknown
from ..model.hf_config import read_config
from ..model.hub import resolve
from ..requests.prompts import Prompt
from ..routing.router import new_router
from ..sampling_params import RequestOutputKind, SamplingParams
from ..scheduler.stats import EngineStats
from ..text.chat_template import TEMPLATE_OPTIONS, Message
from ..text.prompt_parser import ParsedPrompt
from . import frames
from .answer_memory import AnswerAccount, AnswerBudget, comes_in_parts
from .client_stream import ClientStream, RequestTerms, SentRequest
from .connection import EngineConnection
from .inbox import Inbox
from .start_options import sendable_options
from .telemetry.log_lines import LogFormat

T = TypeVar("T")


class EngineClient:
    """Serves one model to the coroutines of one event loop, from engines in processes of their own.

    >>> async with EngineClient("demo") as engine:
    ...     async for output in engine.generate("def add(a, b):", SamplingParams(max_tokens=16)):
    ...         print(output.outputs[0].text)

    Prompts are tokenized and chats rendered in this process, which does not import torch. Its methods, their
    results and their errors are those of `AsyncLLMEngine`, with the options of `LLMEngine`. Functions cannot
    cross to another process: `call` does not exist, and logits_processors are refused. A process that ends
    fails its requests with EngineDeadError. New ones go to processes that have sent heartbeats lately.

    replicas: engine processes, each with a GPU of its own or its share of the cores.
    router: which of them gets a request: "round-robin", "least-loaded" or "prefix-aware".
    stream_interval_s: see `AsyncLLMEngine`.
    log_format: of the lines that the processes write to stderr, "text" or "json".

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
        sent = {"model": model, **sendable_options(config, options, replicas)}
        self._connections: list[EngineConnection] = []
        self._finalizer = weakref.finalize(self, _close, self._connections)
        try:
            for replica in range(replicas):
                start = frames.Start(sent, stream_interval_s, log_format, replica, replicas)
                self._connections.append(EngineConnection(start))
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
        self._streams: dict[str, tuple[EngineConnection, int]] = {}  # of unfinished requests, by id
        self._attached: asyncio.Future[Any] | None = None  # to an event loop

    def describe(self) -> str:
        """Return a line about the model and its KV cache."""
        num = len(self._connections)
        return self._description if num == 1 else f"{num} engines, each {self._description}"

    def generate(
        self,
        prompt: Prompt | ParsedPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: float | None = None,
        tenant: str = "",
        timeout_s: float | None = None,
        generated_token_ids: Sequence[int] = (),
    ) -> ClientStream:
        """Return an async iterator over the outputs of a prompt; see `AsyncLLMEngine.generate`."""
        params = self._params(sampling_params, priority, timeout_s)
        return ClientStream(
            self, self._id(request_id), RequestTerms(prompt, params, tenant, generated_token_ids)
        )

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: float | None = None,
        tenant: str = "",
        timeout_s: float | None = None,
        **template: Any,
    ) -> ClientStream:
        """Return an async iterator over the answers to one conversation; see `AsyncLLMEngine.chat`."""
        reject_unknown("chat", template, TEMPLATE_OPTIONS)
        params = self._params(sampling_params, priority, timeout_s)
        terms = RequestTerms("", params, tenant, render=lambda: self.text.render_chat(messages, **template))
        return ClientStream(self, self._id(request_id), terms)

    async def fork(
        self,
        request_id: str,
        new_request_id: str | None = None,
        sampling_params: SamplingParams | None = None,
    ) -> ClientStream:
        """Duplicate an unfinished request, as `LLMEngine.fork` does. Return the stream of the new one."""
        await self.attach()
        connection, key = self._streams.get(request_id, (None, -1))
        parent = None if connection is None else connection.unfinished(key)
        if connection is None or parent is None:
            self._running()  # raises if all have ended
            raise RequestError(f"there is no unfinished request {request_id!r} to fork")
        kind = parent.kind if sampling_params is None else sampling_params.output_kind
        params = None if sampling_params is None else frames.params_to_wire(_sent_as(sampling_params))
        account = AnswerAccount(self.budget, is_whole=not comes_in_parts(kind))
        inbox = Inbox(self._id(new_request_id), parent.prompt, parent.token_ids, kind, account=account)
        order = frames.Fork(next(self._keys), request_id, inbox.request_id, params)
        self._send(connection, order, inbox)
        return ClientStream(self, inbox.request_id, None, sent=SentRequest(connection, order.key, inbox))

    async def encode(
        self,
        prompt: Prompt,
        request_id: str | None = None,
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        priority: float = 0.0,
        tenant: str = "",
        timeout_s: float | None = None,
        on_place: OnPlace = ignore_place,
    ) -> EmbeddingRequestOutput:
        """Embed a prompt, as `LLMEngine.encode` does, in the same steps as all other requests."""
        check_pooling(pooling, normalize)
        deadline = Deadline(timeout_s)
        parsed = await deadline.wait_for(self._parse(prompt))
        name = self._id(request_id)
        arguments = (name, parsed.token_ids, parsed.namespace, pooling, normalize)
        order = frames.Embed(next(self._keys), *arguments, priority, tenant, deadline.left_s)
        (output,) = await self._report([order], parsed, on_place)
        found: EmbeddingRequestOutput = replace(output, prompt=parsed.text)
        return found

    embed = encode

    async def score(
        self,
        prompt: Prompt,
        continuations: Sequence[str | Sequence[int]],
        request_id: str | None = None,
        *,
        priority: float = 0.0,
        tenant: str = "",
        timeout_s: float | None = None,
        on_place: OnPlace = ignore_place,
    ) -> list[ScoreOutput]:
        """Return the log-probability of each continuation of a prompt, as `LLMEngine.score` does."""
        deadline = Deadline(timeout_s)
        await self.attach()
        parsing = self._in_thread(self.prompts.parse_continued, prompt, continuations)
        parsed, wholes = await deadline.wait_for(parsing)
        terms = (len(parsed.token_ids), priority, tenant, deadline.left_s)
        orders = [
            frames.ScoreTokens(next(self._keys), name, whole.token_ids, whole.namespace, *terms)
            for name, whole in zip(names_of_scores(self._id(request_id), len(wholes)), wholes, strict=True)
        ]
        return await self._report(orders, parsed, on_place)

    async def stats(self) -> EngineStats:
        """Return current counts of requests, blocks and tokens, and totals so far, of all engines."""
        await self.attach()
        running = self._running()
        return EngineStats.total(await asyncio.gather(*(each.ask(next(self._keys)) for each in running)))

    async def stats_by_engine(self) -> list[EngineStats]:
        """Return the stats of each engine process as of its last heartbeat, at most a second old."""
        await self.attach()
        return [connection.stats for connection in self._connections]

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of transformers. Raises UsageError if the engine has none."""
        return self.text.get_tokenizer()

    async def abort(self, request_id: str) -> None:
        """End a request, whose reader gets a last output. Do nothing if no unfinished request has this id."""
        if request_id in self._streams:
            connection, key = self._streams[request_id]
            connection.end(key)

    def shutdown(self) -> None:
        """Abort all requests, whose readers get EngineDeadError, and end the processes."""
        self._finalizer()

    @property
    def is_running(self) -> bool:
        """Whether requests are served: until `shutdown`, or until no process is left."""
        return any(connection.dead is None for connection in self._connections)

    @property
    def errored(self) -> bool:
        """Whether a process has failed."""
        return any(each.dead is not None and each.dead.__cause__ is not None for each in self._connections)

    @property
    def dead_error(self) -> EngineDeadError | None:
        """The error that calls raise; None while requests are served."""
        return None if self.is_running else self._connections[0].dead

    async def silent_s(self) -> dict[int, float]:
        """Return for how many seconds each process that has not ended has sent nothing."""
        await self.attach()
        await asyncio.sleep(0)  # what the sockets hold is read first
        return {each.replica: each.silent_s for each in self._running()}

    async def __aenter__(self) -> Self:
        await self.attach()
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._connections:
            await connection.aclose()
        self.shutdown()

    # For `ClientStream`

    async def attach(self) -> None:
        """Bind the client to the running event loop. Raises UsageError in another one."""
        loop = asyncio.get_running_loop()
        if self._attached is None:
            attaching = (connection.attach(loop) for connection in self._connections)
            self._attached = asyncio.gather(*attaching)
        elif self._attached.get_loop() is not loop:
            raise UsageError("an EngineClient serves one event loop, that of its first call")
        if not self._attached.done():
            await asyncio.shield(self._attached)

    async def begin(self, request_id: str, terms: RequestTerms, account: AnswerAccount | None) -> SentRequest:
        """Send a request to an engine."""
        deadline = Deadline(terms.params.timeout_s)
        await self.attach()
        if terms.render is not None:
            rendered = asyncio.get_running_loop().run_in_executor(self.text.rendering, terms.render)
            terms = replace(terms, prompt=await deadline.wait_for(rendered))
        parsed = await deadline.wait_for(self._parse(terms.prompt, terms.params.cache_salt))
        given = [*terms.generated_token_ids]
        kind = terms.params.output_kind
        if account is None:
            account = AnswerAccount(self.budget, is_whole=not comes_in_parts(kind))
        account.expect(
            terms.params,
            len(parsed.token_ids),
            max_model_len=self.max_model_len,
            vocab_size=self.text.model_config.vocab_size,
        )
        # Deltas would leave out the text of the given tokens.
        in_full = bool(given) and kind is RequestOutputKind.CUMULATIVE
        inbox = Inbox(request_id, parsed.text, parsed.token_ids, kind, account=account, in_full=in_full)
        sent = terms.params if in_full else _sent_as(terms.params)
        params = frames.params_to_wire(replace(sent, timeout_s=deadline.left_s))
        arguments = (parsed.token_ids, parsed.namespace, params, terms.tenant, given)
        order = frames.Generate(next(self._keys), request_id, *arguments)
        connection = self._choose(parsed.token_ids)
        self._send(connection, order, inbox)
        return SentRequest(connection, order.key, inbox)

    def forget(self, request_id: str, key: int) -> None:
        """Let another request have this id."""
        if self._streams.get(request_id, (None, -1))[1] == key:
            del self._streams[request_id]

    # Inside

    def _id(self, request_id: str | None) -> str:
        if request_id is None:
            return next(i for i in map(str, self._ids) if not self._is_unfinished(i))
        if not isinstance(request_id, str):
            raise RequestError(f"request_id must be a string, got {shown(request_id)}")
        return request_id

    def _is_unfinished(self, request_id: str) -> bool:
        connection, key = self._streams.get(request_id, (None, -1))
        return connection is not None and connection.unfinished(key) is not None

    def _params(self, params: Any, priority: float | None, timeout_s: float | None) -> SamplingParams:
        params = self.text.params_of({}) if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be SamplingParams, got {shown(params)}")
        options: dict[str, Any] = {"priority": priority, "timeout_s": timeout_s}
        given = {name: value for name, value in options.items() if value is not None}
        return replace(params, **given) if given else params

    async def _parse(self, prompt: Prompt | ParsedPrompt, salt: str | None = None) -> ParsedPrompt:
        if isinstance(prompt, ParsedPrompt):
            return prompt
        await self.attach()
        if _is_short(prompt):
            return self.prompts.parse(prompt, salt)
        return await self._in_thread(self.prompts.parse, prompt, salt)

    def _in_thread(self, parse: Callable[..., T], *args: Any) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self.text.tokenizing, parse, *args)

    def _running(self) -> list[EngineConnection]:
        running = [connection for connection in self._connections if connection.dead is None]
        if not running:
            self._connections[0].check()
        return running

    def _choose(self, token_ids: list[int]) -> EngineConnection:
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

    def _send(self, connection: EngineConnection, order: Any, inbox: Inbox) -> None:
        if self._is_unfinished(inbox.request_id):
            raise RequestError(f"request id {inbox.request_id!r} is in use by an unfinished request")
        connection.send(order, inbox)
        self._streams[inbox.request_id] = connection, order.key

    async def _report(
        self,
        orders: Sequence[frames.Embed | frames.ScoreTokens],
        prompt: ParsedPrompt,
        on_place: OnPlace,
    ) -> list[Any]:
        """Compute prompts for their reports alone, in one process, as they share a prefix."""
        connection = self._choose(prompt.token_ids)
        inboxes = list[Inbox]()
        try:
            async for order in paced(orders):
                inbox = Inbox(order.request_id, None, order.token_ids, RequestOutputKind.FINAL_ONLY)
                self._send(connection, order, inbox)
                inboxes.append(inbox)
                on_place(order.request_id, connection.replica)
            for inbox in inboxes:
                await inbox.wait()
            return [inbox.result for inbox in inboxes]
        finally:
            for order in orders[: len(inboxes)]:
                connection.abort(order.key)
                self.forget(order.request_id, order.key)


show_arguments_of(EngineConfig, EngineClient.__init__)


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


def _is_short(prompt: Any) -> bool:
    """Return whether parsing the prompt is so quick that it may block the event loop."""
    parts = [*prompt.values()] if isinstance(prompt, dict) else [prompt]
    return sum(len(part) for part in parts if isinstance(part, Sized)) <= MOST_AT_ONCE
