"""AsyncLLMEngine: one engine on a thread of its own, for callers on any event loop."""

from __future__ import annotations

import asyncio
import weakref
from abc import ABCMeta
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ..base.arguments import show_arguments_of
from ..base.errors import UsageError
from ..base.missing_names import ExplainsMissing
from ..options.config import EngineConfig, options_of
from ..options.sampling_params import RequestOutputKind, SamplingParams
from ..scheduler.stats import EngineStats
from .answer_memory import AnswerAccount
from .async_base import STREAM_INTERVAL_S, AsyncEngine, check_interval, is_compiled_quickly
from .engine import LLMEngine
from .reports import ReportSpec, ReportTerms
from .request_spec import RequestSpec
from .thread import EngineThread, Mailbox

if TYPE_CHECKING:
    from ..options.lora_request import LoRARequest
    from ..text.prompt_parser import ParsedPrompt

T = TypeVar("T")


class _ExplainsMissing(ExplainsMissing, ABCMeta):
    """The type of `AsyncLLMEngine`."""


class AsyncLLMEngine(AsyncEngine[EngineThread], metaclass=_ExplainsMissing):
    """Serves one model to coroutines, with the options of `LLMEngine`.

    >>> async with AsyncLLMEngine("demo") as engine:
    ...     async for output in engine.generate("def add(a, b):", SamplingParams(max_tokens=16)):
    ...         print(output.outputs[0].text)

    A thread owns the engine and steps it while there is work. Callers may run on several event loops and
    threads. A slow reader does not delay other readers: a new cumulative output replaces its unread one, and
    its next delta holds all tokens since the last delta.

    stream_interval_s: maximum time in seconds for which tokens are held back to be published together. They
        are held back only if publishing each token by itself would take more than one percent of the time, as
        with short steps and many readers. 0 never holds tokens back. The first token, the last output, and
        tokens before a step that computes prompts are never held back.

    If a step raises, the engine stops. Every current and later call raises EngineDeadError with the step's
    error as its __cause__; all requests are aborted and their blocks freed. Make a new engine to go on.
    (`LLMEngine.step`, in contrast, can be called again after an error and recomputes the requests.)

    Raises ConfigError, CheckpointError or UnsupportedModelError, as `LLMEngine` does.
    """

    def __init__(self, model: str, *, stream_interval_s: float = STREAM_INTERVAL_S, **options: Any) -> None:
        check_interval(stream_interval_s)
        self._start(LLMEngine(model, **options), stream_interval_s, is_own=True)

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> Self:
        """Make an engine from an `EngineArgs` or `EngineConfig`."""
        return cls(**options_of(engine_args))

    @classmethod
    def from_engine(cls, engine: LLMEngine, *, stream_interval_s: float = STREAM_INTERVAL_S) -> Self:
        """Take over an engine. Until `shutdown`, nothing else may use it.

        Raises UsageError if the engine has unfinished requests.
        """
        check_interval(stream_interval_s)
        if engine.has_unfinished_requests():
            raise UsageError("the engine has unfinished requests; finish or abort them first")
        self = cls.__new__(cls)
        self._start(engine, stream_interval_s, is_own=False)
        return self

    def _start(self, engine: LLMEngine, stream_interval_s: float, *, is_own: bool) -> None:
        self.config = engine.config
        self.max_model_len = engine.max_model_len
        self.text = engine.text
        self.prompts = engine.prompts
        self._own_engine = engine if is_own else None  # which ends with this one
        self._thread = EngineThread(engine, stream_interval_s)
        self._engines = [self._thread]
        # Stops the thread also when this object is collected, and before the interpreter exits.
        self._finalizer = weakref.finalize(self, self._thread.stop)

    async def call(self, function: Callable[[LLMEngine], T]) -> T:
        """Call function(engine) on the engine's thread between two steps, and return its result.

        Raises what the function raises, and EngineDeadError if the engine has stopped.
        """
        return await asyncio.wrap_future(self._thread.call(function))

    async def _abort(self, request_id: str) -> None:
        if self.is_running:
            await self.call(lambda engine: engine.abort_request(request_id))

    async def stats_by_engine(self) -> list[EngineStats]:
        """Return the stats of each engine: a list of one."""
        return [await self.stats()]

    async def set_tenant_weights(self, weights: Mapping[str, float]) -> None:
        """Divide the engine's service among tenants by weight, as `LLMEngine.set_tenant_weights` does."""
        await self.call(lambda engine: engine.set_tenant_weights(weights))

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Running requests keep their blocks."""
        await self.call(LLMEngine.reset_prefix_cache)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read a LoRA adapter before its first request; see `AsyncEngine.add_lora`."""
        known: Any = await self._known_adapter(lora_request)
        return await self.call(lambda engine: engine.add_lora(known))

    @property
    def loaded_adapters(self) -> list[LoRARequest]:
        """The adapters that are known, each with the hash of its content."""
        adapters = self._thread.engine.core.factory.adapters
        return [] if adapters is None else adapters.requests

    async def _known_adapter(self, request: LoRARequest | None) -> Any:
        """Return an adapter, which was read on another thread if it was not in memory."""
        await self._attach()
        if not self._thread.reads(request):
            return request
        prepare = self._thread.prepare_adapter
        return await asyncio.get_running_loop().run_in_executor(None, prepare, request)

    async def _pin(self, prompt: ParsedPrompt, adapter: Any, *, is_pinned: bool) -> int:
        from . import prefixes

        def pin(engine: LLMEngine) -> int:
            own = prefixes.of_adapter(engine.core, prompt, adapter)
            return (prefixes.pin_cached if is_pinned else prefixes.unpin_parsed)(engine.core, own)

        return await self.call(pin)

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget the adapter of this lora_int_id; see `AsyncEngine.remove_lora`."""
        return await self.call(lambda engine: engine.remove_lora(lora_id))

    async def list_loras(self) -> set[int]:
        """Return the lora_int_id of each adapter that is known."""
        return await self.call(LLMEngine.list_loras)

    @property
    def device(self) -> str:
        """The type of the device that computes, such as "cpu"."""
        return self._thread.engine.core.runner.device.type

    def describe(self) -> str:
        """Describe the model and its KV cache in one line."""
        return self._thread.engine.describe()

    def shutdown(self) -> None:
        """Abort all requests and end the thread after its step. Readers get EngineDeadError."""
        self._finalizer()
        self._thread.stop()
        if self._own_engine is not None:
            self._own_engine.shutdown()

    # How requests reach the thread

    async def _attach(self) -> None:
        self._thread.check()

    def _next_id(self) -> str:
        return self._thread.engine.core.next_id()

    def _is_prepared_quickly(self, spec: RequestSpec) -> bool:
        assert spec.sampling_params is not None
        return super()._is_prepared_quickly(spec) and is_compiled_quickly(spec.sampling_params)

    def _prepare(self, spec: RequestSpec) -> RequestSpec:
        return self._thread.prepare(spec)

    def _begin(
        self,
        request_id: str,
        spec: RequestSpec,
        account: AnswerAccount | None,  # noqa: ARG002
    ) -> Mailbox:
        assert spec.sampling_params is not None
        mailbox = self._new_mailbox(request_id, spec.sampling_params.output_kind)
        mailbox.adding = self._thread.add(lambda engine: engine.core.add(request_id, spec, mailbox), mailbox)
        return mailbox

    def _begin_report(
        self, engine: EngineThread | None, request_id: str, spec: ReportSpec[Any], terms: ReportTerms
    ) -> Mailbox:
        assert engine is not None
        mailbox = self._new_mailbox(request_id, RequestOutputKind.FINAL_ONLY, spec)
        mailbox.adding = engine.add(
            lambda engine: engine.core.add_report(request_id, spec, terms, mailbox), mailbox
        )
        return mailbox

    def _new_mailbox(
        self, request_id: str, kind: RequestOutputKind, spec: ReportSpec[Any] | None = None
    ) -> Mailbox:
        return Mailbox(self._thread, asyncio.get_running_loop(), request_id, kind, spec)

    async def _fork(self, request_id: str, new_request_id: str, params: SamplingParams | None) -> Mailbox:
        loop = asyncio.get_running_loop()

        def fork(engine: LLMEngine) -> Mailbox:
            core = engine.core
            kind = core.forkable(request_id).output_kind if params is None else params.output_kind
            mailbox = Mailbox(self._thread, loop, new_request_id, kind)
            core.fork(request_id, new_request_id, params, mailbox)
            return mailbox

        return await self.call(fork)


show_arguments_of(EngineConfig, AsyncLLMEngine.__init__)
