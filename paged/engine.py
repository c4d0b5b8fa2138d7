"""LLMEngine: prompts in, tokens out."""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike, fsencode
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from . import prefix_store
from .beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
from .chat_template import ChatTemplates, Message, conversations_of
from .config import EngineConfig
from .embedding import (
    EmbeddingRequestOutput,
    Pooling,
    check_pooling,
    embedding_output,
    embedding_reports,
)
from .errors import RequestError, UnknownArgumentError, UsageError
from .generation import Rows, as_iterable, as_they_come, in_order, run_to_end
from .model_runner import ModelRunner
from .outputs import OutputProcessor
from .request import Outbox, Prompt, PromptReport, Request, RequestGroup, RequestOutput, RequestStatus
from .request_factory import ParsedPrompt, Prepared, RequestFactory
from .sampling_params import SamplingParams
from .scoring import ScoreOutput, score_output, score_reports
from .stats import EngineStats
from .tokenizer import Tokenizer
from .weights import read_config, read_eos_token_ids, resolve

T = TypeVar("T")
logger = logging.getLogger(__name__)


class LLMEngine:
    """Serves one model. See `EngineConfig` for the options.

    >>> engine = LLMEngine("demo")
    >>> outputs = engine.generate(["def add(a, b):"], SamplingParams(temperature=0, max_tokens=16))
    >>> print(outputs[0].outputs[0].text)

    Raises ConfigError, CheckpointError or UnsupportedModelError. Not thread-safe.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.config = config = EngineConfig.from_kwargs(model=model, **options)
        self.directory = directory = resolve(config.model)
        self.model_config = read_config(directory)
        self.runner = runner = ModelRunner(config, self.model_config, directory)
        self.tokenizer: Tokenizer | None = None
        if not config.skip_tokenizer_init:
            self.tokenizer = Tokenizer(resolve(config.tokenizer) if config.tokenizer else directory)
        # Ids outside the vocabulary, such as the -1 of models that have no EOS, are never sampled.
        vocabulary = range(self.model_config.vocab_size)
        self.eos_token_ids = frozenset(i for i in read_eos_token_ids(directory) if i in vocabulary)
        self._chat_templates: ChatTemplates | None = None
        started = time.perf_counter()
        self.num_kernels = runner.warm_up()
        if self.num_kernels:
            logger.info("%d kernels in %.1f s", self.num_kernels, time.perf_counter() - started)
        sizes, cache = runner.sizes, runner.kv_cache
        self.max_model_len = sizes.max_model_len
        self.block_manager = sizes.new_block_manager(cache.num_blocks, cache.num_host_blocks)
        self.scheduler = sizes.new_scheduler(self.block_manager)
        self._factory = RequestFactory(
            self.model_config,
            self.block_manager,
            self.tokenizer,
            eos_token_ids=self.eos_token_ids,
            max_model_len=self.max_model_len,
            max_num_seqs=config.max_num_seqs,
            seed=config.seed,
        )
        self._groups: dict[str, RequestGroup] = {}  # unfinished
        self._with_stops: set[RequestGroup] = set()  # of them, those with stop strings
        self._outputs = OutputProcessor(self.tokenizer)
        self._finished: dict[RequestGroup, None] = {}  # of the unfinished, those whose last output is due
        self._outbox = Outbox()  # of those that are nobody's but who calls step()
        self._ids = itertools.count()
        self._fingerprint: str | None = None
        logger.info(self.describe())

    def describe(self) -> str:
        """The model and its KV cache in one line."""
        runner = self.runner
        return f"{self.model_config.architecture} in {runner.describe()}; {runner.kv_cache.describe()}"

    def stats(self) -> EngineStats:
        """Requests, blocks and tokens now, and what happened so far."""
        return EngineStats.of(self.scheduler)

    # Requests

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        priority: float | Iterable[float] | None = None,
        tenant: str | Iterable[str] = "",
        timeout_s: float | Iterable[float] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete all prompts. Returns their outputs in the order of the prompts.

        prompts: one, or any iterable of them; each is text, token ids, or a dict with "prompt" or
            "prompt_token_ids" and perhaps "cache_salt": only prompts of the same salt share cached blocks.
        sampling_params: one for all, one per prompt, or None for the defaults.
        priority, timeout_s: in the place of those in sampling_params; one for all, or one per prompt.
        tenant: see `add_request`; one for all, or one per prompt.

        Raises RequestError if one of the prompts or parameters is wrong, before anything runs if it is among
        the first `generation.WINDOW`.
        """
        rows = Rows(prompts, sampling_params, priority=priority, tenant=tenant, timeout_s=timeout_s)
        return [*in_order(self, rows, use_tqdm=use_tqdm)]

    def generate_iter(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        priority: float | Iterable[float] | None = None,
        tenant: str | Iterable[str] = "",
        timeout_s: float | Iterable[float] | None = None,
        use_tqdm: bool = False,
    ) -> Iterator[RequestOutput]:
        """As `generate`, one output after the other, for more prompts than memory holds.

        Prompts, and what is given one per prompt, are read a bounded number ahead of what was yielded. One
        that is wrong, or a column of another length, raises when those before it have been yielded. timeout_s
        counts from when the prompt was read. Closing or dropping the iterator aborts what it left.
        """
        rows = Rows(prompts, sampling_params, priority=priority, tenant=tenant, timeout_s=timeout_s)
        yield from in_order(self, rows, use_tqdm=use_tqdm)

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        priority: float | Iterable[float] | None = None,
        tenant: str | Iterable[str] = "",
        timeout_s: float | Iterable[float] | None = None,
    ) -> Iterator[RequestOutput]:
        """The outputs of all prompts as they come: after each step, one for each that got a token.

        They hold what output_kind says: everything so far, what is new, or nothing before the end. request_id
        tells them apart: ids rise in the order of the prompts. Otherwise as `generate_iter`.
        """
        rows = Rows(prompts, sampling_params, priority=priority, tenant=tenant, timeout_s=timeout_s)
        yield from as_they_come(self, rows)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        priority: float = 0.0,
        tenant: str = "",
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Embed all prompts: `outputs.embedding` of each is hidden_size floats. Nothing is generated.

        pooling: "last" takes the final hidden state of the last token, "mean" the mean over all tokens. These
            are behind the model's last norm, as last_hidden_state of transformers.
        normalize: scale each embedding to a Euclidean norm of 1.

        Raises RequestError, before anything runs, if one of these is wrong or there is no prompt.
        """
        check_pooling(pooling, normalize)
        parsed = [_named(f"prompts[{i}]", self._factory.parse, p) for i, p in enumerate(_listed(prompts))]
        requests = self._report("prompts", embedding_reports(parsed, pooling), priority, tenant, use_tqdm)
        return [embedding_output(request, normalize=normalize) for request in requests]

    def score(
        self,
        prompt: Prompt,
        continuations: Sequence[str | Sequence[int]],
        *,
        priority: float = 0.0,
        tenant: str = "",
        use_tqdm: bool = True,
    ) -> list[ScoreOutput]:
        """The log-probability of each continuation behind a prompt, whose KV they share in the prefix cache.

        continuations: text or token ids. Prompt and text are made tokens apart from each other, the text
            without special tokens: a space between the two belongs to one of them.

        Raises RequestError, before anything runs, if one of these is wrong or empty.
        """
        wanted = score_reports(*self._factory.parse_continued(prompt, continuations))
        return [*map(score_output, self._report("continuations", wanted, priority, tenant, use_tqdm))]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        priority: float = 0.0,
        tenant: str = "",
        use_tqdm: bool = True,
    ) -> list[BeamSearchOutput]:
        """The continuations of each prompt that are most likely as a whole; see `beam_search`.

        Raises RequestError, before anything runs, if one of these is wrong or there is no prompt.
        """
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params must be BeamSearchParams, got {params!r}")
        listed, search = _listed(prompts), BeamSearch(self._factory, self.scheduler, params)
        for i, prompt in enumerate(listed):
            _named(f"prompts[{i}]", search.add, self._next_id(), prompt, priority, tenant)
        try:
            with tqdm(total=len(listed), desc="Searching", unit="prompt", disable=not use_tqdm) as bar:
                for _ in search.run(self._advance_others):
                    bar.update()
        finally:
            search.abort()
        return [group.output(self.tokenizer) for group in search.groups]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **terms: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of them, as the checkpoint's chat template writes it.

        messages: dicts with "role" and "content", which is text or a list of {"type": "text", "text": ...};
            "tool_calls" and what else the template knows may be there too.
        tools: JSON schemas of functions that the model may ask for.
        add_generation_prompt: end with the beginning of an answer.
        continue_final_message: let the model go on with the last message, in the place of an answer.
        chat_template: a Jinja template in place of the checkpoint's, the name of one of several, or "plain".
        chat_template_kwargs: more variables for the template.
        terms: priority, tenant, timeout_s and use_tqdm, see `generate`.

        Raises RequestError, before anything runs, if something is wrong or the template refuses it.
        """
        prompts = []
        for i, conversation in enumerate(conversations_of(messages)):
            try:
                text = self.chat_templates.render(
                    conversation,
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    chat_template=chat_template,
                    chat_template_kwargs=chat_template_kwargs,
                )
            except RequestError as error:
                raise RequestError(f"conversation {i}: {error}") from error
            prompts.append({"prompt": text, "add_special_tokens": False})
        return self.generate(prompts, sampling_params, **terms)

    @property
    def chat_templates(self) -> ChatTemplates:
        """What renders conversations. Raises RequestError without a tokenizer, whose templates they are."""
        if self.tokenizer is None:
            raise RequestError("a chat needs the tokenizer, which skip_tokenizer_init=True left out")
        if self._chat_templates is None:
            self._chat_templates = ChatTemplates(self.tokenizer.chat_templates, self.tokenizer.special_tokens)
        return self._chat_templates

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: float | None = None,
        tenant: str = "",
        timeout_s: float | None = None,
    ) -> None:
        """Queue one prompt, to be advanced by `step`.

        priority, timeout_s: in the place of those in sampling_params.
        tenant: on whose account, for scheduling_policy "fair".

        What is wrong is said here, so all is checked, tokenised and compiled before it returns. A grammar of
        structured_outputs takes COMPILE_TIMEOUT_S (10 s) at most, and mostly milliseconds; one that was used
        lately takes none. Nobody steps meanwhile: `AsyncLLMEngine` does all this beside its steps.

        Raises RequestError if one of these is wrong or the id is in use, QueueFullError if max_waiting
        requests wait already.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        self._queue(request_id, prompt, params, priority, tenant, timeout_s)

    def fork(
        self,
        request_id: str,
        new_request_id: str | None = None,
        sampling_params: SamplingParams | None = None,
    ) -> str:
        """Let an unfinished request go on twice from where it is, sharing its blocks so far.

        Without sampling_params the fork has those of the request, and a seed of its own. Returns its id.

        timeout_s of sampling_params counts from now; without one the fork ends when the request has to. A
        grammar that is not the request's is compiled here, as in `add_request`.

        Raises RequestError if there is no such request, it has several samples, or the new id is in use.
        """
        group = self._unfinished(request_id)
        if group is None or group.finished:
            raise RequestError(f"there is no unfinished request {request_id!r} to fork")
        if len(group.samples) > 1:
            raise RequestError(
                f"request {request_id!r} has {len(group.samples)} samples; only one can be forked"
            )
        new_request_id = self._next_id() if new_request_id is None else new_request_id
        self._check_id(new_request_id)
        now = self.scheduler.clock()
        child = self._factory.new_fork(new_request_id, group.samples[0], sampling_params, now)
        self.scheduler.fork(group.samples[0], child.samples[0])
        child.outbox = self._outbox
        self._book(child)
        return new_request_id

    def abort_request(self, request_id: str) -> None:
        """End a request and free its blocks; nothing if there is no unfinished one of this id."""
        group = self._unfinished(request_id)
        if group is None:
            return
        now = self.scheduler.clock()
        for sample in group.samples:
            if sample.status is RequestStatus.FINISHED:
                continue
            if sample.arrival >= 0:
                self.scheduler.abort(sample)
            elif sample is group.samples[0]:
                # The scheduler has not got it yet. Samples that wait for their prompt end with the first.
                for waiting in group.samples:
                    waiting.finish("abort", now)
        if group.outbox is not self._outbox:  # who iterates waits for the end, who aborts knows of it
            group.outbox.put(self._outputs.output(group))
        self._forget(group)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do or to deliver."""
        return bool(self._outbox or self._finished or self.scheduler.has_unfinished())

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns an output for every request that got a token, and for who finished.

        What it holds is a matter of output_kind. Requests of `generate_iter` and `stream` take part; their
        outputs come there.
        """
        advanced = self._advance()
        self._publish(group for group in self._groups_of(advanced) if group.outbox is self._outbox)
        return self._outbox.take()

    # Prefixes

    def pin_prefix(self, prompt: Prompt) -> int:
        """Keep the KV of a prompt's full blocks resident, computing it where needed.

        Until `unpin_prefix`, `reset_prefix_cache`, or a step that raises: nobody knows what that one wrote.
        Returns how many tokens that are. Raises RequestError if they fill no block, or do not stay cached or
        fit beside the requests there are.
        """
        self._require_prefix_cache()
        parsed = self._factory.parse(prompt)
        name, size = self._pin_name(prompt), self.config.block_size
        num_full = len(parsed.token_ids) // size * size
        if not num_full:
            raise RequestError(f"the prompt has {len(parsed.token_ids)} tokens and fills no block of {size}")
        if self.block_manager.is_pinned(name):
            raise UsageError("this prompt is pinned already")
        self.generate([prompt], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
        num_cached = len(self.block_manager.find(parsed.token_ids, parsed.namespace)[0]) * size
        if num_cached < num_full:
            raise RequestError(f"of {num_full} tokens only {num_cached} stay cached; raise num_blocks")
        if not self.scheduler.pin(name, parsed.token_ids, parsed.namespace):
            raise RequestError(
                f"{num_full} tokens cannot be pinned: the unfinished requests would not fit beside them; "
                "wait for these, or raise num_blocks"
            )
        return num_full

    def unpin_prefix(self, prompt: Prompt) -> None:
        """Let go of a pinned prompt. It stays cached until its blocks are needed.

        Raises UsageError if it is not pinned.
        """
        name = self._pin_name(prompt)
        if not self.block_manager.is_pinned(name):
            raise UsageError(f"this prompt is not pinned; {len(self.block_manager.pins)} others are")
        self.block_manager.unpin(name)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, pinned ones too. Requests that run keep their blocks."""
        self.block_manager.reset_prefix_cache()

    def save_prefix(self, path: str | Path, prompt: Prompt | None = None) -> int:
        """Write the cached blocks, or those of one prompt, to a safetensors file. Returns how many.

        Raises RequestError if there are none, or the file cannot be written.
        """
        self._require_prefix_cache()
        parsed = None if prompt is None else self._factory.parse(prompt)
        return prefix_store.save(
            _path(path), self.block_manager, self.runner.kv_cache, self.fingerprint, parsed
        )

    def load_prefix(self, path: str | Path) -> int:
        """Put blocks that `save_prefix` wrote into the cache, as far as free ones go. Returns how many.

        Raises CheckpointError if the file is damaged, or from another model, dtype or block size.
        """
        self._require_prefix_cache()
        return prefix_store.load(_path(path), self.block_manager, self.runner.kv_cache, self.fingerprint)

    @property
    def fingerprint(self) -> str:
        """What the KV of a token depends on beside the prompt: the model with its weights, and the dtype."""
        if self._fingerprint is None:
            self._fingerprint = prefix_store.fingerprint(self.directory, self.model_config, self.runner.dtype)
        return self._fingerprint

    def _require_prefix_cache(self) -> None:
        if not self.config.enable_prefix_caching:
            raise UsageError("there is no prefix cache: the engine was made with enable_prefix_caching=False")

    def _pin_name(self, prompt: Prompt) -> str:
        parsed = self._factory.parse(prompt)
        return hashlib.sha256(repr((parsed.namespace, parsed.token_ids)).encode()).hexdigest()

    # How it works: what `generation` and the async engine are made of

    def _report(
        self,
        name: str,
        wanted: Sequence[tuple[ParsedPrompt, PromptReport]],
        priority: float,
        tenant: str,
        use_tqdm: bool,
    ) -> list[Request]:
        """Compute prompts only for what is to be reported of them."""
        groups, outbox = list[RequestGroup](), Outbox()
        try:
            for i, terms in enumerate(wanted):
                now, new = self.scheduler.clock(), self._factory.new_report
                group = _named(f"{name}[{i}]", new, self._next_id(), *terms, priority, tenant, now)
                group.outbox = outbox
                self._book(group)
                groups.append(group)
            run_to_end(self, groups, outbox, use_tqdm=use_tqdm)
        finally:
            for group in groups:
                self.abort_request(group.request_id)
        return [group.samples[0] for group in groups]

    def _advance_others(self) -> None:
        """Run a step for requests that nobody is told of; the others' outputs go where they belong."""
        self._advance()
        self._publish(())

    def _advance(self) -> list[Request]:
        """Run one step, whose outputs are then to be published. Returns who got a token, or an error."""
        scheduler, advanced = self.scheduler, list[Request]()
        try:
            ended = scheduler.expire()
            schedule = scheduler.schedule()
            if not schedule.is_empty:
                step = self.runner.execute(schedule)
                num_finished = scheduler.counters.num_finished
                step.book_reports()  # both by position: what is computed again is not booked again
                step.book_logprobs(schedule)
                advanced = scheduler.update(schedule, step.tokens, step.errors)
                num_stopped = self._end_at_stop_strings(advanced) if self._with_stops else 0
                # Most steps finish nobody, and need not be looked through.
                if num_stopped or scheduler.counters.num_finished > num_finished:
                    ended += [request for request in advanced if request.finish_reason is not None]
            if ended:
                scheduler.release_finished()
                self._note_finished(self._groups_of(ended))
        except BaseException:
            self._recover()
            raise
        return advanced

    def _recover(self) -> None:
        """After a step that failed: whoever it ended stays ended, everybody else is computed again."""
        # The step may have got as far as their tokens, which are not taken back.
        unsure = [sample for group in self._with_stops for sample in group.samples]
        self._end_at_stop_strings([s for s in unsure if not isinstance(s.stop_reason, str)])
        self.scheduler.release_finished()
        self.scheduler.cancel()
        self._note_finished(self._groups.values())

    def _end_at_stop_strings(self, advanced: list[Request]) -> int:
        """Finish those whose newest token completes a stop string. Returns how many finished."""
        for request in advanced:
            if request.params.stop:
                self._outputs.end_at_stop_string(request, self.scheduler.clock())
        return sum(request.finish_reason is not None for request in advanced)

    def _groups_of(self, requests: list[Request]) -> Iterator[RequestGroup]:
        return (self._groups[r.request_id] for r in requests if r.request_id in self._groups)

    def _note_finished(self, groups: Iterable[RequestGroup]) -> None:
        self._finished |= dict.fromkeys(group for group in groups if group.finished)

    def _publish(self, groups: Iterable[RequestGroup]) -> None:
        """Put the outputs of who finished, and of these groups where they are wanted, where they belong."""
        finished = [*self._finished]
        for group in dict.fromkeys([*groups, *finished]):
            if group in self._finished or group.outbox.wants(group.output_kind):
                group.outbox.put(self._outputs.output(group))
        for group in finished:
            self._forget(group)

    def _next_id(self) -> str:
        return next(i for i in map(str, self._ids) if i not in self._groups)

    def _unfinished(self, request_id: str) -> RequestGroup | None:
        # What cannot be an id may not even have a hash.
        return self._groups.get(request_id) if isinstance(request_id, str) else None

    def _check_id(self, request_id: str) -> None:
        if not isinstance(request_id, str):
            raise RequestError(f"request_id must be a string, got {request_id!r}")
        if request_id in self._groups:
            raise RequestError(f"request id {request_id!r} is in use by an unfinished request")

    def _queue(self, *terms: Any, outbox: Outbox | None = None) -> None:
        """Make a request of `_new_group`'s terms, and give it to the scheduler."""
        group = self._new_group(*terms, outbox=outbox)
        try:
            self.scheduler.add(group.samples[0])
        except RequestError:
            self._forget(group)
            raise

    def _new_group(
        self,
        request_id: str,
        prompt: Prompt | Prepared,
        params: SamplingParams,
        priority: float | None,
        tenant: str,
        timeout_s: float | None,
        *,
        outbox: Outbox | None = None,
    ) -> RequestGroup:
        """A request that the scheduler has not got yet.

        Raises RequestError if anything is wrong.
        """
        self._check_id(request_id)
        given: dict[str, Any] = {"priority": priority, "timeout_s": timeout_s}
        given = {name: value for name, value in given.items() if value is not None}
        if given and isinstance(params, SamplingParams):
            params = replace(params, **given)
        group = self._factory.new_group(request_id, prompt, params, tenant, self.scheduler.clock())
        group.outbox = self._outbox if outbox is None else outbox
        self._book(group)
        return group

    def _forget(self, group: RequestGroup) -> None:
        del self._groups[group.request_id]
        self._finished.pop(group, None)
        self._with_stops.discard(group)
        self._outputs.forget(group)

    def _book(self, group: RequestGroup) -> None:
        self._groups[group.request_id] = group
        if group.samples[0].params.stop:
            self._with_stops.add(group)


def _listed(prompts: Any) -> list[Prompt]:
    listed = [*as_iterable(prompts)]
    if not listed:
        raise RequestError("prompts must have at least one entry, got []")
    return listed


def _path(path: Any) -> Path:
    if not isinstance(path, str | PathLike):
        raise RequestError(f"path must be a string or a Path, got {path!r}")
    try:
        fsencode(path)
    except UnicodeEncodeError as error:
        raise RequestError(f"path cannot be the name of a file: {path!r}") from error
    return Path(path)


def _named(name: str, function: Callable[..., T], *args: Any) -> T:
    """The function of these arguments; what it refuses is refused under a name."""
    try:
        return function(*args)
    except (RequestError, UnknownArgumentError) as error:
        raise type(error)(f"{name}: {error}") from error
