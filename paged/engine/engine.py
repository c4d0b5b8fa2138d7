"""LLMEngine: prompts in, tokens out."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..config import EngineConfig
from ..errors import RequestError, UsageError
from ..model.hf_config import read_config, read_eos_token_ids
from ..model.weights import resolve
from ..requests.request import Prompt, RequestOutput
from ..runner.model_runner import ModelRunner
from ..runner.warm_up import warm_up
from ..sampling_params import SamplingParams
from ..scheduler.stats import EngineStats
from ..text.chat_template import ChatTemplates, Message, conversations_of
from ..text.tokenizer import Tokenizer
from . import pinning, prefix_store
from .beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
from .core import EngineCore
from .embedding import (
    EmbeddingRequestOutput,
    Pooling,
    check_pooling,
    embedding_output,
    embedding_reports,
)
from .generation import Rows, as_list, as_they_come, in_order, named, run_reports
from .request_factory import RequestFactory
from .scoring import ScoreOutput, score_output, score_reports

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
        started = time.perf_counter()
        self.num_kernels = warm_up(runner)
        if self.num_kernels:
            logger.info("%d kernels in %.1f s", self.num_kernels, time.perf_counter() - started)
        sizes, cache = runner.sizes, runner.kv_cache
        self.max_model_len = sizes.max_model_len
        self.block_manager = sizes.new_block_manager(cache.num_blocks, cache.num_host_blocks)
        self.scheduler = sizes.new_scheduler(self.block_manager)
        factory = RequestFactory(
            self.model_config,
            self.block_manager,
            self.tokenizer,
            eos_token_ids=self.eos_token_ids,
            max_model_len=self.max_model_len,
            max_num_seqs=config.max_num_seqs,
            scheduling_policy=config.scheduling_policy,
            seed=config.seed,
        )
        self.core = EngineCore(runner, self.scheduler, factory, self.tokenizer)
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
        return [*in_order(self.core, rows, use_tqdm=use_tqdm)]

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
        yield from in_order(self.core, rows, use_tqdm=use_tqdm)

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
        yield from as_they_come(self.core, rows)

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
        parsed = [
            named(f"prompts[{i}]", self.core.factory.prompts.parse, p) for i, p in enumerate(as_list(prompts))
        ]
        requests = run_reports(
            self.core, "prompts", embedding_reports(parsed, pooling), priority, tenant, use_tqdm=use_tqdm
        )
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
        wanted = score_reports(*self.core.factory.prompts.parse_continued(prompt, continuations))
        requests = run_reports(self.core, "continuations", wanted, priority, tenant, use_tqdm=use_tqdm)
        return [score_output(request) for request in requests]

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
        listed, search = as_list(prompts), BeamSearch(self.core.factory, self.scheduler, params)
        for i, prompt in enumerate(listed):
            named(f"prompts[{i}]", search.add, self.core.next_id(), prompt, priority, tenant)
        try:
            with tqdm(total=len(listed), desc="Searching", unit="prompt", disable=not use_tqdm) as bar:
                for _ in search.run(self.core.advance_others):
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

    @cached_property
    def chat_templates(self) -> ChatTemplates:
        """What renders conversations. Raises RequestError without a tokenizer, whose templates they are."""
        if self.tokenizer is None:
            raise RequestError("a chat needs the tokenizer, which skip_tokenizer_init=True left out")
        return ChatTemplates(self.tokenizer.chat_templates, self.tokenizer.special_tokens)

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
        self.core.queue(request_id, prompt, params, priority, tenant, timeout_s)

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
        return self.core.fork(request_id, new_request_id, sampling_params)

    def abort_request(self, request_id: str) -> None:
        """End a request and free its blocks; nothing if there is no unfinished one of this id."""
        self.core.abort(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do or to deliver."""
        return self.core.has_unfinished()

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns an output for every request that got a token, and for who finished.

        What it holds is a matter of output_kind. Requests of `generate_iter` and `stream` take part; their
        outputs come there.
        """
        core = self.core
        advanced = core.advance()
        core.publish(group for group in core.groups_of(advanced) if group.outbox is core.outbox)
        return core.outbox.take()

    # Prefixes

    def pin_prefix(self, prompt: Prompt) -> int:
        """Keep the KV of a prompt's full blocks resident, computing it where needed.

        Until `unpin_prefix`, `reset_prefix_cache`, or a step that raises: nobody knows what that one wrote.
        Returns how many tokens that are. Raises RequestError if they fill no block, or do not stay cached or
        fit beside the requests there are.
        """
        self._require_prefix_cache()
        return pinning.pin(self.core, prompt)

    def unpin_prefix(self, prompt: Prompt) -> None:
        """Let go of a pinned prompt. It stays cached until its blocks are needed.

        Raises UsageError if it is not pinned.
        """
        pinning.unpin(self.core, prompt)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, pinned ones too. Requests that run keep their blocks."""
        self.block_manager.reset_prefix_cache()

    def save_prefix(self, path: str | Path, prompt: Prompt | None = None) -> int:
        """Write the cached blocks, or those of one prompt, to a safetensors file. Returns how many.

        Raises RequestError if there are none, or the file cannot be written.
        """
        self._require_prefix_cache()
        parsed = None if prompt is None else self.core.factory.prompts.parse(prompt)
        return prefix_store.save(path, self.block_manager, self.runner.kv_cache, self.fingerprint, parsed)

    def load_prefix(self, path: str | Path) -> int:
        """Put blocks that `save_prefix` wrote into the cache, as far as free ones go. Returns how many.

        Raises CheckpointError if the file is damaged, or from another model, dtype or block size.
        """
        self._require_prefix_cache()
        return prefix_store.load(path, self.block_manager, self.runner.kv_cache, self.fingerprint)

    @cached_property
    def fingerprint(self) -> str:
        """What the KV of a token depends on beside the prompt: the model with its weights, and the dtypes."""
        return prefix_store.fingerprint(
            self.directory,
            self.model_config,
            self.runner.dtype,
            self.config.quantization,
            self.runner.kv_dtype,
        )

    def _require_prefix_cache(self) -> None:
        if not self.config.enable_prefix_caching:
            raise UsageError("there is no prefix cache: the engine was made with enable_prefix_caching=False")
