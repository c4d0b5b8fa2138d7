"""AsyncLLMEngine: one engine on a thread of its own, for callers on any event loop."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence, Sized
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Self, TypeVar

from ..base.arguments import show_arguments_of
from ..base.from_vllm import ExplainsMissing
from ..config import EngineConfig
from ..errors import EngineDeadError, UsageError, reject_unknown
from ..requests.prompt_report import PromptReport
from ..requests.prompts import Prompt
from ..requests.request import Request, RequestOutput
from ..sampling_params import RequestOutputKind, SamplingParams
from ..scheduler.stats import EngineStats
from ..text.chat_template import TEMPLATE_OPTIONS, Message
from ..text.prompt_parser import ParsedPrompt, PromptParser
from .async_options import MOST_AT_ONCE, STREAM_INTERVAL_S, Deadline, OnPlace, check_interval, ignore_place
from .embedding import (
    EmbeddingRequestOutput,
    Pooling,
    check_pooling,
    embedding_output,
    embedding_reports,
)
from .engine import LLMEngine
from .model_text import ModelText
from .request_factory import RequestSpec
from .scoring import ScoreOutput, names_of_scores, score_output, score_reports
from .thread import EngineThread, Mailbox

T = TypeVar("T")


class AsyncLLMEngine(metaclass=ExplainsMissing):
    """Serves one model to coroutines, with the options of `LLMEngine`.

    >>> async with AsyncLLMEngine("demo") as engine:
    ...     async for output in engine.generate("def add(a, b):", SamplingParams(max_tokens=16)):
    ...         print(output.outputs[0].text)

    A thread owns the engine and steps it while there is work. Callers may run on several event loops and
    threads. A slow reader delays no other: in its mailbox a new cumulative output replaces an unread one, and
    the next delta holds all tokens since the last.

    stream_interval_s: longest time in seconds for which tokens are held back to be shown together. They are
        held back only where steps are so short and readers so many that showing each token by itself would
        take more than one percent of the time. 0 never holds tokens back. The first token, the end, and
        tokens that precede a step with prompts to compute are never held back.

    If a step raises, the engine stops: this and every later call raises EngineDeadError, whose __cause__ is
    the step's error, all requests are aborted and their blocks freed. Make a new engine to go on. (After such
    an error `LLMEngine.step` can be called again and computes the requests anew.)

    Raises ConfigError, CheckpointError or UnsupportedModelError, as `LLMEngine` does.
    """

    def __init__(self, model: str, *, stream_interval_s: float = STREAM_INTERVAL_S, **options: Any) -> None:
        check_interval(stream_interval_s)
        self._start(LLMEngine(model, **options), stream_interval_s)

    @classmethod
    def from_engine(cls, engine: LLMEngine, *, stream_interval_s: float = STREAM_INTERVAL_S) -> Self:
        """Take over an engine, which must not be used in any other way until `shutdown`.

        Raises UsageError if the engine has unfinished requests.
        """
        check_interval(stream_interval_s)
        if engine.has_unfinished_requests():
            raise UsageError("the engine has unfinished requests; finish or abort them first")
        self = cls.__new__(cls)
        self._start(engine, stream_interval_s)
        return self

    def _start(self, engine: LLMEngine, stream_interval_s: float) -> None:
        self._thread = EngineThread(engine, stream_interval_s)
        # Stops the thread also when this object is collected, and before the interpreter exits.
        self._finalizer = weakref.finalize(self, self._thread.stop)

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
    ) -> RequestStream:
        """Return an async iterator over the outputs of a prompt. The last output has finished=True.

        What each output holds is set by output_kind. The arguments are those of `LLMEngine.add_request`;
        request_id is by default the next number.

        The request begins when the first output is awaited. It is aborted, and its blocks are freed within a
        step, if the reading task is cancelled or the iterator is closed or collected.

        Iterating raises RequestError if the prompt or a parameter is wrong, QueueFullError if max_waiting
        requests wait already, and EngineDeadError if the engine has stopped.
        """
        spec = RequestSpec(prompt, sampling_params, priority, tenant, timeout_s, generated_token_ids)
        return RequestStream(self, self._id(request_id), spec)

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
    ) -> RequestStream:
        """Return an async iterator over the answers to one conversation, as `generate` does.

        template: tools, add_generation_prompt, continue_final_message, chat_template and chat_template_kwargs
            of `LLMEngine.chat`.

        Iterating raises RequestError also if the template refuses the conversation.
        """
        reject_unknown("chat", template, TEMPLATE_OPTIONS)
        engine = self._thread.engine

        def render() -> Prompt:
            return engine.render_chat(messages, **template)

        spec = RequestSpec("", sampling_params, priority, tenant, timeout_s)
        return RequestStream(self, self._id(request_id), spec, render=render)

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
        """Embed a prompt, as `LLMEngine.encode` does, in the same steps as all other requests.

        timeout_s: seconds after which the output has an error in place of a vector; None sets no limit.
        on_place: is told the id of the request and the number of its engine, here 0.

        Raises RequestError, QueueFullError or EngineDeadError. A cancelled task aborts the request.
        """
        check_pooling(pooling, normalize)
        deadline = Deadline(timeout_s)
        parsed = await deadline.wait_for(self._in_thread(self.prompts.parse, prompt))
        reports = embedding_reports([parsed], pooling)
        terms = {"priority": priority, "tenant": tenant, "timeout_s": deadline.left_s}
        (request,) = await self._report(reports, [self._id(request_id)], terms, on_place)
        return embedding_output(request, normalize=normalize)

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
        """Return the log-probability of each continuation of a prompt, as `LLMEngine.score` does.

        Raises and is cancelled as `encode`.
        """
        deadline = Deadline(timeout_s)
        parsing = self._in_thread(self.prompts.parse_continued, prompt, continuations)
        parsed = await deadline.wait_for(parsing)
        reports = score_reports(*parsed)
        names = names_of_scores(self._id(request_id), len(reports))
        terms = {"priority": priority, "tenant": tenant, "timeout_s": deadline.left_s}
        requests = await self._report(reports, names, terms, on_place)
        return [score_output(request) for request in requests]

    async def _report(
        self,
        reports: Sequence[tuple[ParsedPrompt, PromptReport]],
        names: Sequence[str],
        terms: Mapping[str, Any],
        on_place: OnPlace,
    ) -> list[Request]:
        """Compute prompts for their reports alone. Return the finished requests in order."""
        thread = self._thread
        loop = asyncio.get_running_loop()
        mailboxes = [Mailbox(loop, RequestOutputKind.FINAL_ONLY, thread.news) for _ in reports]
        try:
            calls = [
                thread.add_report(name, prompt, report, mailbox, **terms)
                for name, (prompt, report), mailbox in zip(names, reports, mailboxes, strict=True)
            ]
            for name in names:
                on_place(name, 0)
            for mailbox in mailboxes:
                await mailbox.get()
            return [call.result() for call in calls]
        except BaseException:  # cancelled, or one is refused
            for name, mailbox in zip(names, mailboxes, strict=True):
                thread.abort(name, mailbox)
            raise

    def _in_thread(self, parse: Callable[..., T], *args: Any) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self.text.tokenizing, parse, *args)

    def _id(self, request_id: str | None) -> str:
        return self._thread.engine.core.next_id() if request_id is None else request_id

    async def fork(
        self,
        request_id: str,
        new_request_id: str | None = None,
        sampling_params: SamplingParams | None = None,
    ) -> RequestStream:
        """Duplicate an unfinished request, as `LLMEngine.fork` does. Return the stream of the new one."""
        loop = asyncio.get_running_loop()

        def fork(engine: LLMEngine) -> tuple[str, Mailbox]:
            core = engine.core
            source = core.groups.get(request_id) if sampling_params is None else sampling_params
            kind = getattr(source, "output_kind", RequestOutputKind.CUMULATIVE)
            mailbox = Mailbox(loop, kind, self._thread.news)
            return core.fork(request_id, new_request_id, sampling_params, mailbox), mailbox

        new_id, mailbox = await self.call(fork)
        return RequestStream(self, new_id, RequestSpec("", sampling_params), mailbox=mailbox)

    async def stats(self) -> EngineStats:
        """Return current counts of requests, blocks and tokens, and totals so far."""
        return await self.call(LLMEngine.stats)

    async def stats_by_engine(self) -> list[EngineStats]:
        """Return the stats of each engine, here of one."""
        return [await self.stats()]

    async def silent_s(self) -> dict[int, float]:
        """Return 0: this process cannot say that it hangs."""
        return {0: 0.0}

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of transformers. Raises UsageError if the engine has none."""
        return self._thread.engine.get_tokenizer()

    async def abort(self, request_id: str) -> None:
        """End a request, whose reader gets a last output. Do nothing if no unfinished request has this id."""
        if self.is_running:
            await self.call(lambda engine: engine.abort_request(request_id))

    async def call(self, function: Callable[[LLMEngine], T]) -> T:
        """Call function(engine) on the engine's thread between two steps, and return its result.

        Raises what the function raises, and EngineDeadError if the engine has stopped.
        """
        return await asyncio.wrap_future(self._thread.call(function))

    def shutdown(self) -> None:
        """Abort all requests, whose readers get EngineDeadError, and end the thread after its step."""
        self._finalizer()
        self._thread.stop()

    @property
    def config(self) -> EngineConfig:
        """The options of the engine."""
        return self._thread.engine.config

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self._thread.engine.max_model_len

    @property
    def text(self) -> ModelText:
        """The tokenizer, chat templates and sampling defaults of the model."""
        return self._thread.engine.text

    @property
    def prompts(self) -> PromptParser:
        """The parser of prompts."""
        return self._thread.engine.prompts

    def describe(self) -> str:
        """Return a line about the model and its KV cache."""
        return self._thread.engine.describe()

    @property
    def is_running(self) -> bool:
        """Whether requests are served: until `shutdown` or a step that raises."""
        return self._thread.dead is None

    @property
    def errored(self) -> bool:
        """Whether a step has raised."""
        return self.dead_error is not None and self.dead_error.__cause__ is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """The error that calls raise; None while the engine runs."""
        return self._thread.dead

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.shutdown)


show_arguments_of(EngineConfig, AsyncLLMEngine.__init__)


class RequestStream(AsyncIterator[RequestOutput]):
    """The outputs of one request, for one reader.

    request_id: the id in its outputs, and for `AsyncLLMEngine.abort`.
    replica: the number of its engine, which is the only one.
    render: makes the prompt, before the request begins.
    mailbox: of a request that has begun already.

    Raises UsageError for a second reader, whose outputs the first one would get.
    """

    replica = 0

    def __init__(
        self,
        engine: AsyncLLMEngine,
        request_id: str,
        spec: RequestSpec,
        *,
        render: Callable[[], Prompt] | None = None,
        mailbox: Mailbox | None = None,
    ) -> None:
        self.request_id = request_id
        self._owner = engine  # keeps the engine alive while the stream is read
        self._thread = engine._thread
        self._spec = spec
        self._render = render
        self._mailbox = mailbox
        self._adding: Future[None] | None = None
        self._is_over = self._is_read = False

    async def __anext__(self) -> RequestOutput:
        if self._is_over:
            raise StopAsyncIteration
        if self._is_read:
            raise UsageError(f"request {self.request_id!r} has a reader already; a stream takes one")
        self._is_read = True
        try:
            if self._mailbox is None:
                self._mailbox = await self._begin()
            output = await self._mailbox.get()
            if self._mailbox.is_paused:
                self._mailbox.is_paused = False
                self._thread.hold(self.request_id, self._mailbox, False)
        except BaseException:  # cancelled, most of all
            self._abort()
            raise
        finally:
            self._is_read = False
        self._is_over = output.finished
        return output

    async def aclose(self) -> None:
        """Abort the request if it is not finished."""
        self._abort()

    def __del__(self) -> None:
        self._abort()

    async def _begin(self) -> Mailbox:
        thread = self._thread
        spec = self._spec
        thread.check()
        loop = asyncio.get_running_loop()
        text = self._owner.text
        deadline = Deadline(getattr(thread.params_of(spec), "timeout_s", None))  # prepare refuses other types
        if self._render is not None:
            rendered = loop.run_in_executor(text.rendering, self._render)
            spec = replace(spec, prompt=await deadline.wait_for(rendered))
        if _is_short(spec):
            spec = thread.prepare(spec)
        else:
            spec = await deadline.wait_for(loop.run_in_executor(text.tokenizing, thread.prepare, spec))
        # From here on there may be a request to abort.
        spec = replace(spec, timeout_s=deadline.left_s)
        self._mailbox = Mailbox(loop, thread.params_of(spec).output_kind, thread.news)
        self._adding = thread.add(self.request_id, spec, self._mailbox)
        return self._mailbox

    def _abort(self) -> None:
        if not self._is_over:
            self._is_over = True
            if self._mailbox is not None and not (self._adding and self._adding.cancel()):
                self._thread.abort(self.request_id, self._mailbox)


def _is_short(spec: RequestSpec) -> bool:
    """Return whether preparing the request is so quick that it may block the event loop."""
    parts: list[Any] = [*spec.prompt.values()] if isinstance(spec.prompt, Mapping) else [spec.prompt]
    if isinstance(params := spec.sampling_params, SamplingParams):
        if params.structured_outputs is not None or params.dry_multiplier:
            return False
        parts += (*params.stop, *params.bad_words)
    return sum(len(part) for part in parts if isinstance(part, Sized)) <= MOST_AT_ONCE
