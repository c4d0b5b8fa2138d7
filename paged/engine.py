"""LLMEngine: prompts in, tokens out."""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from tqdm import tqdm

from .block_manager import BlockManager
from .config import EngineConfig
from .errors import RequestError, UnknownArgumentError, reject_unknown
from .model_runner import ModelRunner
from .outputs import OutputProcessor
from .request import Request, RequestOutput, RequestStatus
from .sampling_params import SamplingParams
from .scheduler import Scheduler
from .tokenizer import Tokenizer
from .weights import read_config, read_eos_token_ids, resolve

logger = logging.getLogger(__name__)

# Text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}
Prompt = str | Sequence[int] | Mapping[str, Any]


class LLMEngine:
    """Serves one model. See `EngineConfig` for the options.

    >>> engine = LLMEngine("demo")
    >>> outputs = engine.generate(["def add(a, b):"], SamplingParams(temperature=0, max_tokens=16))
    >>> print(outputs[0].outputs[0].text)

    Raises ConfigError, CheckpointError or UnsupportedModelError. Not thread-safe.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.config = EngineConfig.from_kwargs(model=model, **options)
        directory = resolve(self.config.model)
        self.model_config = read_config(directory)
        self.runner = ModelRunner(self.config, self.model_config, directory)
        self.tokenizer: Tokenizer | None = None
        if not self.config.skip_tokenizer_init:
            self.tokenizer = Tokenizer(resolve(self.config.tokenizer) if self.config.tokenizer else directory)
        # Ids outside the vocabulary, such as the -1 of models that have no EOS, are never sampled.
        vocabulary = range(self.model_config.vocab_size)
        self.eos_token_ids = frozenset(i for i in read_eos_token_ids(directory) if i in vocabulary)
        self.max_model_len = self.runner.max_model_len
        self.block_manager = BlockManager(self.runner.kv_cache.num_blocks, self.config.block_size)
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.runner.max_num_batched_tokens,
        )
        self._requests: dict[str, Request] = {}  # unfinished
        self._outputs = OutputProcessor(self.tokenizer)
        self._undelivered: list[RequestOutput] = []  # finished while generate() waited for others
        self._ids = itertools.count()
        logger.info(self.describe())

    def describe(self) -> str:
        """The model and its KV cache in one line."""
        runner = self.runner
        dtype = str(runner.dtype).removeprefix("torch.")
        model = f"{self.model_config.architecture} in {dtype} on {runner.device}"
        return f"{model}; attention by {runner.model.kernels.name}; {runner.kv_cache.describe()}"

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete all prompts. Returns their outputs in the order of the prompts.

        prompts: one or a list; each is text, token ids, or a dict with "prompt" or "prompt_token_ids".
        sampling_params: one for all, one per prompt, or None for the defaults.

        Raises RequestError, before anything runs, if one of the prompts or parameters is wrong.
        """
        listed = _as_list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(listed)
        if not isinstance(sampling_params, Sequence):
            raise RequestError(f"sampling_params must be SamplingParams, got {sampling_params!r}")
        if len(sampling_params) != len(listed):
            raise RequestError(
                f"{len(sampling_params)} sampling_params for {len(listed)} prompts; give one or as many"
            )
        requests = []
        for i, (prompt, params) in enumerate(zip(listed, sampling_params, strict=True)):
            try:
                requests.append(self._new_request(self._next_id(), prompt, params))
            except (RequestError, UnknownArgumentError) as error:
                raise type(error)(f"prompts[{i}]: {error}") from error
        for request in requests:
            self._add(request)
        try:
            return self._run(requests, use_tqdm=use_tqdm)
        finally:  # after an interrupt nobody would take what is left
            for request in requests:
                if request.status is not RequestStatus.FINISHED:
                    self.abort_request(request.request_id)

    def add_request(
        self, request_id: str, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> None:
        """Queue one prompt, to be advanced by `step`.

        Raises RequestError if the prompt or its parameters are wrong, or the id is in use.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        self._add(self._new_request(request_id, prompt, params))

    def abort_request(self, request_id: str) -> None:
        """End a request and free its blocks; nothing if there is no unfinished one of this id."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.abort(request)
            self._outputs.forget(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do or to deliver."""
        return bool(self._requests or self._undelivered)

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns what every request that got a token has so far, and who finished."""
        delivered, self._undelivered = self._undelivered, []
        return delivered + [self._outputs.output(request) for request in self._advance()]

    def _run(self, requests: list[Request], *, use_tqdm: bool) -> list[RequestOutput]:
        own = {request.request_id for request in requests}
        outputs: dict[str, RequestOutput] = {}
        started, num_tokens = time.perf_counter(), 0
        with tqdm(total=len(requests), desc="Generating", unit="request", disable=not use_tqdm) as bar:
            while len(outputs) < len(requests):
                for request in self._advance():
                    num_tokens += 1
                    if request.status is not RequestStatus.FINISHED:
                        continue
                    output = self._outputs.output(request)
                    if request.request_id in own:
                        outputs[request.request_id] = output
                        rate = num_tokens / (time.perf_counter() - started)
                        bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
                        bar.update()
                    else:
                        self._undelivered.append(output)
        return [outputs[request.request_id] for request in requests]

    def _advance(self) -> list[Request]:
        """Run one step. Returns the requests that got a token or an error; nobody's text is made yet."""
        schedule = self.scheduler.schedule()
        if not schedule.requests:
            return []
        tokens = self.runner.execute(schedule)
        advanced = self.scheduler.update(schedule, tokens)
        for request in advanced:
            if request.params.stop:
                self._outputs.end_at_stop_string(request)
        finished = [request for request in advanced if request.finish_reason is not None]
        if finished:
            self.scheduler.release_finished()
            for request in finished:
                del self._requests[request.request_id]
        return advanced

    def _next_id(self) -> str:
        return next(i for i in map(str, self._ids) if i not in self._requests)

    def _add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self.scheduler.add(request)

    def _new_request(self, request_id: str, prompt: Prompt, params: SamplingParams) -> Request:
        """Check everything that could go wrong with a request later."""
        if not isinstance(request_id, str):
            raise RequestError(f"request_id must be a string, got {request_id!r}")
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use by an unfinished request")
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be SamplingParams, got {params!r}")
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need the tokenizer, which skip_tokenizer_init=True left out")
        self._check_vocabulary("stop_token_ids", params.stop_token_ids)
        text, token_ids = self._read_prompt(prompt)
        eos = frozenset[int]() if params.ignore_eos else self.eos_token_ids
        return Request(
            request_id,
            text,
            token_ids,
            params,
            max_total_tokens=self._max_total_tokens(len(token_ids), params),
            stop_ids=eos.union(params.stop_token_ids),
            seed=self._derived_seed(request_id) if params.seed is None else params.seed,
        )

    def _read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Text, where the prompt was given as text, and checked token ids."""
        if isinstance(prompt, Mapping):
            reject_unknown("a prompt dict", map(str, prompt), ["prompt", "prompt_token_ids"])
            if len(prompt) != 1:
                raise RequestError(
                    f"a prompt dict has either prompt or prompt_token_ids, got {sorted(prompt)}"
                )
            ((key, prompt),) = prompt.items()
            if isinstance(prompt, str) != (key == "prompt"):
                wanted = "text" if key == "prompt" else "a list of token ids"
                raise RequestError(f"{key} in a prompt dict must be {wanted}, got {prompt!r}")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    "a text prompt needs the tokenizer, which skip_tokenizer_init=True left out"
                )
            text, token_ids = prompt, self.tokenizer.encode(prompt) if prompt else []
        elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
            text, token_ids = None, [*prompt]
        else:
            raise RequestError(f"a prompt is text, a list of token ids or a dict, got {prompt!r}")
        if not token_ids:
            raise RequestError("the prompt is empty; it must have at least one token")
        self._check_vocabulary("prompt_token_ids", token_ids)
        return text, [int(token_id) for token_id in token_ids]

    def _check_vocabulary(self, name: str, token_ids: Sequence[int]) -> None:
        vocab_size = self.model_config.vocab_size
        for i, token_id in enumerate(token_ids):
            if isinstance(token_id, bool) or not isinstance(token_id, Integral):
                raise RequestError(f"{name}[{i}] must be an int, got {token_id!r}")
            if not 0 <= token_id < vocab_size:
                raise RequestError(f"{name}[{i}] is {token_id}; the vocabulary is 0 to {vocab_size - 1}")

    def _max_total_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Prompt and output together at most; one that could never fit is refused now, not left waiting."""
        if num_prompt_tokens > self.max_model_len:
            raise RequestError(
                f"the prompt has {num_prompt_tokens} tokens, more than max_model_len {self.max_model_len}"
            )
        # A prompt that fills the context still gets the token that follows it.
        longest = max(self.max_model_len, num_prompt_tokens + 1)
        capacity = self.block_manager.pool.num_blocks * self.block_manager.block_size
        if params.max_tokens is None:
            most = min(longest, max(capacity, num_prompt_tokens + 1))
        else:
            most = min(longest, num_prompt_tokens + params.max_tokens)
        if most - 1 > capacity:  # the last token is only sampled, never computed
            raise RequestError(
                f"{num_prompt_tokens} prompt tokens and {most - num_prompt_tokens} new ones can never fit "
                f"the KV cache of {capacity} tokens; raise num_blocks or lower max_tokens"
            )
        return most

    def _derived_seed(self, request_id: str) -> int:
        digest = hashlib.sha256(f"{self.config.seed}/{request_id}".encode("utf-8", "surrogatepass")).digest()
        return int.from_bytes(digest[:8], "little")


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt, or a list of them, as a list. A list of ints is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts must be a prompt or a list of them, got {prompts!r}")
    if isinstance(prompts, bytes | bytearray) or (prompts and isinstance(prompts[0], Integral)):
        return [prompts]
    return list(prompts)
