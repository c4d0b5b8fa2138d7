"""BaseEngine: one model, its requests one by one, and the step that advances them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ..base.arguments import check_call, with_arguments_of
from ..base.from_vllm import ExplainsMissing, missing
from ..config import EngineConfig
from ..errors import UsageError
from ..model.hf_config import read_config
from ..model.hub import resolve
from ..requests.prompts import Prompt
from ..requests.request import RequestOutput
from ..runner.model_runner import ModelRunner
from ..runner.swap_rate import measure_swap_rate
from ..runner.warm_up import warm_up
from ..sampling_params import DEFAULT_MAX_TOKENS, SamplingParams
from ..scheduler.stats import EngineStats
from ..text.chat_template import ChatTemplates, Message
from ..text.prompt_parser import PromptParser
from . import prefixes
from .core import EngineCore
from .model_text import ModelText
from .request_factory import RequestFactory, RequestSpec

logger = logging.getLogger(__name__)


class BaseEngine(metaclass=ExplainsMissing):
    """The part of `LLMEngine` that takes requests one by one and runs single steps. Not thread-safe."""

    @with_arguments_of(EngineConfig)
    def __init__(self, model: str, **options: Any) -> None:
        self.config = config = EngineConfig(model, **options)
        self.directory = directory = resolve(config.model, config.revision)
        self.model_config = read_config(directory)
        self.runner = runner = ModelRunner(config, self.model_config, directory)
        self.text = text = ModelText(config, directory, self.model_config)
        self.tokenizer = text.tokenizer
        self.sampling_defaults = text.sampling_defaults
        self.eos_token_ids = text.eos_token_ids
        started = time.perf_counter()
        self.num_kernels = warm_up(runner)
        if self.num_kernels:
            logger.info("%d kernels in %.1f s", self.num_kernels, time.perf_counter() - started)
        sizes = replace(runner.sizes, host_bytes_per_s=measure_swap_rate(runner))
        cache = runner.kv_cache
        self.max_model_len = sizes.max_model_len
        self.block_manager = sizes.new_block_manager(cache.num_blocks, cache.num_host_blocks)
        self.scheduler = sizes.new_scheduler(self.block_manager)
        factory = RequestFactory(
            text,
            self.block_manager,
            text.new_parser(self.max_model_len),
            max_num_seqs=config.max_num_seqs,
            scheduling_policy=config.scheduling_policy,
            seed=config.seed,
        )
        self.core = EngineCore(runner, self.scheduler, factory, self.tokenizer)
        logger.info(self.describe())

    def __repr__(self) -> str:
        runner = self.runner
        dtype = str(runner.dtype).removeprefix("torch.")
        return f"{type(self).__name__}(model={self.config.model!r}, dtype={dtype}, device={runner.device})"

    if not TYPE_CHECKING:  # a type checker would take every attribute to exist

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(missing("LLMEngine", name), name=name, obj=self)

    @property
    def llm_engine(self) -> Self:
        """The engine itself, which in vLLM is another object than `LLM`."""
        return self

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of transformers. Raises UsageError if the engine has none."""
        return self.text.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests without any: from generation_config.json, or the defaults."""
        return self.params_of({})

    def params_of(
        self, given: Mapping[str, Any], max_tokens: int | None = DEFAULT_MAX_TOKENS
    ) -> SamplingParams:
        """Return SamplingParams(**given), with the engine's defaults for what is not given.

        max_tokens: the default where generation_config.json has no max_new_tokens.
        """
        return self.text.params_of(given, max_tokens)

    def describe(self) -> str:
        """Return a line about the model and its KV cache."""
        runner = self.runner
        return f"{self.model_config.architecture} in {runner.describe()}; {runner.kv_cache.describe()}"

    def stats(self) -> EngineStats:
        """Return current counts of requests, blocks and tokens, and totals so far."""
        return EngineStats.of(self.scheduler)

    @property
    def prompts(self) -> PromptParser:
        """The parser of prompts."""
        return self.core.factory.prompts

    @property
    def chat_templates(self) -> ChatTemplates:
        """The chat templates of the tokenizer. Raises RequestError if the engine has none."""
        return self.text.chat_templates

    def render_chat(self, messages: Sequence[Message], **template: Any) -> dict[str, Any]:
        """Return the prompt of a conversation, from the arguments of `ChatTemplates.render`."""
        return self.text.render_chat(messages, **template)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: float | None = None,
        tenant: str = "",
        timeout_s: float | None = None,
        generated_token_ids: Sequence[int] = (),
    ) -> None:
        """Queue one prompt, to be advanced by `step`.

        priority, timeout_s: replace those of sampling_params. timeout_s is in seconds from now.
        tenant: the account that is charged, for scheduling_policy "fair".
        generated_token_ids: the output so far, from another engine, after which the request goes on. With the
            seed that the other engine used, the tokens are those that it would have generated. Deltas hold
            only new tokens and text. One sample, no log-probabilities.

        All validation happens here, so the prompt is tokenized and a grammar compiled before this returns. A
        grammar usually takes milliseconds, at most COMPILE_TIMEOUT_S (10 s), and none if it was used lately.
        No step runs meanwhile; in `AsyncLLMEngine` steps go on.

        Raises RequestError if an argument is wrong or the id is in use, QueueFullError if max_waiting
        requests wait already.
        """
        self.core.add(
            request_id, RequestSpec(prompt, sampling_params, priority, tenant, timeout_s, generated_token_ids)
        )

    def fork(
        self,
        request_id: str,
        new_request_id: str | None = None,
        sampling_params: SamplingParams | None = None,
    ) -> str:
        """Duplicate an unfinished request: both continue after its newest token, and share its blocks so far.

        new_request_id: by default the next number. Return it.
        sampling_params: by default the request's, with a seed of the fork's own. timeout_s counts from now;
            without one the fork has the request's deadline, and without a priority the request's. Other stop
            strings than the request's apply to new text. Another grammar is compiled here, as in
            `add_request`.

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

    def unfinished(self) -> list[RequestOutput]:
        """Return all unfinished requests so far, with every token whatever their output_kind.

        Another engine can resume such a request from its prompt_token_ids and outputs[i].token_ids.
        """
        return [self.core.outputs.so_far(group) for group in self.core.groups.values() if not group.finished]

    def step(self) -> list[RequestOutput]:
        """Run one step. Return an output of each request that got a token or finished.

        What an output holds is set by output_kind. Requests of `generate_iter` and `stream` advance too, but
        their outputs go to those iterators.

        If the step raises, no request is lost: the next call computes again what was not finished. Cached and
        pinned prefixes are forgotten. Ctrl-C waits for the end of the step, whose outputs the next call
        returns; a second Ctrl-C acts at once.

        Raises EngineDeadError if the GPU has failed: no step can run any more, and `unfinished` returns what
        is left.
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

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False, **vllm: Any
    ) -> None:
        """Forget all cached prefixes, also pinned ones. Running requests keep their blocks.

        The arguments are those of vLLM's method, at values that change nothing here.
        """
        check_call(
            "reset_prefix_cache",
            vllm,
            reset_running_requests=reset_running_requests,
            reset_connector=reset_connector,
        )
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
