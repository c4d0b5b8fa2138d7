"""RequestFactory: prompts and parameters to requests, with everything checked that could go wrong later."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from .block_manager import BlockManager
from .errors import RequestError, reject_unknown
from .models.config import ModelConfig
from .request import Request, RequestGroup, RequestMetrics
from .sampling_params import SamplingParams
from .tokenizer import Tokenizer
from .validation import check_bool

# Text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}, with "cache_salt" where one is wanted,
# and "add_special_tokens": False for text that has its own, as a chat template's
Prompt = str | Sequence[int] | Mapping[str, Any]
PROMPT_FIELDS = ("prompt", "prompt_token_ids", "cache_salt", "add_special_tokens")


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """A prompt as checked token ids.

    namespace: what else its KV follows from; prompts of different namespaces share no blocks.
    """

    text: str | None
    token_ids: list[int]
    namespace: bytes


class RequestFactory:
    """Makes requests for one model and its KV cache."""

    def __init__(
        self,
        model_config: ModelConfig,
        block_manager: BlockManager,
        tokenizer: Tokenizer | None,
        *,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        max_num_seqs: int,
        seed: int,
    ) -> None:
        self.model_config, self.block_manager, self.tokenizer = model_config, block_manager, tokenizer
        self.eos_token_ids, self.max_model_len = eos_token_ids, max_model_len
        self.max_num_seqs, self.seed = max_num_seqs, seed

    def new_group(
        self, request_id: str, prompt: Prompt, params: SamplingParams, tenant: str, now: float
    ) -> RequestGroup:
        """A request of params.num_samples; all but the first are siblings of that.

        Raises RequestError naming what is wrong.
        """
        self._check_params(params)
        if not isinstance(tenant, str):
            raise RequestError(f"tenant must be a string, got {tenant!r}")
        parsed = self.parse(prompt, params.cache_salt)
        seed = self._derived_seed(request_id) if params.seed is None else params.seed
        samples = [
            self._new_request(request_id, parsed, params, tenant, now, index, _sample_seed(seed, index))
            for index in range(params.num_samples)
        ]
        samples[0].siblings = samples[1:]
        return RequestGroup(request_id, samples)

    def new_fork(
        self, request_id: str, parent: Request, params: SamplingParams | None, now: float
    ) -> RequestGroup:
        """A request that goes on from where `parent` is, by default with its parameters but another seed.

        Raises RequestError naming what is wrong.
        """
        seed = self._derived_seed(request_id)
        if params is None:
            params = parent.params
        elif isinstance(params, SamplingParams) and params.seed is not None:
            seed = params.seed
        self._check_params(params)
        if params.num_samples > 1:
            raise RequestError(
                f"a fork is one sequence, got {params.num_samples}; fork as often as there are to be"
            )
        parsed = ParsedPrompt(parent.prompt, parent.prompt_token_ids, parent.namespace)
        child = self._new_request(request_id, parsed, params, parent.tenant, now, 0, seed)
        child.deadline = parent.deadline
        if child.max_total_tokens <= parent.num_tokens:
            raise RequestError(
                f"max_tokens {params.max_tokens} leaves a fork nothing to generate: its parent has "
                f"{parent.num_output_tokens} tokens already"
            )
        child.token_ids = parent.token_ids.copy()
        return RequestGroup(request_id, [child])

    def parse(self, prompt: Prompt, salt: str | None = None) -> ParsedPrompt:
        """Check a prompt in any of its forms; a salt of its own goes before the one given."""
        add_special_tokens = True
        if isinstance(prompt, Mapping):
            reject_unknown("a prompt dict", map(str, prompt), PROMPT_FIELDS)
            fields = dict(prompt)
            if "prompt" in fields:
                add_special_tokens = fields.pop("add_special_tokens", True)
                check_bool(RequestError, "add_special_tokens", add_special_tokens)
            salt = fields.pop("cache_salt", salt)
            if salt is not None and (not isinstance(salt, str) or not salt):
                raise RequestError(f"cache_salt must be a non-empty string, got {salt!r}")
            if len(fields) != 1:
                raise RequestError(
                    f"a prompt dict has either prompt or prompt_token_ids, got {sorted(fields)}"
                )
            ((key, prompt),) = fields.items()
            if isinstance(prompt, str) != (key == "prompt"):
                wanted = "text" if key == "prompt" else "a list of token ids"
                raise RequestError(f"{key} in a prompt dict must be {wanted}, got {prompt!r}")
        text, token_ids = self._encode(prompt, add_special_tokens)
        if not token_ids:
            raise RequestError("the prompt is empty; it must have at least one token")
        self._check_vocabulary("prompt_token_ids", token_ids)
        token_ids = [int(token_id) for token_id in token_ids]
        return ParsedPrompt(text, token_ids, self._namespace(salt, len(token_ids)))

    def _encode(self, prompt: Any, add_special_tokens: bool) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    "a text prompt needs the tokenizer, which skip_tokenizer_init=True left out"
                )
            if not prompt:
                return prompt, []
            return prompt, self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
            return None, [*prompt]
        raise RequestError(f"a prompt is text, a list of token ids or a dict, got {prompt!r}")

    def _namespace(self, salt: str | None, num_prompt_tokens: int) -> bytes:
        rope, trained = self.model_config.rope, self.model_config.max_position_embeddings
        # A prompt beyond the trained context is rotated for its own length: see Batch.rope_lens.
        stretched = num_prompt_tokens if rope.type == "dynamic" and num_prompt_tokens > trained else None
        if salt is None and stretched is None:
            return b""
        return repr((salt, stretched)).encode("utf-8", "surrogatepass")

    def _new_request(
        self,
        request_id: str,
        prompt: ParsedPrompt,
        params: SamplingParams,
        tenant: str,
        now: float,
        index: int,
        seed: int,
    ) -> Request:
        eos = frozenset[int]() if params.ignore_eos else self.eos_token_ids
        return Request(
            request_id,
            prompt.text,
            prompt.token_ids,
            params,
            max_total_tokens=self._max_total_tokens(len(prompt.token_ids), params),
            stop_ids=eos.union(params.stop_token_ids),
            seed=seed,
            index=index,
            priority=params.priority,
            tenant=tenant,
            namespace=prompt.namespace,
            deadline=math.inf if params.timeout_s is None else now + params.timeout_s,
            metrics=RequestMetrics(now),
        )

    def _check_params(self, params: Any) -> None:
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be SamplingParams, got {params!r}")
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need the tokenizer, which skip_tokenizer_init=True left out")
        if params.num_samples > self.max_num_seqs:
            raise RequestError(
                f"{params.num_samples} samples cannot run at once; max_num_seqs is {self.max_num_seqs}"
            )
        self._check_vocabulary("stop_token_ids", params.stop_token_ids)
        self._check_vocabulary("allowed_token_ids", params.allowed_token_ids or ())
        self._check_vocabulary("logit_bias", [*(params.logit_bias or ())])

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
        fits = self.block_manager.fits
        if params.max_tokens is not None:
            most = min(longest, num_prompt_tokens + params.max_tokens)
        elif fits(longest - 1):
            most = longest
        else:
            most = max(self.block_manager.longest_fit(longest), num_prompt_tokens + 1)
        if not fits(most - 1):  # the last token is only sampled, never computed
            capacity = self.block_manager.longest_fit(most)
            raise RequestError(
                f"{num_prompt_tokens} prompt tokens and {most - num_prompt_tokens} new ones can never fit "
                f"the KV cache of {capacity} tokens; raise num_blocks, lower max_tokens or unpin a prefix"
            )
        return most

    def _derived_seed(self, request_id: str) -> int:
        return _digest(f"{self.seed}/{request_id}")


def _sample_seed(seed: int, index: int) -> int:
    """The first sample's seed is the request's: it is what n=1 would have given."""
    return _digest(f"{seed}#{index}") if index else seed


def _digest(text: str) -> int:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "little")


def as_list(prompts: Any) -> list[Prompt]:
    """One prompt, or a list of them, as a list. A list of ints is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts must be a prompt or a list of them, got {prompts!r}")
    if isinstance(prompts, bytes | bytearray) or (prompts and isinstance(prompts[0], Integral)):
        return [prompts]
    return list(prompts)


def per_prompt(name: str, value: Any, num_prompts: int) -> Sequence[Any]:
    """An argument for each prompt, given for all of them or one by one."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise RequestError(f"{len(value)} {name} for {num_prompts} prompts; give one or as many")
    return value
