"""LLMEngine: prompts in, tokens out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from ..base.arguments import check_call
from ..base.validation import check_bool
from ..errors import RequestError
from ..requests.prompts import Prompt
from ..requests.request import RequestOutput
from ..sampling_params import BeamSearchParams, SamplingParams
from ..text.chat_template import Message, conversations_of
from .base import BaseEngine
from .beam_search import BeamSearch, BeamSearchOutput
from .embedding import EmbeddingRequestOutput, Pooling, check_pooling, embedding_output, embedding_reports
from .generation import (
    Progress,
    RequestSource,
    as_list,
    call_with_error_prefix,
    generate_as_completed,
    generate_in_order,
    generate_stream,
    progress_bar,
    prompts_of,
    run_reports,
)
from .scoring import ScoreOutput, score_output, score_reports


class LLMEngine(BaseEngine):
    """Serves one model: prompts in, tokens out. `EngineConfig` describes the options.

    >>> engine = LLMEngine("demo")
    >>> outputs = engine.generate(["def add(a, b):"], SamplingParams(temperature=0, max_tokens=16))
    >>> print(outputs[0].outputs[0].text)

    The methods take the arguments of vLLM's `LLM` in its order. Those without effect, such as lora_request,
    are accepted at values that change nothing here; docs/from-vllm.md lists them.

    On a GPU, making an engine keeps cuBLAS from adding partial sums in bfloat16 or float16, for the whole
    process: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction becomes False, as for fp16.

    Raises ConfigError, CheckpointError or UnsupportedModelError. Not thread-safe.
    """

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt] | None = None,
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: Progress = True,
        lora_request: None = None,
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

        prompts: one or an iterable of them. Each is text, a list of token ids, or a dict with "prompt" or
            "prompt_token_ids" and optionally "cache_salt": only prompts of the same salt share cached blocks.
        sampling_params: one for all, one per prompt, or None for `get_default_sampling_params()`.
        prompt_token_ids: one prompt or several as token ids, in place of `prompts`.
        priority, timeout_s: replace those of sampling_params; one for all or one per prompt.
        tenant: see `add_request`; one for all or one per prompt.
        use_tqdm: whether to show progress, or the class of the bar.

        Raises RequestError if a prompt or parameter is wrong: before anything runs if it is among the first
        `generation.WINDOW` prompts, otherwise once the prompts before it are done.
        """
        check_call(
            "generate",
            vllm,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        prompts = prompts_of(prompts, prompt_token_ids)
        source = RequestSource(prompts, sampling_params, priority, tenant, timeout_s)
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
        use_tqdm: Progress = False,
    ) -> Iterator[RequestOutput]:
        """Yield the outputs of `generate` one by one, for more prompts than memory holds.

        ordered: yield them in the order of the prompts; False yields each when its last token is there, so
            that a job can save it at once. Ids rise in the order of the prompts, from 0 in a new engine.

        Prompts and parameters are read a bounded number ahead of the yielded outputs. A wrong prompt raises
        RequestError when the outputs before it have been yielded, and so does an iterable of parameters that
        is longer or shorter than the prompts. timeout_s counts from when its prompt is read. Closing or
        collecting the iterator aborts the unfinished requests.
        """
        source = RequestSource(prompts, sampling_params, priority, tenant, timeout_s)
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
    ) -> Iterator[RequestOutput]:
        """Yield, after each step, an output of each request that got a token.

        What an output holds is set by output_kind: all text so far, the new text, or all text at the end
        only. request_id tells requests apart: ids rise in the order of the prompts. Otherwise as
        `generate_iter`.
        """
        source = RequestSource(prompts, sampling_params, priority, tenant, timeout_s)
        yield from generate_stream(self.core, source)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: Progress = True,
        pooling_params: None = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        priority: float = 0.0,
        tenant: str = "",
        **vllm: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Embed all prompts: `outputs.embedding` of each is a list of hidden_size floats.

        pooling: "last" takes the final hidden state of the last token, "mean" the mean over all tokens. Final
            hidden states are the model's after its last norm, as transformers' last_hidden_state.
        normalize: scale each embedding to a Euclidean norm of 1.

        Raises RequestError, before anything runs, if an argument is wrong or there is no prompt.
        """
        check_call(
            "embed",
            vllm,
            pooling_params=pooling_params,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
        )
        check_pooling(pooling, normalize)
        parsed = [
            call_with_error_prefix(f"prompts[{i}]", self.core.factory.prompts.parse, prompt)
            for i, prompt in enumerate(as_list(prompts))
        ]
        requests = run_reports(
            self.core, "prompts", embedding_reports(parsed, pooling), priority, tenant, use_tqdm=use_tqdm
        )
        return [embedding_output(request, normalize=normalize) for request in requests]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: None = None,
        use_tqdm: Progress = True,
        lora_request: None = None,
        pooling_task: Literal["embed"] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        priority: float = 0.0,
        tenant: str = "",
        **vllm: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Do what `embed` does, with the arguments in the order of vLLM's `encode`."""
        check_call(
            "encode",
            vllm,
            pooling_params=pooling_params,
            lora_request=lora_request,
            pooling_task=pooling_task,
            tokenization_kwargs=tokenization_kwargs,
        )
        return self.embed(
            prompts, use_tqdm, pooling=pooling, normalize=normalize, priority=priority, tenant=tenant
        )

    def score(
        self,
        prompt: Prompt,
        continuations: Sequence[str | Sequence[int]],
        use_tqdm: Progress = True,
        pooling_params: None = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: None = None,
        *,
        priority: float = 0.0,
        tenant: str = "",
        **vllm: Any,
    ) -> list[ScoreOutput]:
        """Return the log-probability of each continuation of a prompt, whose KV is shared by prefix caching.

        continuations: text or token ids. Prompt and continuation are tokenized separately, the latter without
            special tokens, so a space between the two must be part of one of them.

        Raises RequestError, before anything runs, if an argument is wrong or empty.
        """
        check_call(
            "score",
            vllm,
            pooling_params=pooling_params,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            chat_template=chat_template,
        )
        reports = score_reports(*self.core.factory.prompts.parse_continued(prompt, continuations))
        requests = run_reports(self.core, "continuations", reports, priority, tenant, use_tqdm=use_tqdm)
        return [score_output(request) for request in requests]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: None = None,
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
        check_call("beam_search", vllm, lora_request=lora_request, concurrency_limit=concurrency_limit)
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params must be BeamSearchParams, got {params!r}")
        listed = as_list(prompts)
        search = BeamSearch(self.core.factory, self.scheduler, params)
        for i, prompt in enumerate(listed):
            terms = (self.core.next_id(), prompt, 0.0 if priority is None else priority, tenant)
            call_with_error_prefix(f"prompts[{i}]", search.add, *terms)
        try:
            with progress_bar(use_tqdm, len(listed), "Searching", "prompt") as bar:
                for _ in search.run(self.core.step):
                    bar.update()
        finally:
            search.abort()
        return [group.output(self.tokenizer) for group in search.groups]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Progress = True,
        lora_request: None = None,
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
        """Answer one conversation or each of a list, rendered by the checkpoint's chat template.

        messages: dicts with "role" and "content", which is text or a list of {"type": "text", "text": ...};
            "tool_calls" and other keys that the template knows are passed to it.
        tools: JSON schemas of functions that the model may call; refused if the template does not show them.
        add_generation_prompt: end the prompt with the header of an answer.
        continue_final_message: let the model continue the last message instead of answering it.
        chat_template: a Jinja template to use instead of the checkpoint's, the name of one of several that
            the checkpoint has, or "plain".
        chat_template_kwargs: more variables for the template.
        priority, tenant, timeout_s, use_tqdm: see `generate`.

        Raises RequestError, before anything runs, if an argument is wrong or the template refuses it.
        """
        check_call(
            "chat",
            vllm,
            lora_request=lora_request,
            chat_template_content_format=chat_template_content_format,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        prompts = []
        for i, conversation in enumerate(conversations_of(messages)):
            try:
                prompt = self.render_chat(
                    conversation,
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    chat_template=chat_template,
                    chat_template_kwargs=chat_template_kwargs,
                )
            except RequestError as error:
                raise RequestError(f"conversation {i}: {error}", param=error.param) from error
            prompts.append(prompt)
        source = RequestSource(prompts, sampling_params, priority, tenant, timeout_s)
        return [*generate_in_order(self.core, source, use_tqdm=use_tqdm)]
