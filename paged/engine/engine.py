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
from . import prefixes
from .beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
from .core import EngineCore
from .embedding import EmbeddingRequestOutput, Pooling, check_pooling, embedding_output, embedding_reports
from .generation import (
    RequestSource,
    as_list,
    call_with_error_prefix,
    generate_in_order,
    generate_stream,
    run_reports,
)
from .request_factory import RequestFactory, RequestSpec
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
        """Return a line about the model and its KV cache."""
        runner = self.runner
        return f"{self.model_config.architecture} in {runner.describe()}; {runner.kv_cache.describe()}"

    def stats(self) -> EngineStats:
        """Return current counts of requests, blocks and tokens, and totals so far."""
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
        """Complete all prompts. Return their outputs in the order of the prompts.

        prompts: one or an iterable of them. Each is text, a list of token ids, or a dict with "prompt" or
            "prompt_token_ids" and optionally "cache_salt": only prompts of the same salt share cached blocks.
        sampling_params: one for all, one per prompt, or None for the defaults.
        priority, timeout_s: replace those of sampling_params; one for all or one per prompt.
        tenant: see `add_request`; one for all or one per prompt.

        Raises RequestError if a prompt or parameter is wrong: before anything runs if it is among the first
        `generation.WINDOW` prompts, otherwise once the prompts before it are done.
        """
        source = RequestSource(prompts, sampling_params, priority, tenant, timeout_s)
        return [*generate_in_order(self.core, source, use_tqdm=use_tqdm)]

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
        """Yield the outputs of `generate` one by one, for more prompts than memory holds.

        Prompts and parameters are read a bounded number ahead of the yielded outputs. A wrong prompt raises
        RequestError when the outputs before it have been yielded, and so does an iterable of parameters that
        is longer or shorter than the prompts. timeout_s counts from when its prompt is read. Closing or
        collecting the iterator aborts the unfinished requests.
        """
        source = RequestSource(prompts, sampling_params, priority, tenant, timeout_s)
        yield from generate_in_order(self.core, source, use_tqdm=use_tqdm)

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        priority: float | Iterable[float] | None = None,
        tenant: str | Iterable[str] = "",
        timeout_s: float | Iterable[float] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield, after each step, an output of each request that got a token.

        What an output holds is set by output_kind: all text so far, the new text, or all text at the end
        only. request_id tells requests apart: ids rise in the order of the prompts. Otherwise as
        `generate_iter`.
        """
        source = RequestSource(prompts, sampling_params, priority, tenant, timeout_s)
        yield from generate_stream(self.core, source)

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
        """Embed all prompts: `outputs.embedding` of each is a list of hidden_size floats.

        pooling: "last" takes the final hidden state of the last token, "mean" the mean over all tokens. Final
            hidden states are the model's after its last norm, as transformers' last_hidden_state.
        normalize: scale each embedding to a Euclidean norm of 1.

        Raises RequestError, before anything runs, if an argument is wrong or there is no prompt.
        """
        check_pooling(pooling, normalize)
        parsed = [
            call_with_error_prefix(f"prompts[{i}]", self.core.factory.prompts.parse, prompt)
            for i, prompt in enumerate(as_list(prompts))
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
        """Return the log-probability of each continuation of a prompt, whose KV is shared by prefix caching.

        continuations: text or token ids. Prompt and continuation are tokenized separately, the latter without
            special tokens, so a space between the two must be part of one of them.

        Raises RequestError, before anything runs, if an argument is wrong or empty.
        """
        reports = score_reports(*self.core.factory.prompts.parse_continued(prompt, continuations))
        requests = run_reports(self.core, "continuations", reports, priority, tenant, use_tqdm=use_tqdm)
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
        """Return the likeliest continuations of each prompt that a beam search finds; see `BeamSearchParams`.

        Raises RequestError, before anything runs, if an argument is wrong or there is no prompt.
        """
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params must be BeamSearchParams, got {params!r}")
        listed, search = as_list(prompts), BeamSearch(self.core.factory, self.scheduler, params)
        for i, prompt in enumerate(listed):
            terms = (self.core.next_id(), prompt, priority, tenant)
            call_with_error_prefix(f"prompts[{i}]", search.add, *terms)
        try:
            with tqdm(total=len(listed), desc="Searching", unit="prompt", disable=not use_tqdm) as bar:
                for _ in search.run(self.core.step):
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
        priority: float | Sequence[float] | None = None,
        tenant: str | Sequence[str] = "",
        timeout_s: float | Sequence[float] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or each of a list, rendered by the checkpoint's chat template.

        messages: dicts with "role" and "content", which is text or a list of {"type": "text", "text": ...};
            "tool_calls" and other keys that the template knows are passed to it.
        tools: JSON schemas of functions that the model may call.
        add_generation_prompt: end the prompt with the header of an answer.
        continue_final_message: let the model continue the last message instead of answering it.
        chat_template: a Jinja template to use instead of the checkpoint's, the name of one of several that
            the checkpoint has, or "plain".
        chat_template_kwargs: more variables for the template.
        priority, tenant, timeout_s, use_tqdm: see `generate`.

        Raises RequestError, before anything runs, if an argument is wrong or the template refuses it.
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
        source = RequestSource(prompts, sampling_params, priority, tenant, timeout_s)
        return [*generate_in_order(self.core, source, use_tqdm=use_tqdm)]

    @cached_property
    def chat_templates(self) -> ChatTemplates:
        """The chat templates of the tokenizer. Raises RequestError if the engine has none."""
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

        priority, timeout_s: replace those of sampling_params. timeout_s is in seconds from now.
        tenant: the account that is charged, for scheduling_policy "fair".

        All validation happens here, so the prompt is tokenized and a grammar compiled before this returns. A
        grammar usually takes milliseconds, at most COMPILE_TIMEOUT_S (10 s), and none if it was used lately.
        No step runs meanwhile; in `AsyncLLMEngine` steps go on.

        Raises RequestError if an argument is wrong or the id is in use, QueueFullError if max_waiting
        requests wait already.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        self.core.add(request_id, RequestSpec(prompt, params, priority, tenant, timeout_s))

    def fork(
        self,
        request_id: str,
        new_request_id: str | None = None,
        sampling_params: SamplingParams | None = None,
    ) -> str:
        """Duplicate an unfinished request: both continue from where it is and share its blocks so far.

        new_request_id: by default the next number. Return it.
        sampling_params: by default the request's, with a seed of the fork's own. timeout_s counts from now;
            without one the fork has the request's deadline. Another grammar than the request's is compiled
            here, as in `add_request`.

        Raises RequestError if there is no such request, it has several samples, the new id is in use, or a
        parameter is wrong.
        """
        return self.core.fork(request_id, new_request_id, sampling_params)

    def abort_request(self, request_id: str) -> None:
        """End a request and free its blocks. Do nothing if no unfinished request has this id."""
        self.core.abort(request_id)

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has anything to compute or to return."""
        return self.core.has_unfinished()

    def step(self) -> list[RequestOutput]:
        """Run one step. Return an output of each request that got a token or finished.

        What an output holds is set by output_kind. Requests of `generate_iter` and `stream` advance too, but
        their outputs go to those iterators.

        If the step raises, no request is lost: the next call computes again what was not finished. Cached and
        pinned prefixes are forgotten.
        """
        self.core.step(self.core.outbox)
        return self.core.outbox.take()

    # Prefixes

    def pin_prefix(self, prompt: Prompt) -> int:
        """Compute the KV of a prompt's full blocks where needed, and keep it cached. Return how many tokens.

        Pinned until `unpin_prefix`, `reset_prefix_cache`, or a step that raises, after which the contents of
        blocks are unknown.

        Raises RequestError if the prompt fills no block, its blocks do not stay cached, or they do not fit
        beside the unfinished requests; UsageError if it is pinned already or there is no prefix cache.
        """
        self._require_prefix_cache()
        return prefixes.pin(self.core, prompt)

    def unpin_prefix(self, prompt: Prompt) -> None:
        """Let the blocks of a pinned prompt be evicted. Raises UsageError if it is not pinned."""
        prefixes.unpin(self.core, prompt)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, also pinned ones. Running requests keep their blocks."""
        self.block_manager.reset_prefix_cache()

    def save_prefix(self, path: str | Path, prompt: Prompt | None = None) -> int:
        """Write the cached blocks, or those of one prompt, to a safetensors file. Return how many blocks.

        Raises RequestError if there are none or the file cannot be written, UsageError if there is no prefix
        cache.
        """
        self._require_prefix_cache()
        parsed = None if prompt is None else self.core.factory.prompts.parse(prompt)
        return prefixes.save(path, self.block_manager, self.runner.kv_cache, self.fingerprint, parsed)

    def load_prefix(self, path: str | Path) -> int:
        """Load blocks that `save_prefix` wrote until no block is free. Return how many.

        Raises CheckpointError if the file is damaged or from another model, dtype or block size; UsageError
        if there is no prefix cache.
        """
        self._require_prefix_cache()
        return prefixes.load(path, self.block_manager, self.runner.kv_cache, self.fingerprint)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of what KV depends on besides the tokens: the model, its weights and the dtypes."""
        dtypes = (self.runner.dtype, self.config.quantization, self.runner.kv_dtype)
        return prefixes.fingerprint(self.directory, self.model_config, *dtypes)

    def _require_prefix_cache(self) -> None:
        if not self.config.enable_prefix_caching:
            raise UsageError("there is no prefix cache: the engine was made with enable_prefix_caching=False")
