"""AsyncEngine: the methods of engines for coroutines, whether on a thread or in other processes.

Subclasses carry requests to an engine and bring back what it answers. Needs no torch.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from ..architectures.config import ModelConfig
from ..base.errors import (
    ConfigError,
    EngineDeadError,
    RequestError,
    RequestTimeoutError,
    UsageError,
    reject_unknown,
)
from ..base.validation import check_number, shown
from ..checkpoints.embedding_files import Pooling
from ..options.config import EngineConfig
from ..options.sampling_params import SamplingParams
from ..requests.request import TIMEOUT_MESSAGE, Prompt, RequestOutput
from ..scheduler.picture import EnginePicture
from ..scheduler.stats import EngineStats
from ..text.chat_template import TEMPLATE_OPTIONS, Message
from ..text.prompt_parser import ParsedPrompt, PromptParser
from .answer_memory import AnswerAccount
from .embedding import (
    Embedder,
    EmbeddingOptions,
    EmbeddingRequestOutput,
    EmbeddingSpec,
    without_text,
)
from .model_text import ModelText
from .reports import ReportTerms
from .request_spec import Prepared, RequestSpec, check_is_params, closed_error, ids_of
from .scoring import ScoreOutput, ScoreSpec, names_of_scores

if TYPE_CHECKING:
    from ..options.lora_request import LoRARequest

T = TypeVar("T")

# Characters or tokens that are validated and encoded on the event loop; more would block it too long.
MOST_AT_ONCE = 1024
PARTS_OF_TURN = 8  # prompts of one request that are begun in one turn of the event loop
STREAM_INTERVAL_S = 0.2  # text still appears to flow
PUBLISH_SHARE = 0.01  # of the time may be spent on publishing outputs of unfinished requests
LEAST_TIMEOUT_S = 1e-6  # of a request whose timeout_s has passed before its engine gets it
# Is called with the id of a request and the number of the engine that computes it, before it is computed.
OnPlace = Callable[[str, int], object]
# Is called with the id of a request and the number of its prompt's tokens, before an engine gets it. What it
# raises refuses the request.
OnPrompt = Callable[[str, int], object]


class EngineReplica(Protocol):
    """The interface of one engine, which runs on a thread or in another process."""

    @property
    def replica(self) -> int:
        """The number of this engine."""

    @property
    def dead(self) -> EngineDeadError | None:
        """The error that every call raises because the engine has stopped; None while it runs."""

    @property
    def is_fit(self) -> bool:
        """Whether the engine serves requests and is not hanging."""

    @property
    def trouble(self) -> str | None:
        """A description of what is wrong with the engine; None if all is well."""

    @property
    def num_queued_tokens(self) -> int:
        """The number of tokens in the engine's waiting requests, as last reported."""

    def check(self) -> None:
        """Raise EngineDeadError if the engine has stopped."""

    async def ask(self) -> EngineStats:
        """Return the engine's current stats. Raises EngineDeadError."""

    async def picture(self) -> EnginePicture:
        """Return a picture of the engine's next step, or of an idle engine. Raises EngineDeadError."""


E = TypeVar("E", bound=EngineReplica)


class RequestHandle(Protocol):
    """A request that an engine has accepted, as its one reader sees it."""

    @property
    def replica(self) -> int:
        """The number of the engine that computes the request."""

    async def get(self) -> RequestOutput:
        """Return the next output. Raises the error that ended the request."""

    async def result(self) -> Any:
        """Return the result of a request that only reports on its prompt."""

    def close(self) -> None:
        """Abort the request if it is unfinished, and free its unread outputs. Any thread may call this."""


class RequestStream(AsyncIterator[RequestOutput]):
    """The outputs of one request, for one reader.

    request_id: the id in the outputs, also for `AsyncEngine.abort`.
    render: makes the prompt before the request begins.
    handle: the handle of a request that has begun already.
    account: counts the bytes of the outputs together with other streams; None counts them alone.
    part_of: the call that this request belongs to, if the call has several prompts; see `RequestInputs`.
    on_prompt: see `OnPrompt`; None for a stream that needs no acceptance.

    Raises UsageError for a second reader, because each output goes to one reader only.
    """

    def __init__(
        self,
        engine: AsyncEngine[Any],
        request_id: str,
        spec: RequestSpec,
        *,
        render: Callable[[], Prompt] | None = None,
        handle: RequestHandle | None = None,
    ) -> None:
        self.request_id = request_id
        self.spec = spec
        self.render = render
        self.account: AnswerAccount | None = None
        self.part_of = ""
        self.on_prompt: OnPrompt | None = None
        self._engine = engine  # is kept alive while the stream is read
        self._handle = handle
        self._is_over = False
        self._is_read = False

    @property
    def replica(self) -> int:
        """The number of the engine that computes the request; 0 while no engine is chosen."""
        return 0 if self._handle is None else self._handle.replica

    async def __anext__(self) -> RequestOutput:
        if self._is_over:
            self._close()  # its reader has done with the last output
            raise StopAsyncIteration
        if self._is_read:
            raise UsageError(f"request {self.request_id!r} has a reader already; a stream takes one")
        self._is_read = True
        try:
            if self._handle is None:
                self._handle = await self._engine.begin(self)
                if self._is_over:  # closed meanwhile
                    raise closed_error(self.request_id)
            output = await self._handle.get()
        except BaseException:  # cancelled, most of all
            self._close()
            raise
        finally:
            self._is_read = False
        self._is_over = output.finished
        return output

    async def aclose(self) -> None:
        """Abort the request if it is unfinished."""
        self._close()

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        self._is_over = True
        if self._handle is not None:
            self._handle.close()


class AsyncEngine(ABC, Generic[E]):
    """The common base of `AsyncLLMEngine` and `EngineClient`: serves one model to coroutines, with one engine
    or several.

    config: the options of the engine.
    max_model_len: maximum number of tokens of prompt and output together.
    text: the tokenizer, chat templates and sampling defaults of the model.
    prompts: the parser of prompts.
    """

    config: EngineConfig
    max_model_len: int
    text: ModelText
    prompts: PromptParser
    _engines: Sequence[E]

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
        lora_request: LoRARequest | None = None,
    ) -> RequestStream:
        """Return an async iterator over the outputs of a prompt. The last output has finished=True.

        output_kind sets what each output holds. The arguments are as for `LLMEngine.add_request`; request_id
        is by default the next number.

        The request begins when the first output is awaited. If the reading task is cancelled, or the iterator
        is closed or collected, the request is aborted and its blocks are freed within a step.

        Iterating raises RequestError if the prompt or a parameter is wrong, QueueFullError if max_waiting
        requests are already waiting, and EngineDeadError if the engine has stopped.
        """
        spec = RequestSpec(
            prompt,
            sampling_params,
            priority,
            tenant,
            timeout_s,
            generated_token_ids,
            lora_request=lora_request,
        )
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
        lora_request: LoRARequest | None = None,
        **template: Any,
    ) -> RequestStream:
        """Return an async iterator over the answers to one conversation, as `generate` does.

        template: the arguments tools, add_generation_prompt, continue_final_message, chat_template and
            chat_template_kwargs of `LLMEngine.chat`.

        Iterating also raises RequestError if the template refuses the conversation.
        """
        reject_unknown("chat", template, TEMPLATE_OPTIONS)
        render = partial(self.text.render_chat, messages, **template)
        spec = RequestSpec("", sampling_params, priority, tenant, timeout_s, lora_request=lora_request)
        return RequestStream(self, self._id(request_id), spec, render=render)

    @property
    def model_config(self) -> ModelConfig:
        """The model's sizes and options, and the engine's max_model_len."""
        return replace(self.text.model_config, max_model_len=self.max_model_len)

    async def fork(
        self,
        request_id: str,
        new_request_id: str | None = None,
        sampling_params: SamplingParams | None = None,
    ) -> RequestStream:
        """Duplicate an unfinished request, as `LLMEngine.fork` does. Return the new request's stream."""
        if sampling_params is not None:
            sampling_params = check_is_params(sampling_params).clone()
        await self._attach()
        new_id = self._id(new_request_id)
        handle = await self._fork(request_id, new_id, sampling_params)
        return RequestStream(self, new_id, RequestSpec("", sampling_params), handle=handle)

    async def encode(
        self,
        prompt: Prompt,
        request_id: str | None = None,
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        priority: float = 0.0,
        tenant: str = "",
        timeout_s: float | None = None,
        part_of: str = "",
        lora_request: LoRARequest | None = None,
        on_prompt: OnPrompt | None = None,
        on_place: OnPlace | None = None,
    ) -> EmbeddingRequestOutput:
        """Embed a prompt, as `LLMEngine.encode` does, in the same steps as all other requests.

        timeout_s: seconds after which the output has an error in place of a vector; None sets no limit.
        part_of: the name of the call that this prompt belongs to, if the call has several. Its prompts are
            queued one at a time.
        on_prompt: called with the request's id and its number of tokens; may refuse the request by raising.
        on_place: called with the request's id and the number of its engine, from 0.

        Raises RequestError, QueueFullError or EngineDeadError. Cancelling the task aborts the request.
        """
        options = EmbeddingOptions(pooling, normalize, dimensions, prompt_name)
        params = ReportTerms(priority, tenant, timeout_s).params()
        deadline = Deadline(params.timeout_s)
        await self._attach()
        embedder = Embedder(self.text, self.prompts, options)
        make = partial(embedder.spec, prompt)
        pool = self.text.rendering if embedder.renders else self.text.tokenizing
        is_quick = is_parsed_quickly(prompt) and not embedder.renders
        spec = await self._in_pool(pool, make, deadline, is_quick=is_quick)
        parsed = spec.prompt
        spec = without_text(spec)
        adapter = await deadline.wait_for(self._known_adapter(lora_request))
        terms = ReportTerms(params.priority, tenant, deadline.left_s, part_of, adapter)
        (output,) = await self._report([self._id(request_id)], [spec], terms, parsed, on_prompt, on_place)
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
        lora_request: LoRARequest | None = None,
        on_prompt: OnPrompt | None = None,
        on_place: OnPlace | None = None,
    ) -> list[ScoreOutput]:
        """Return the log-probability of each continuation of a prompt, as `LLMEngine.score` does.

        Errors and cancellation are as for `encode`.
        """
        params = ReportTerms(priority, tenant, timeout_s).params()
        deadline = Deadline(params.timeout_s)
        await self._attach()
        parse = partial(self.prompts.parse_continued, prompt, continuations)
        parsed, wholes = await self._in_pool(self.text.tokenizing, parse, deadline)
        specs = [ScoreSpec(whole, len(parsed.token_ids)) for whole in wholes]
        names = names_of_scores(self._id(request_id), len(specs))
        part_of = names[0] if len(names) > 1 else ""
        adapter = await deadline.wait_for(self._known_adapter(lora_request))
        terms = ReportTerms(params.priority, tenant, deadline.left_s, part_of, adapter)
        return await self._report(names, specs, terms, parsed, on_prompt, on_place)

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of transformers. Raises UsageError if the engine has no tokenizer."""
        return self.text.get_tokenizer()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort one request or several; each reader gets a last output. Unknown ids are ignored."""
        for each in ids_of(request_id):
            await self._abort(each)

    @abstractmethod
    async def _abort(self, request_id: str) -> None: ...

    async def stats(self) -> EngineStats:
        """Return current counts of requests, blocks and tokens, and totals so far, over all engines."""
        await self._attach()
        return EngineStats.total(await asyncio.gather(*(engine.ask() for engine in self._running())))

    @abstractmethod
    async def stats_by_engine(self) -> list[EngineStats]:
        """Return the stats of each engine. Stats of an engine in another process are at most a second old."""

    async def picture(self, replica: int) -> EnginePicture:
        """Return a picture of an engine's next step; of its present state if it is idle.

        replica: the engine's number, from 0.

        Raises EngineDeadError if the engine has stopped, was removed, or is being replaced.
        """
        await self._attach()
        if replica >= len(self._engines):
            raise EngineDeadError(f"there is no engine {replica} any more")
        return await self._engines[replica].picture()

    def removed_stats(self) -> Mapping[int, EngineStats]:
        """Return the stats of the engines that `resize` has removed, by number."""
        return {}

    @property
    def num_engines(self) -> int:
        """The number of engines, including those that are being replaced."""
        return len(self._engines)

    @property
    def queued_tokens(self) -> list[int]:
        """Return the number of tokens in the waiting requests of each running engine, as last reported.

        Raises EngineDeadError if no engine is left.
        """
        return [engine.num_queued_tokens for engine in self._running()]

    @abstractmethod
    async def set_tenant_weights(self, weights: Mapping[str, float]) -> None:
        """Divide the engines' service among tenants by weight, as `LLMEngine.set_tenant_weights` does."""

    @abstractmethod
    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes of all engines. Running requests keep their blocks."""

    @abstractmethod
    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read a LoRA adapter before its first request, while requests run. Return whether it was not known.

        load_inplace reads it again, and lets it take the place of one with its name or number. Requests that
        have begun keep the adapter with which they began.

        Raises RequestError if it cannot be read, does not fit the model, or contradicts a known adapter;
        nothing has changed then. Raises UsageError without enable_lora, and EngineDeadError.
        """

    @abstractmethod
    async def remove_lora(self, lora_id: int) -> bool:
        """Forget the adapter of this lora_int_id. Requests that have begun keep it. Return whether it was
        known.

        Raises UsageError without enable_lora.
        """

    @abstractmethod
    async def list_loras(self) -> set[int]:
        """Return the lora_int_id of each adapter that is known. Raises UsageError without enable_lora."""

    @property
    def loaded_adapters(self) -> list[LoRARequest]:
        """The adapters that are known, each with the hash of its content."""
        return []

    @abstractmethod
    async def _known_adapter(self, request: LoRARequest | None) -> Any:
        """Return a request's adapter as the engines take it, once it was read. Raises RequestError."""

    async def pin_prefix(
        self,
        prompt: Prompt,
        salt: str | None = None,
        *,
        is_pinned: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> int:
        """Compute a prompt's KV if needed, and pin its full blocks, or unpin them. Return of how many tokens.

        Raises the errors of `LLMEngine.pin_prefix`, UsageError for several engines, and EngineDeadError.
        """
        if len(self._engines) > 1:
            raise UsageError(f"a prefix is pinned in one engine; there are {len(self._engines)}")
        parsed = self.prompts.parse(prompt, salt)
        adapter = await self._known_adapter(lora_request)
        if is_pinned:
            params = SamplingParams(max_tokens=1, temperature=0)
            async for _ in self.generate(parsed, params, lora_request=adapter):
                pass
        await self._attach()
        return await self._pin(parsed, adapter, is_pinned=is_pinned)

    @abstractmethod
    async def _pin(self, prompt: ParsedPrompt, adapter: Any, *, is_pinned: bool) -> int:
        """Pin the cached blocks of a prompt, or unpin them. Return of how many tokens."""

    async def resize(self, replicas: int) -> None:
        """Set the number of engines. Raises ConfigError if this class does not support the number."""
        if replicas != 1:
            raise ConfigError(
                f"this engine runs in the process of its caller, and replicas must be 1, got {replicas}; "
                "EngineClient has several"
            )

    async def troubles(self) -> list[str]:
        """Describe engines that hang, or that were not replaced in time."""
        await self._attach()
        await asyncio.sleep(0)  # what the sockets hold is read first
        return [engine.trouble for engine in self._running() if engine.trouble is not None]

    async def is_fit(self) -> bool:
        """Return whether at least one engine serves requests and is not hanging."""
        await self._attach()
        await asyncio.sleep(0)
        return any(engine.is_fit for engine in self._running())

    @property
    @abstractmethod
    def device(self) -> str:
        """The type of the device that computes, such as "cpu"."""

    @abstractmethod
    def describe(self) -> str:
        """Describe the model and its KV cache in one line."""

    @abstractmethod
    def shutdown(self) -> None:
        """Abort all requests and end the engines. Readers get EngineDeadError."""

    @property
    def is_running(self) -> bool:
        """Whether requests are served: until `shutdown`, or until no engine is left."""
        return any(engine.dead is None for engine in self._engines)

    @property
    def errored(self) -> bool:
        """Whether a step has raised, or an engine process has ended."""
        return any(engine.dead is not None and engine.dead.__cause__ is not None for engine in self._engines)

    @property
    def dead_error(self) -> EngineDeadError | None:
        """The error that calls raise; None while requests are served."""
        return None if self.is_running else self._engines[0].dead

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.shutdown)

    def count_together(self, streams: Sequence[RequestStream], *, is_whole: bool) -> None:
        """Limit the memory of several streams of one reader together, if they use memory of this process.

        is_whole: whether the reader sends everything together once all streams are finished.
        """

    async def begin(self, stream: RequestStream) -> RequestHandle:
        """Choose an engine for the request of a stream, and send the request to it."""
        await self._attach()
        spec = stream.spec
        params = spec.params(self.text.default_params)
        deadline = Deadline(params.timeout_s)
        spec = replace(spec, sampling_params=params, priority=None, timeout_s=None, part_of=stream.part_of)
        if spec.lora_request is not None:
            adapter = await deadline.wait_for(self._known_adapter(spec.lora_request))
            spec = replace(spec, lora_request=adapter)
        if stream.render is not None:
            prompt = await self._in_pool(self.text.rendering, stream.render, deadline)
            spec = replace(spec, prompt=prompt)
        prepare = partial(self._prepare, spec)
        is_quick = self._is_prepared_quickly(spec)
        spec = await self._in_pool(self.text.tokenizing, prepare, deadline, is_quick=is_quick)
        if stream.on_prompt is not None:
            parsed = spec.prompt.prompt if isinstance(spec.prompt, Prepared) else spec.prompt
            assert isinstance(parsed, ParsedPrompt)
            stream.on_prompt(stream.request_id, len(parsed.token_ids))
        # Nothing is awaited from here on: a reader that is cancelled has a handle, or no request.
        return self._begin(stream.request_id, replace(spec, timeout_s=deadline.left_s), stream.account)

    async def _report(
        self,
        names: Sequence[str],
        specs: Sequence[EmbeddingSpec | ScoreSpec],
        terms: ReportTerms,
        prompt: ParsedPrompt,
        on_prompt: OnPrompt | None,
        on_place: OnPlace | None,
    ) -> list[Any]:
        """Compute prompts for their reports alone, on one engine, as they begin with the same prompt."""
        if on_prompt is not None:  # of all, before the first is computed
            for name, spec in zip(names, specs, strict=True):
                on_prompt(name, len(spec.prompt.token_ids))
        engine = self._choose(prompt.token_ids)
        handles = list[RequestHandle]()
        try:
            async for name, spec in cooperatively(zip(names, specs, strict=True)):
                handles.append(self._begin_report(engine, name, spec, terms))
                if on_place is not None:
                    on_place(name, handles[-1].replica)
            return [await handle.result() for handle in handles]
        finally:  # cancelled, or one is refused
            for handle in handles:
                handle.close()

    def _running(self) -> list[E]:
        """Return the engines that have not stopped. Raises EngineDeadError if none is left."""
        running = [engine for engine in self._engines if engine.dead is None]
        if not running:
            self._engines[0].check()
        return running

    def _choose(self, token_ids: Sequence[int]) -> E | None:  # noqa: ARG002
        """Return the engine for a prompt; None while none can have it. Raises EngineDeadError."""
        return self._running()[0]

    def _id(self, request_id: str | None) -> str:
        request_id = self._next_id() if request_id is None else request_id
        if not isinstance(request_id, str):
            raise RequestError(f"request_id must be a string, got {shown(request_id)}")
        return request_id

    def _is_prepared_quickly(self, spec: RequestSpec) -> bool:
        """Return whether `_prepare` is so quick that it may block the event loop."""
        return is_parsed_quickly(spec.prompt)

    async def _in_pool(
        self,
        pool: ThreadPoolExecutor,
        function: Callable[[], T],
        deadline: Deadline,
        *,
        is_quick: bool = False,
    ) -> T:
        """Call a function on a thread of the pool, or here if it is quick. Raises RequestTimeoutError."""
        if is_quick:
            return function()
        return await deadline.wait_for(asyncio.get_running_loop().run_in_executor(pool, function))

    # How requests reach an engine

    @abstractmethod
    async def _attach(self) -> None:
        """Get ready for requests from the running event loop."""

    @abstractmethod
    def _next_id(self) -> str:
        """Return an id that no unfinished request has."""

    @abstractmethod
    def _prepare(self, spec: RequestSpec) -> RequestSpec:
        """Return the request with what takes long to make of its prompt and parameters. From any thread."""

    @abstractmethod
    def _begin(self, request_id: str, spec: RequestSpec, account: AnswerAccount | None) -> RequestHandle:
        """Send a prepared request to an engine, which counts its outputs on the account if it holds them."""

    @abstractmethod
    def _begin_report(
        self, engine: E | None, request_id: str, spec: EmbeddingSpec | ScoreSpec, terms: ReportTerms
    ) -> RequestHandle:
        """Send a request for a report on a prompt to this engine, or let it wait for one."""

    @abstractmethod
    async def _fork(
        self, request_id: str, new_request_id: str, params: SamplingParams | None
    ) -> RequestHandle:
        """Send the duplicate of a request to the engine that has it."""


async def cooperatively(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield the items. After every PARTS_OF_TURN items, let the event loop run other tasks."""
    for i, item in enumerate(items):
        if i and i % PARTS_OF_TURN == 0:
            await asyncio.sleep(0)
        yield item


def check_interval(seconds: float) -> None:
    """Raise ConfigError unless stream_interval_s is a number of seconds."""
    check_number(ConfigError, "stream_interval_s", seconds, 0.0)


def next_publish_time(started: float, ended: float, stream_interval_s: float) -> float:
    """Return the earliest time at which to publish tokens again.

    started, ended: when the last publishing began and ended.

    Publishing thus takes at most PUBLISH_SHARE of the time, and delays a token by at most stream_interval_s.
    """
    return ended + min((ended - started) / PUBLISH_SHARE, stream_interval_s)


def is_parsed_quickly(prompt: object) -> bool:
    """Return whether parsing a prompt is quick enough to be done on the event loop."""
    parts = [*prompt.values()] if isinstance(prompt, Mapping) else [prompt]
    return sum(len(part) for part in parts if isinstance(part, Sized)) <= MOST_AT_ONCE


def is_compiled_quickly(params: SamplingParams) -> bool:
    """Return whether compiling the parameters is too quick to delay other requests."""
    if params.structured_outputs is not None or params.dry_multiplier:
        return False
    return sum(map(len, (*params.stop, *params.bad_words))) <= MOST_AT_ONCE


class Deadline:
    """The time at which a request's timeout_s ends, counted from now. A timeout_s of None sets no limit."""

    def __init__(self, timeout_s: float | None) -> None:
        self._at = None if timeout_s is None else time.monotonic() + timeout_s

    @property
    def left_s(self) -> float | None:
        """The seconds until the deadline; None without a limit."""
        return None if self._at is None else max(self._at - time.monotonic(), LEAST_TIMEOUT_S)

    async def wait_for(self, awaitable: Awaitable[T]) -> T:
        """Return the result of an awaitable. Raises RequestTimeoutError if the deadline passes first."""
        waiting = asyncio.timeout(self.left_s)
        try:
            async with waiting:
                return await awaitable
        except TimeoutError:
            if not waiting.expired():
                raise
            raise RequestTimeoutError(TIMEOUT_MESSAGE) from None
