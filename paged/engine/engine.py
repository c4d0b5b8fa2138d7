"""LLMEngine: prompts in, tokens out."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from ..architectures.config import ModelConfig
from ..base.arguments import check_call, with_arguments_of
from ..base.errors import ConfigError, EngineDeadError, RequestError, UsageError
from ..base.missing_names import ExplainsMissing
from ..base.validation import check_bool
from ..checkpoints.model_directory import resolve
from ..device.devices import resolve_device
from ..options.config import EngineConfig, check_policy, options_of
from ..options.sampling_params import DEFAULT_MAX_TOKENS, SamplingParams
from ..requests.request import Prompt, RequestOutput
from ..runner.model_runner import ModelRunner
from ..runner.warm_up import warm_up
from ..text.prompt_parser import PromptParser
from ..text.tokenizer import Tokenizer
from .core import EngineCore
from .generation import (
    Progress,
    RequestSource,
    as_list,
    generate_as_completed,
    generate_in_order,
    generate_stream,
    prompts_of,
)
from .model_text import ModelText, read_model
from .request_factory import RequestFactory
from .request_spec import RequestSpec, ids_of

if TYPE_CHECKING:
    from ..chat.local import LocalChat
    from ..checkpoints.embedding_files import Pooling
    from ..options.lora_request import LoRARequest
    from ..options.other_calls import BeamSearchParams, PoolingParams
    from ..runner.draft_model import DraftCheckpoint
    from ..scheduler.policies import Fair
    from ..scheduler.stats import EngineStats
    from ..text.chat_template import ChatTemplates, Message
    from .adapters import Adapters, ReadAdapter
    from .beam_search import BeamSearchOutput
    from .embedding import EmbeddingRequestOutput
    from .scoring import ScoreOutput

logger = logging.getLogger(__name__)


def _starting_together(config: EngineConfig) -> AbstractContextManager[None]:
    """Have torchrun's other ranks raise, too, what keeps this process from coming to meet them."""
    if config.num_ranks == 1:
        return nullcontext()
    from ..ranks.start import starting_together

    return starting_together(config)


def _new_executor(
    config: EngineConfig, model_config: ModelConfig, directory: Path, draft: DraftCheckpoint | None
) -> ModelRunner:
    """Load a model, in this process alone or divided among ranks. Raises what `ModelRunner` does."""
    if config.num_ranks == 1:
        num_in_flight = _steps_in_flight(config)
        return ModelRunner(config, model_config, directory, draft, num_in_flight=num_in_flight)
    from ..ranks.start import new_executor

    return new_executor(config, model_config, directory, draft)


def _steps_in_flight(config: EngineConfig) -> int:
    """Return how many steps of the same requests are in flight at once.

    Raises ConfigError where there is to be a second one, and the device or its kernels wait for each.
    """
    device = resolve_device(config.device)
    may_overlap = device.type == "cuda" and config.attention_backend != "torch"
    if config.async_scheduling and not may_overlap:
        on = device if device.type != "cuda" else f"{device} with attention_backend 'torch'"
        raise ConfigError(
            f"async_scheduling=True is for a GPU with Triton's kernels: on {on} the host waits for each "
            "step; leave it out"
        )
    return 2 if may_overlap and config.async_scheduling is not False else 1


def _find_draft_model(
    config: EngineConfig, model_config: ModelConfig, tokenizer: Tokenizer | None
) -> DraftCheckpoint | None:
    """Return the checkpoint of the draft model that speculative_config names; None if it names none."""
    if config.speculation is None or config.speculation.model is None:
        return None
    from .draft_model import find_draft_model

    return find_draft_model(config, model_config, tokenizer)


class LLMEngine(metaclass=ExplainsMissing):
    """Serves one model: prompts in, tokens out. `EngineConfig` describes the options.

    >>> engine = LLMEngine("demo")
    >>> outputs = engine.generate(["def add(a, b):"], SamplingParams(temperature=0, max_tokens=16))
    >>> print(outputs[0].outputs[0].text)

    The methods take the arguments of vLLM's `LLM`, in the same order. Arguments without effect here, such as
    tokenization_kwargs, may only have values that change nothing; docs/vllm-names.md lists them.

    On a GPU, an engine sets torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction and the same
    option for fp16 to False, for the whole process. cuBLAS then adds partial sums in float32.

    Raises ConfigError, CheckpointError or UnsupportedModelError. Not thread-safe.
    """

    @with_arguments_of(EngineConfig)
    def __init__(self, model: str, **options: Any) -> None:
        self.config = config = EngineConfig(model, **options)
        with _starting_together(config):
            self.directory = directory = resolve(config.model, config.revision)
            self.model_config, no_images = read_model(config, directory)
            self.text = text = ModelText(config, directory, self.model_config, no_images)
            draft = _find_draft_model(config, self.model_config, text.tokenizer)
        self.runner = runner = _new_executor(config, self.model_config, directory, draft)
        # Also when this object is collected, and before the interpreter exits.
        self._end_ranks: Callable[[], object] = lambda: None
        if config.num_ranks > 1:
            self._end_ranks = weakref.finalize(self, runner.close)
        self.tokenizer = text.tokenizer
        self.sampling_defaults = text.sampling_defaults
        self.eos_token_ids = text.eos_token_ids
        started = time.perf_counter()
        self.num_kernels = warm_up(runner)
        if self.num_kernels:
            logger.info("%d kernels in %.1f s", self.num_kernels, time.perf_counter() - started)
        sizes = replace(runner.sizes, part=None)
        if runner.device.type == "cuda":
            from ..runner.swap_rate import measure_swap_rate

            sizes = replace(sizes, host_bytes_per_s=measure_swap_rate(runner))
        cache = runner.kv_cache
        self.max_model_len = sizes.max_model_len
        self.model_config = replace(self.model_config, max_model_len=sizes.max_model_len)
        self.block_manager = sizes.new_block_manager(cache.num_blocks, cache.num_host_blocks)
        if runner.draft_model is not None:
            runner.draft_model.manager = self.block_manager
        self.scheduler = sizes.new_scheduler(
            self.block_manager,
            draft_model=runner.draft_model,
            num_in_flight=runner.num_in_flight,
            runs_ahead=runner.sizes.part is None and runner.num_in_flight > 1,
        )
        if text.has_embedding_files:
            _ = text.embedding_head  # wrong weights are refused now
        factory = RequestFactory(
            text,
            self.block_manager,
            text.new_parser(self.max_model_len),
            max_num_seqs=sizes.config.num_seats,
            most_uncut=min(sizes.max_num_batched_tokens, config.long_prefill_token_threshold or 2**31),
            scheduling_policy=config.scheduling_policy,
            seed=config.seed,
        )
        self._chats: dict[str | None, LocalChat] = {}  # by chat_template
        self.core = EngineCore(runner, self.scheduler, factory, self.tokenizer)
        if runner.lora is not None:
            from .adapters import new_adapters

            factory.adapters = new_adapters(runner, self.scheduler, self.core.groups, self.directory)
        runner.keep_weights()
        logger.info(self.describe())

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> Self:
        """Make an engine from an `EngineArgs` or `EngineConfig`."""
        return cls(**options_of(engine_args))

    def __repr__(self) -> str:
        runner = self.runner
        dtype = str(runner.dtype).removeprefix("torch.")
        return f"{type(self).__name__}(model={self.config.model!r}, dtype={dtype}, device={runner.device})"

    if not TYPE_CHECKING:  # a type checker would take every attribute to exist

        def __getattr__(self, name: str) -> Any:
            from ..base.from_vllm import missing

            raise AttributeError(missing("LLMEngine", name), name=name, obj=self)

    @property
    def llm_engine(self) -> Self:
        """The engine itself. In vLLM, `LLM` and its `llm_engine` are two objects."""
        return self

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of transformers. Raises UsageError if the engine has no tokenizer."""
        return self.text.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters for requests without any. generation_config.json may set them."""
        return self.params_of({})

    def params_of(
        self, given: Mapping[str, Any], max_tokens: int | None = DEFAULT_MAX_TOKENS
    ) -> SamplingParams:
        """Return SamplingParams(**given), with the engine's defaults for other parameters.

        max_tokens: the default if generation_config.json has no max_new_tokens.
        """
        return self.text.params_of(given, max_tokens)

    def shutdown(self) -> None:
        """End the other processes of a model over several processes. No further step can run.

        `with LLMEngine(...) as engine:` calls this at its end. Collecting the engine frees its memory.
        """
        self._end_ranks()
        self.core.dead = self.core.dead or EngineDeadError("the engine was shut down; make a new one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def describe(self) -> str:
        """Describe the model and its KV cache in one line."""
        runner = self.runner
        draft = runner.draft_model
        drafts = "" if draft is None else f"; drafts by {draft.config.architecture}"
        model = self.model_config.architecture
        num_params, num_active = self._parameters
        if num_active < num_params:
            model += (
                f" of {num_params / 1e9:,.3g} billion parameters, {num_active / 1e9:,.3g} of them active,"
            )
        return f"{model} in {runner.describe()}{drafts}; {runner.kv_cache.describe()}"

    def stats(self) -> EngineStats:
        """Return the current counts of requests, blocks and tokens, and the totals so far."""
        from ..scheduler.stats import EngineStats

        runner = self.runner
        return EngineStats.of(
            self.scheduler, runner.weight_bytes, self._parameters, runner.exchange_s, runner.graph_costs
        )

    @property
    def _parameters(self) -> tuple[int, int]:
        """The number of weights, and of those that a token is multiplied by or looked up in."""
        return self.model_config.num_params, self.model_config.num_active_params

    @property
    def prompts(self) -> PromptParser:
        """The parser of prompts."""
        return self.core.factory.prompts

    @property
    def chat_templates(self) -> ChatTemplates:
        """The chat templates of the tokenizer. Raises RequestError if the engine has no tokenizer."""
        return self.text.chat_templates

    def render_chat(self, messages: Sequence[Message], **template: Any) -> dict[str, Any]:
        """Render a conversation to a prompt, with the arguments of `ChatTemplates.render`."""
        return self.text.render_chat(messages, **template)

    # Many prompts at once

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt] | None = None,
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: Progress = True,
        lora_request: LoRARequest | Iterable[LoRARequest | None] | None = None,
        priority: float | Iterable[float] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Iterable[Sequence[int]] | None = None,
        tenant: str | Iterable[str] = "",
        timeout_s: float | Iterable[float] | None = None,
        **vllm: Any,
    ) -> list[RequestOutput]:
        """Complete all prompts. Return their outputs in the order of the prompts.

        prompts: one prompt or an iterable of prompts. A prompt is text, a list of token ids, or a dict with
            "prompt" or "prompt_token_ids" and optionally "cache_salt": only prompts with the same salt share
            cached blocks.
        sampling_params: one for all, one per prompt, or None for `get_default_sampling_params()`.
        prompt_token_ids: one prompt or several as token ids, in place of `prompts`.
        priority, timeout_s: override the fields of sampling_params; one for all or one per prompt.
        tenant: see `add_request`; one for all or one per prompt.
        lora_request: the LoRA adapter, of an engine with enable_lora; one for all or one per prompt.
        mm_processor_kwargs: as the engine's, for the images of prompts that have none of their own.
        use_tqdm: whether to show progress, or the class of the progress bar.

        Raises RequestError if a prompt or parameter is wrong: before anything runs if the prompt is among the
        first `generation.WINDOW`, otherwise once the prompts before it are done.
        """
        check_call(
            "generate",
            vllm,
            tokenization_kwargs=tokenization_kwargs,
        )
        prompts = prompts_of(prompts, prompt_token_ids)
        if mm_processor_kwargs is not None:
            from .conversations import with_processing

            prompts = with_processing(prompts, mm_processor_kwargs)
        source = RequestSource(prompts, sampling_params, priority, tenant, timeout_s, lora_request)
        return [*generate_in_order(self.core, source, use_tqdm=use_tqdm)]

    def generate_iter(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        ordered: bool = True,
        priority: float | Iterable[float] | None = None,
        tenant: str | Iterable[str] = "",
        timeout_s: float | Iterable[float] | None = None,
        lora_request: LoRARequest | Iterable[LoRARequest | None] | None = None,
        use_tqdm: Progress = False,
    ) -> Iterator[RequestOutput]:
        """Yield the outputs of `generate` one by one, for more prompts than memory holds.

        ordered: True yields outputs in the order of the prompts; False yields each output as soon as it is
            finished, so that a job can save it at once. Request ids rise in the order of the prompts, from 0
            in a new engine.

        Prompts and parameters are read only a bounded number ahead of the yielded outputs. For a wrong
        prompt, RequestError is raised once the outputs before it have been yielded; likewise if the numbers
        of prompts and parameters differ. timeout_s counts from when the prompt is read. Closing or collecting
        the iterator aborts the unfinished requests.
        """
        source = RequestSource(prompts, sampling_params, priority, tenant, timeout_s, lora_request)
        generate = (
            generate_in_order if check_bool(RequestError, "ordered", ordered) else generate_as_completed
        )
        yield from generate(self.core, source, use_tqdm=use_tqdm)

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        priority: float | Iterable[float] | None = None,
        tenant: str | Iterable[str] = "",
        timeout_s: float | Iterable[float] | None = None,
        lora_request: LoRARequest | Iterable[LoRARequest | None] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield, after each step, an output of each request that got a token.

        output_kind sets what an output holds: all text so far, the new text, or all text at the end only.
        request_id tells requests apart: ids rise in the order of the prompts. Everything else is as in
        `generate_iter`.
        """
        source = RequestSource(prompts, sampling_params, priority, tenant, timeout_s, lora_request)
        yield from generate_stream(self.core, source)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: Progress = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        priority: float = 0.0,
        tenant: str = "",
        **vllm: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Embed all prompts: `outputs.embedding` of each is a list of floats.

        Options that are not given come from the checkpoint: from the files of sentence-transformers, or from
        pooling_type in a GGUF file. If the checkpoint says nothing, the embedding is the normalized vector of
        the last token.

        pooling_params: dimensions, and normalize under vLLM's name use_activation; one for all prompts, or
            one for each.
        pooling: "last" takes the final hidden state of the last token, "mean" the mean over all tokens, "cls"
            the final hidden state of the first token. Final hidden states are taken after the model's last
            norm, as in transformers' last_hidden_state.
        normalize: scale each embedding to a Euclidean norm of 1.
        dimensions: keep this many numbers from the start of the embedding and normalize them again
            (matryoshka embeddings).
        prompt_name: the name of the checkpoint's prompt to put before each text; "" puts none.

        Raises RequestError, before anything runs, if an argument is wrong or there is no prompt.
        """
        from .embedding import EmbeddingOptions
        from .reports import ReportTerms
        from .run_reports import run_reports, specs_of

        check_call("embed", vllm, tokenization_kwargs=tokenization_kwargs)
        listed = as_list(prompts)
        options = EmbeddingOptions(pooling, normalize, dimensions, prompt_name).each(
            pooling_params, len(listed)
        )
        specs = specs_of(self.text, self.prompts, listed, options)
        terms = ReportTerms(priority, tenant, lora_request=lora_request)
        return run_reports(self.core, "prompts", specs, terms, use_tqdm=use_tqdm)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: Progress = True,
        lora_request: LoRARequest | None = None,
        pooling_task: Literal["embed"] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        priority: float = 0.0,
        tenant: str = "",
        **vllm: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Do what `embed` does, with the arguments in the order of vLLM's `encode`."""
        check_call(
            "encode",
            vllm,
            pooling_task=pooling_task,
            tokenization_kwargs=tokenization_kwargs,
        )
        return self.embed(
            prompts,
            use_tqdm,
            pooling_params,
            lora_request,
            pooling=pooling,
            normalize=normalize,
            dimensions=dimensions,
            prompt_name=prompt_name,
            priority=priority,
            tenant=tenant,
        )

    def score(
        self,
        prompt: Prompt,
        continuations: Sequence[str | Sequence[int]],
        use_tqdm: Progress = True,
        pooling_params: None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: None = None,
        *,
        priority: float = 0.0,
        tenant: str = "",
        **vllm: Any,
    ) -> list[ScoreOutput]:
        """Return the log-probability of each continuation of a prompt. Prefix caching shares the prompt's KV.

        continuations: texts or lists of token ids. Prompt and continuation are tokenized separately, the
            continuation without special tokens, so a space between them must be part of one of the two.

        Raises RequestError, before anything runs, if an argument is wrong or empty.
        """
        from .reports import ReportTerms
        from .run_reports import run_reports
        from .scoring import ScoreSpec

        check_call(
            "score",
            vllm,
            pooling_params=pooling_params,
            tokenization_kwargs=tokenization_kwargs,
            chat_template=chat_template,
        )
        parsed, wholes = self.prompts.parse_continued(prompt, continuations)
        specs = [ScoreSpec(whole, len(parsed.token_ids)) for whole in wholes]
        terms = ReportTerms(priority, tenant, lora_request=lora_request)
        return run_reports(self.core, "continuations", specs, terms, use_tqdm=use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
        use_tqdm: Progress = True,
        concurrency_limit: None = None,
        priority: float | None = None,
        *,
        tenant: str = "",
        **vllm: Any,
    ) -> list[BeamSearchOutput]:
        """Return the likeliest continuations of each prompt that a beam search finds; see `BeamSearchParams`.

        Raises RequestError, before anything runs, if an argument is wrong or there is no prompt.
        """
        from ..options.other_calls import BeamSearchParams
        from .beam_search import search_beams

        check_call("beam_search", vllm, concurrency_limit=concurrency_limit)
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params must be BeamSearchParams, got {params!r}")
        given = (as_list(prompts), params, lora_request, 0.0 if priority is None else priority, tenant)
        return search_beams(self.core, *given, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Progress = True,
        lora_request: LoRARequest | Iterable[LoRARequest | None] | None = None,
        priority: float | Sequence[float] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: Literal["auto", "string"] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        *,
        tenant: str | Sequence[str] = "",
        timeout_s: float | Sequence[float] | None = None,
        **vllm: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of conversations, rendered by the checkpoint's chat template.

        An output's `message` is the answer in OpenAI's form, with content, reasoning and tool_calls. Its
        `text` is what the model wrote.

        messages: dicts with "role" and "content"; content is text or a list of {"type": "text", "text": ...}.
            Other keys, such as "tool_calls", are passed to the template.
        tools: JSON schemas of functions that the model may call. If the template cannot show tools, messages
            describe them.
        add_generation_prompt: end the prompt with the header of an answer.
        continue_final_message: let the model continue the last message instead of answering it.
        chat_template: a Jinja template to use instead of the checkpoint's, the name of one of several that
            the checkpoint has, or "plain".
        chat_template_kwargs: more variables for the template.
        mm_processor_kwargs: as the engine's, for the images of these conversations.
        priority, tenant, timeout_s, use_tqdm: see `generate`.

        Raises RequestError, before anything runs, if an argument is wrong or the template refuses a
        conversation.
        """
        check_call(
            "chat",
            vllm,
            chat_template_content_format=chat_template_content_format,
            tokenization_kwargs=tokenization_kwargs,
        )
        from .conversations import render_all, with_messages

        chat = self._local_chat(chat_template)
        template = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs,
            "mm_processor_kwargs": mm_processor_kwargs,
        }
        prompts = render_all(self.text, chat, messages, tools, template)
        source = RequestSource(prompts, sampling_params, priority, tenant, timeout_s, lora_request)
        outputs = generate_in_order(self.core, source, use_tqdm=use_tqdm)
        return with_messages(chat, [*outputs], tools, continues_answer=continue_final_message)

    def _local_chat(self, chat_template: str | None) -> LocalChat:
        """Return what knows the format of the model's chats."""
        from ..chat.local import LocalChat

        self.chat_templates.source(chat_template)  # raises if there is none
        if chat_template not in self._chats:
            self._chats[chat_template] = LocalChat(self.text, chat_template)
        return self._chats[chat_template]

    # Single requests, and the step that advances them

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
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Queue one prompt; calls of `step` advance it.

        priority, timeout_s: override the fields of sampling_params. timeout_s is in seconds from now.
        tenant: the account that is charged under scheduling_policy "fair".
        generated_token_ids: the output so far, if another engine began the request. With that engine's seed,
            the tokens are the same as there. Deltas hold only new tokens and text. Such a request has one
            sample and no log-probabilities.

        All validation happens here, so this call tokenizes the prompt and compiles a grammar. Compiling a
        grammar usually takes milliseconds, at most COMPILE_TIMEOUT_S (10 s), and no time if the grammar was
        used lately. No step runs during the call; in `AsyncLLMEngine`, steps go on.

        Raises RequestError if an argument is wrong or the id is in use, QueueFullError if max_waiting
        requests are already waiting.
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
        self.core.add(request_id, spec)

    def fork(
        self,
        request_id: str,
        new_request_id: str | None = None,
        sampling_params: SamplingParams | None = None,
    ) -> str:
        """Duplicate an unfinished request: both continue after its newest token, and share its blocks so far.

        new_request_id: by default the next number. The call returns it.
        sampling_params: by default the request's, with a new seed for the fork. timeout_s counts from now;
            without timeout_s or priority, the fork has the request's deadline or priority. New stop strings
            apply to new text only. A new grammar is compiled here, as in `add_request`.

        Raises RequestError if there is no such request, if it has several samples, if the new id is in use,
        or if a parameter is wrong.
        """
        return self.core.fork(request_id, new_request_id, sampling_params)

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End one request or several, and free their blocks. Ignore ids of finished or unknown requests."""
        for each in ids_of(request_id):
            self.core.abort(each)

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has anything to compute or to return."""
        return self.core.has_unfinished()

    def unfinished(self) -> list[RequestOutput]:
        """Return the outputs so far of all unfinished requests, with every token regardless of output_kind.

        Another engine can resume such a request from its prompt_token_ids and outputs[i].token_ids.
        """
        return [self.core.outputs.so_far(group) for group in self.core.groups.values() if not group.finished]

    def step(self) -> list[RequestOutput]:
        """Run one step. Return an output of each request that got a token or finished.

        output_kind sets what an output holds. Requests of `generate_iter` and `stream` advance too, but their
        outputs go to those iterators.

        If the step raises, no request is lost: the next call recomputes the unfinished work. Cached and
        pinned prefixes are forgotten. Ctrl-C waits for the step's end, and the next call returns its outputs;
        a second Ctrl-C acts at once.

        Raises EngineDeadError if the GPU or a process of the model has failed. No step can run any more, and
        `unfinished` returns the requests that are left.
        """
        self.core.step(self.core.outbox)
        return self.core.outbox.take()

    def set_tenant_weights(self, weights: Mapping[str, float]) -> None:
        """Divide the engine's service by these weights from now on. Other tenants have weight 1.

        Raises ConfigError unless scheduling_policy is "fair" and all weights are positive.
        """
        policy = self.scheduler.policy
        if not getattr(policy, "divides_seats", False):
            raise ConfigError(f"tenant_weights go with scheduling_policy 'fair', got {type(policy).__name__}")
        check_policy("fair", weights)
        cast("Fair", policy).set_weights(weights)

    # LoRA adapters

    @property
    def _adapters(self) -> Adapters:
        """The adapters. Raises UsageError if the engine takes none."""
        adapters = self.core.factory.adapters
        if adapters is None:
            from ..options.lora_request import NO_LORA

            raise UsageError(NO_LORA)
        return adapters

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter before its first request. Return whether it is new.

        Raises RequestError if the adapter cannot be read or does not fit the model, UsageError without
        enable_lora.
        """
        adapters = self._adapters
        is_new = adapters.loaded.find(getattr(lora_request, "request", lora_request)) is None
        adapters.find(lora_request)
        return is_new

    def load_adapter(self, lora_request: LoRARequest | ReadAdapter) -> str:
        """Read an adapter into memory, if it is not there, without a name. Return the hash of its content.

        Raises RequestError as `add_lora` does, UsageError without enable_lora.
        """
        return self._adapters.load(lora_request)

    def forget_adapter(self, content_hash: str) -> None:
        """Free the memory of an adapter, which unfinished requests keep.

        Raises UsageError without enable_lora.
        """
        self._adapters.forget(content_hash)

    def remove_lora(self, lora_id: int) -> bool:
        """Forget the adapter with this lora_int_id. Return whether it was known. Unfinished requests continue
        with it.

        Raises UsageError without enable_lora.
        """
        return self._adapters.remove(lora_id)

    def list_loras(self) -> set[int]:
        """Return the lora_int_id of each known adapter. Raises UsageError without enable_lora."""
        return {request.lora_int_id for request in self._adapters.requests}

    # Prefixes

    def pin_prefix(self, prompt: Prompt, lora_request: LoRARequest | None = None) -> int:
        """Compute a prompt's KV if needed, and pin its full blocks. Return their number of tokens.

        The blocks stay pinned until `unpin_prefix` or `reset_prefix_cache` is called, or a step raises; after
        an error the contents of blocks are unknown. lora_request: the adapter whose requests find them.

        Raises RequestError if the prompt fills no block, if its blocks do not stay cached, if the unfinished
        requests leave too little room for them, or as `generate` does for the adapter; UsageError if the
        prompt is pinned already or there is no prefix cache.
        """
        from . import prefixes

        return prefixes.pin(self.core, prompt, lora_request)

    def unpin_prefix(self, prompt: Prompt, lora_request: LoRARequest | None = None) -> None:
        """Allow the blocks of a pinned prompt to be evicted. Raises UsageError if it is not pinned."""
        from . import prefixes

        prefixes.unpin(self.core, prompt, lora_request)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False, **vllm: Any
    ) -> None:
        """Forget all cached prefixes, including pinned ones. Running requests keep their blocks.

        The arguments of vLLM's method are accepted with values that change nothing here.
        """
        check_call(
            "reset_prefix_cache",
            vllm,
            reset_running_requests=reset_running_requests,
            reset_connector=reset_connector,
        )
        self.block_manager.reset_prefix_cache()

    def save_prefix(
        self, path: str | Path, prompt: Prompt | None = None, lora_request: LoRARequest | None = None
    ) -> int:
        """Write all cached blocks, or the blocks of one prompt, to a safetensors file. Return how many.

        lora_request: the adapter whose blocks are written; None with a prompt writes those of the base model.

        Raises RequestError if no blocks are cached, the file cannot be written or the adapter is wrong,
        UsageError if there is no prefix cache.
        """
        from . import prefixes

        parsed = prefixes.saved_prompt(self.core, prompt, lora_request)
        prefixes.move_states(self.core)
        return prefixes.save(
            path, self.block_manager, self.runner, self.fingerprint, parsed, self._draft_fingerprint
        )

    def load_prefix(self, path: str | Path) -> int:
        """Load blocks from a file of `save_prefix`, as many as there are free blocks. Return how many.

        Raises CheckpointError if the file is damaged or from another model, dtype or block size; UsageError
        if there is no prefix cache.
        """
        from . import prefixes

        prefixes.require_cache(self.core)
        prefixes.move_states(self.core)
        return prefixes.load(path, self.block_manager, self.runner, self.fingerprint, self._draft_fingerprint)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that KV depends on besides the tokens: model, weights and dtypes."""
        dtypes = (self.runner.dtype, self.config.quantization, self.runner.kv_dtype)
        from . import prefixes

        return prefixes.fingerprint(self.directory, self.model_config, *dtypes)

    @cached_property
    def _draft_fingerprint(self) -> str | None:
        sizes = self.runner.sizes.draft
        if sizes is None:
            return None
        dtypes = (self.runner.dtype, sizes.config.quantization, self.runner.kv_dtype)
        from . import prefixes

        return prefixes.fingerprint(Path(sizes.config.model), sizes.model, *dtypes)
