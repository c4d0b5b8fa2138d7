"""EngineClient: engines in processes of their own, with the methods of `AsyncLLMEngine`."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Self

from ..base.arguments import show_arguments_of
from ..base.errors import ConfigError, RequestError, ResourceError, UsageError
from ..base.validation import check_int, shown
from ..checkpoints.model_directory import resolve
from ..engine.answer_memory import AnswerAccount, AnswerBudget, comes_in_parts
from ..engine.async_base import STREAM_INTERVAL_S, AsyncEngine, RequestStream, check_interval
from ..engine.embedding import EmbeddingSpec
from ..engine.loaded_adapters import LoadedAdapters
from ..engine.model_text import ModelText, read_model
from ..engine.reports import ReportTerms
from ..engine.request_spec import Prepared, RequestSpec
from ..engine.scoring import ScoreSpec
from ..options.config import EngineConfig, check_policy
from ..options.lora_request import NO_LORA, LoRARequest, namespace_of
from ..options.sampling_params import RequestOutputKind, SamplingParams
from ..ranks.place import Torchrun
from ..scheduler.stats import EngineStats
from ..text.prompt_parser import ParsedPrompt
from . import frames
from .inbox import Inbox
from .launcher import Launcher, LocalLauncher
from .restart_terms import DEFAULT_TERMS, RestartTerms
from .router import new_router
from .sent_request import SentRequest
from .supervised_engine import SupervisedEngine
from .supervisor import Supervisor
from .telemetry.log_lines import LogFormat

ON_THIS_MACHINE = LocalLauncher()
MAX_REPLICAS = 1024


class EngineClient(AsyncEngine[SupervisedEngine]):
    """Serves one model to the coroutines of one event loop, from engines in separate processes.

    >>> async with EngineClient("demo") as engine:
    ...     async for output in engine.generate("def add(a, b):", SamplingParams(max_tokens=16)):
    ...         print(output.outputs[0].text)

    Prompts are tokenized and chats rendered in this process, which does not import torch. Methods, results
    and errors are as in `AsyncLLMEngine`, and options as in `LLMEngine`. Functions cannot be sent to another
    process: `call` does not exist, and logits_processors are refused. New requests go to processes that have
    sent heartbeats lately.

    A process that ends or hangs is replaced. Its requests continue after the tokens received so far, in the
    new process or in another one. Their readers notice only a delay.

    An output occupies memory until its reader asks for the next one.

    replicas: the number of engine processes, each with its own GPU or its share of the cores.
    router: how the process for a request is chosen: "round-robin", "least-loaded" or "prefix-aware".
    lora_modules: the LoRA adapters that the engines read before they serve.
    prefixes: the folder of pinned prefixes that an engine process loads before it serves; "" for none.
    stream_interval_s: see `AsyncLLMEngine`.
    log_format: the format of the processes' lines on stderr, "text" or "json".

    resume: whether requests continue when their process ends; otherwise they fail with EngineDeadError.
    max_restarts: maximum number of restarts of one engine within ten minutes. Beyond it, all requests fail
        with EngineDeadError.
    step_timeout: seconds after which a process counts as hung if its step has not ended.
    launcher: starts the processes, by default on this machine; `paged.ray.launcher.connect` returns one that
        starts them on a Ray cluster.

    Raises ConfigError, CheckpointError or UnsupportedModelError, as `LLMEngine` does, and EngineDeadError if
    more than max_restarts processes of an engine are killed before it is made.
    """

    def __init__(
        self,
        model: str,
        *,
        replicas: int = 1,
        router: str = "least-loaded",
        stream_interval_s: float = STREAM_INTERVAL_S,
        log_format: LogFormat = "text",
        resume: bool = DEFAULT_TERMS.resume,
        max_restarts: int = DEFAULT_TERMS.max_restarts,
        step_timeout: float = DEFAULT_TERMS.step_timeout,
        launcher: Launcher = ON_THIS_MACHINE,
        lora_modules: Sequence[LoRARequest] = (),
        prefixes: str = "",
        **options: Any,
    ) -> None:
        check_interval(stream_interval_s)
        terms = RestartTerms(resume=resume, max_restarts=max_restarts, step_timeout=step_timeout)
        check_int(ConfigError, "replicas", replicas, 1, MAX_REPLICAS)
        self.config = config = EngineConfig(model, **options)
        new_router(router, 16)  # before anything starts
        terms = _terms_of_ranks(config, terms, replicas)
        directory = resolve(config.model, config.revision)  # downloaded once, for all processes
        model_config, no_images = read_model(config, directory)
        num_sharing = replicas if launcher.divides_machine else 1
        _check_share(config, num_sharing)
        sent = {"model": model, **sendable_options(config, options), **launcher.engine_options}
        starts = [
            frames.Start(
                sent,
                stream_interval_s,
                log_format,
                replica,
                num_sharing,
                socket.gethostname(),
                [*map(frames.Adapter.named, lora_modules)],
                prefixes,
            )
            for replica in range(replicas)
        ]
        self._divides_machine = launcher.divides_machine
        self._supervisor = Supervisor(starts, router, terms, config.max_waiting, launcher)
        self._engines = self._supervisor.replicas
        self._finalizer = weakref.finalize(self, self._supervisor.close)
        try:
            self.text = ModelText(config, directory, model_config, no_images)  # while the engines start
            ready = self._supervisor.wait_ready()
        except BaseException:
            self._finalizer()
            raise
        self.adapters = LoadedAdapters()
        self._loading = asyncio.Lock()
        for number, module in enumerate(lora_modules):
            hashes = {each.adapters[number] for each in ready}
            if len(hashes) > 1:
                self._finalizer()
                raise ConfigError(f"the engines have read other contents of the adapter {module.lora_name!r}")
            self.adapters.add(module, hashes.pop())
        self._set_adapters()
        # With shares of one machine's memory, engines may have caches of different sizes.
        self.max_model_len = min(each.max_model_len for each in ready)
        self.prompts = self.text.new_parser(self.max_model_len)
        self._description = ready[0].description
        self._ids = itertools.count()
        self.budget = AnswerBudget()

    async def _abort(self, request_id: str) -> None:
        self._supervisor.end(request_id)

    async def stats_by_engine(self) -> list[EngineStats]:
        """Return the stats of each engine process as of its last heartbeat. They are at most a second old."""
        await self._attach()
        return [replica.stats for replica in self._supervisor.replicas]

    def removed_stats(self) -> Mapping[int, EngineStats]:
        """Return the last stats of the engines that `resize` has removed, by number."""
        return self._supervisor.removed

    async def set_tenant_weights(self, weights: Mapping[str, float]) -> None:
        """Divide the engines' service among tenants by weight, as `LLMEngine.set_tenant_weights` does.

        Raises ConfigError and EngineDeadError.
        """
        check_policy(self.config.scheduling_policy, weights)
        await self._attach()
        for engine in self._running():
            engine.set_tenant_weights(weights)

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes of all engines. Running requests keep their blocks."""
        await self._attach()
        for engine in self._running():
            engine.reset_prefix_cache()

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Have all engines read a LoRA adapter before its first request; see `AsyncEngine.add_lora`.

        Engines that are replaced later read it before they serve.
        """
        self._check_lora()
        await self._attach()
        async with self._loading:
            if self.adapters.find(lora_request) is not None:
                return False
            await self._load_adapter(lora_request)
            return True

    async def _load_adapter(self, request: LoRARequest) -> LoRARequest:
        content_hash = await self._supervisor.load_adapter(frames.Adapter.named(request))
        before = self.adapters.requests
        known = self.adapters.add(request, content_hash)
        self._set_adapters()
        self._forget(before)
        return known

    def _set_adapters(self) -> None:
        """Have engines that are made later read the adapters that are loaded."""
        self._supervisor.set_adapters([*map(frames.Adapter.named, self.adapters.requests)])

    def _forget(self, requests: Sequence[LoRARequest]) -> None:
        """Free the memory of adapters that are loaded no more."""
        for each in requests:
            if each.content_hash is not None and not self.adapters.has_content(each.content_hash):
                self._supervisor.forget_adapter(each.content_hash)

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget the adapter of this lora_int_id; see `AsyncEngine.remove_lora`."""
        self._check_lora()
        await self._attach()
        async with self._loading:
            known = self.adapters.remove(lora_id)
            if known is None:
                return False
            self._set_adapters()
            self._forget([known])
            return True

    async def list_loras(self) -> set[int]:
        """Return the lora_int_id of each adapter that is known."""
        self._check_lora()
        return {each.lora_int_id for each in self.adapters.requests}

    @property
    def loaded_adapters(self) -> list[LoRARequest]:
        """The adapters that are known, each with the hash of its content."""
        return self.adapters.requests

    def _check_lora(self) -> None:
        if not self.config.enable_lora:
            raise UsageError(NO_LORA)

    async def _known_adapter(self, request: LoRARequest | None) -> LoRARequest | None:
        """Return an adapter with its hash, once all engines have read it."""
        if request is None or not self.config.enable_lora:  # which the engine refuses
            return request
        if isinstance(request, LoRARequest) and request.content_hash is not None:
            return request
        if (known := self.adapters.find(request)) is not None:
            return known
        await self._attach()
        async with self._loading:
            return self.adapters.find(request) or await self._load_adapter(request)

    def share_threads(self, num_engines: int) -> None:
        """Have the engine compute with its share of the CPU threads while so many engines are busy."""
        for engine in self._running():
            engine.share_threads(num_engines)

    async def _pin(self, prompt: ParsedPrompt, adapter: LoRARequest | None, *, is_pinned: bool) -> int:
        namespace = prompt.namespace
        if adapter is not None:
            self._check_lora()
            assert adapter.content_hash is not None, "the engines have read the adapter"
            namespace = namespace_of(adapter.content_hash) + namespace
        connection = self._engines[0].connection
        return await connection.pin(prompt.token_ids, namespace, is_pinned=is_pinned)

    async def keep_pinned(self, folder: str, most_bytes: int) -> int:
        """Write the pinned prefixes of the engine to a folder. Return how many fit; see `PinnedPrefixes`.

        most_bytes: that all files of the folders beside it may take together with them.
        """
        await self._attach()
        return await self._engines[0].connection.keep_pinned(folder, most_bytes)

    async def resize(self, replicas: int) -> None:
        """Add or remove engine processes, while requests run, until there are `replicas`.

        New processes get requests once all of them serve. The processes with the highest numbers are removed
        first. Their requests continue in other processes; with resume=False, or if a request cannot move,
        they finish first. If processes share the cores of a machine, adding processes makes each share
        smaller, and processes with too large a share are replaced one by one. Removing processes leaves the
        shares unchanged.

        Raises ConfigError, without any change, if the machine or the cluster has no room for more;
        EngineDeadError; and the errors of `LLMEngine`.
        """
        check_int(ConfigError, "replicas", replicas, 1, MAX_REPLICAS)
        _check_torchrun(self.config, replicas)
        num_sharing = replicas if self._divides_machine else 1
        _check_share(self.config, num_sharing)
        await self._attach()
        await self._supervisor.resize(replicas, num_sharing)

    @property
    def device(self) -> str:
        """The type of the device that computes, such as "cpu"."""
        return self._engines[0].device

    def describe(self) -> str:
        """Describe the model and its KV cache in one line."""
        num = len(self._engines)
        return self._description if num == 1 else f"{num} engines, each {self._description}"

    def shutdown(self) -> None:
        """Abort all requests and end the processes. Readers get EngineDeadError."""
        self._finalizer()

    async def __aenter__(self) -> Self:
        await self._attach()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._supervisor.aclose()
        self.shutdown()

    def count_together(self, streams: Sequence[RequestStream], *, is_whole: bool) -> None:
        """Limit the memory that the streams of one reader occupy together.

        is_whole: whether the reader sends everything together once all streams are finished.
        """
        account = AnswerAccount(self.budget, is_whole=is_whole)
        for stream in streams:
            stream.account = account

    # How requests reach the processes

    async def _attach(self) -> None:
        """Bind the client to the running event loop. Raises UsageError in another one."""
        await self._supervisor.attach()

    def _next_id(self) -> str:
        return next(i for i in map(str, self._ids) if self._supervisor.unfinished(i) is None)

    def _prepare(self, spec: RequestSpec) -> RequestSpec:
        """Return the request with its prompt parsed. What else takes long, the processes prepare."""
        assert spec.sampling_params is not None
        if isinstance(spec.prompt, ParsedPrompt):
            return spec
        assert not isinstance(spec.prompt, Prepared)
        return replace(spec, prompt=self.prompts.parse(spec.prompt, spec.sampling_params.cache_salt))

    def _choose(self, token_ids: Sequence[int]) -> SupervisedEngine | None:
        """Return the engine for a prompt; None while none can have it. Raises EngineDeadError."""
        self._supervisor.check()
        return self._supervisor.choose(token_ids)

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
        inbox.lora_request = spec.lora_request
        sent_kind = kind if in_full else _sent_kind(params)
        wire = frames.params_to_wire(params, output_kind=sent_kind, timeout_s=spec.timeout_s)
        order = frames.Generate(
            self._supervisor.next_key(),
            request_id,
            parsed.token_ids,
            parsed.namespace,
            wire,
            spec.tenant,
            given,
            is_whole=_comes_whole(sent_kind, kind),
            part_of=spec.part_of,
            images=parsed.images,
            adapter=frames.Adapter.of(spec.lora_request),
        )
        request = SentRequest(self._supervisor, order, inbox, params)
        self._supervisor.begin(request, self._choose(parsed.token_ids))
        return request

    def _begin_report(
        self,
        engine: SupervisedEngine | None,
        request_id: str,
        spec: EmbeddingSpec | ScoreSpec,
        terms: ReportTerms,
    ) -> SentRequest:
        order: frames.Embed | frames.ScoreTokens
        adapter = frames.Adapter.of(terms.lora_request)
        terms = terms._replace(lora_request=None)
        key = self._supervisor.next_key()
        if isinstance(spec, EmbeddingSpec):
            order = frames.Embed(key, request_id, spec, terms, adapter)
        else:
            order = frames.ScoreTokens(key, request_id, spec, terms, adapter)
        inbox = Inbox(request_id, None, spec.prompt.token_ids, RequestOutputKind.FINAL_ONLY)
        request = SentRequest(self._supervisor, order, inbox)
        self._supervisor.begin(request, engine)
        return request

    async def _fork(self, request_id: str, new_request_id: str, params: SamplingParams | None) -> SentRequest:
        self._supervisor.check()
        parent = self._supervisor.unfinished(request_id)
        if parent is None:
            raise RequestError(f"there is no unfinished request {request_id!r} to fork")
        if parent.params is None or not isinstance(parent.order, frames.Generate):
            raise RequestError(f"request {request_id!r} generates nothing, and cannot be forked")
        if params is None:
            own = replace(parent.params, seed=None)
            kind = parent.inbox.kind
        else:
            own = replace(params, priority=params.priority or parent.params.priority)
            kind = params.output_kind
        sent_kind = _sent_kind(own)
        wire = None if params is None else frames.params_to_wire(own, output_kind=sent_kind)
        key = self._supervisor.next_key()
        timeout_s = parent.left_s if own.timeout_s is None or params is None else own.timeout_s
        order = frames.Generate(
            key,
            new_request_id,
            parent.order.token_ids,
            parent.order.namespace,
            frames.params_to_wire(own, output_kind=sent_kind, timeout_s=timeout_s),
            parent.order.tenant,
            [],
            is_whole=_comes_whole(sent_kind, kind),
            images=parent.order.images,
            adapter=parent.order.adapter,
        )
        inbox = Inbox(
            new_request_id,
            parent.inbox.prompt,
            parent.inbox.token_ids,
            kind,
            account=self._new_account(kind),
            in_full=params is None and parent.inbox.in_full,
        )
        inbox.lora_request = parent.inbox.lora_request
        fork = frames.Fork(key, request_id, new_request_id, wire)
        request = SentRequest(self._supervisor, order, inbox, own, fork=fork)
        # Where other stop strings begin to count, the engine process alone knows.
        request.is_bound = parent.is_bound or own.stop != parent.params.stop
        self._supervisor.fork(request, parent)
        return request

    def _new_account(self, kind: RequestOutputKind) -> AnswerAccount:
        return AnswerAccount(self.budget, is_whole=not comes_in_parts(kind))


show_arguments_of(EngineConfig, EngineClient.__init__)


def _terms_of_ranks(config: EngineConfig, terms: RestartTerms, replicas: int) -> RestartTerms:
    """Return the terms for engines of a model over several processes.

    Raises ConfigError for options that contradict each other, RankError for those that contradict torchrun.
    """
    if config.num_ranks == 1:
        return terms
    if config.rank_timeout_s >= terms.step_timeout:
        raise ConfigError(
            f"rank_timeout_s {config.rank_timeout_s:g} must be less than step_timeout "
            f"{terms.step_timeout:g}: a process of the model that hangs is found before the whole engine is "
            "replaced"
        )
    if Torchrun.of(config) is None:
        return terms
    _check_torchrun(config, replicas)
    return replace(terms, max_restarts=0)  # torchrun starts all anew


def _check_torchrun(config: EngineConfig, replicas: int) -> None:
    """Raise ConfigError for several engines of torchrun's processes."""
    if replicas > 1 and Torchrun.of(config) is not None:
        raise ConfigError(f"torchrun starts the processes of one engine, got replicas {replicas}")


def _check_share(config: EngineConfig, replicas: int) -> None:
    """Raise ConfigError if a machine cannot be divided among so many engines."""
    # With device "auto" each process finds out, as does one on another system than Linux.
    is_shared = replicas > 1 and config.device == "cpu" and sys.platform == "linux"
    num_processes = replicas * config.num_ranks
    if is_shared and num_processes > (cores := len(os.sched_getaffinity(0))):
        raise ResourceError(f"{replicas} replicas need {num_processes} CPU cores; there are {cores}")
    if replicas > 1 and ":" in config.device:
        raise ConfigError(f"{replicas} replicas have a GPU each; give device 'cuda', got {config.device!r}")


def sendable_options(config: EngineConfig, options: dict[str, Any]) -> dict[str, Any]:
    """Return options of an engine as values that can be sent. Raises ConfigError for others."""
    if not isinstance(config.scheduling_policy, str):
        policy = shown(config.scheduling_policy)
        raise ConfigError(f"scheduling_policy of an engine in another process must be a name, got {policy}")
    sent = dict(options)
    if "dtype" in sent:
        sent["dtype"] = config.dtype  # the name of torch's
    speculation = config.speculation
    if speculation is not None:
        sent["speculative_config"] = asdict(speculation)
    return sent


def _sent_kind(params: SamplingParams) -> RequestOutputKind:
    """Return the kind of outputs of an engine process, which sends only what is new.

    What has come is what another process would go on from. The best of several samples are known at the end.
    """
    if params.output_kind is RequestOutputKind.CUMULATIVE or params.best_of is None:
        return RequestOutputKind.DELTA
    return params.output_kind


def _comes_whole(sent_kind: RequestOutputKind, kind: RequestOutputKind) -> bool:
    """Return whether new tokens come for the case alone that their process ends."""
    return sent_kind is RequestOutputKind.DELTA and not comes_in_parts(kind)
