"""RequestFactory: prompts and parameters to requests, with everything checked that could go wrong later."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from typing import Any, NamedTuple

from .block_manager import BlockManager
from .errors import RequestError, reject_unknown
from .models.config import ModelConfig
from .request import Grammar, Prompt, PromptReport, Request, RequestGroup, RequestMetrics
from .sampling_params import SamplingParams
from .stop_strings import StopStrings, stop_strings
from .structured_outputs import Grammars
from .token_rules import TokenRules
from .tokenizer import Tokenizer
from .validation import check_bool, shown

MAX_PROMPT_LOGPROBS = 2**22  # each takes some 200 bytes as its owner sees it
PROMPT_FIELDS = ("prompt", "prompt_token_ids", "cache_salt", "add_special_tokens")


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """A prompt as checked token ids.

    namespace: what else its KV follows from; prompts of different namespaces share no blocks.
    """

    text: str | None
    token_ids: list[int]
    namespace: bytes


class Prepared(NamedTuple):
    """A prompt, and what its parameters were compiled to: all of a request that may take long to make."""

    prompt: ParsedPrompt
    rules: TokenRules = TokenRules()
    stops: StopStrings | None = None
    grammar: Grammar | None = None


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
        scheduling_policy: str,
        seed: int,
    ) -> None:
        self.model_config, self.block_manager, self.tokenizer = model_config, block_manager, tokenizer
        self.eos_token_ids, self.max_model_len = eos_token_ids, max_model_len
        self.max_num_seqs, self.seed = max_num_seqs, seed
        self.scheduling_policy = scheduling_policy
        # Breakers are looked for in the whole vocabulary, and most requests have the same.
        self._rules_of = lru_cache(maxsize=64)(self._new_rules)
        self.grammars = Grammars(tokenizer, model_config.vocab_size, eos_token_ids)

    def new_group(
        self, request_id: str, prompt: Prompt | Prepared, params: SamplingParams, tenant: str, now: float
    ) -> RequestGroup:
        """A request of params.num_samples; all but the first are siblings of that.

        Raises RequestError naming what is wrong.
        """
        prepared = prompt if isinstance(prompt, Prepared) else self.prepare(prompt, params)
        _check_tenant(tenant)
        if params.priority and self.scheduling_policy != "priority":
            raise RequestError(
                f"priority {params.priority} needs scheduling_policy='priority'; this engine has "
                f"{self.scheduling_policy!r}"
            )
        seed = self._derived_seed(request_id) if params.seed is None else params.seed
        samples = [
            self._new_request(request_id, prepared, params, tenant, now, index, _sample_seed(seed, index))
            for index in range(params.num_samples)
        ]
        if prepared.grammar is not None:
            for sample in samples:
                sample.grammar = prepared.grammar.copy()
        samples[0].siblings = samples[1:]
        if params.prompt_logprobs is not None:
            length = len(prepared.prompt.token_ids)
            samples[0].report = self._prompt_report(length, params.prompt_logprobs)
        return RequestGroup(request_id, samples)

    def prepare(self, prompt: Prompt, params: SamplingParams) -> Prepared:
        """Do, on any thread, all of `new_group` that may take long. Raises RequestError like that."""
        self._check_params(params)
        parsed = self.parse(prompt, params.cache_salt)
        wanted = params.structured_outputs
        grammar = None if wanted is None else self.grammars.start(wanted)
        return Prepared(parsed, self._token_rules(params), _stops(params), grammar)

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
        salt = params.cache_salt
        if salt not in (None, parent.params.cache_salt) and (
            self._namespace(salt, parent.num_prompt_tokens) != parent.namespace
        ):
            raise RequestError(
                f"cache_salt of a fork must be None or its parent's, whose blocks it shares, got {salt!r}"
            )
        parsed = ParsedPrompt(parent.prompt, parent.prompt_token_ids, parent.namespace)
        rules = parent.rules if params is parent.params else self._token_rules(params)
        prepared = Prepared(parsed, rules, _stops(params))
        child = self._new_request(request_id, prepared, params, parent.tenant, now, 0, seed)
        if params is parent.params or params.timeout_s is None:
            child.deadline = parent.deadline
        if child.max_total_tokens <= parent.num_tokens:
            raise RequestError(
                f"max_tokens {params.max_tokens} leaves a fork nothing to generate: its parent has "
                f"{parent.num_output_tokens} tokens already"
            )
        child.token_ids = parent.token_ids.copy()
        if child.wants_logprobs:
            if not parent.wants_logprobs:
                raise RequestError(
                    f"logprobs of a fork must be None as its parent's, got {params.logprobs}: there are "
                    "none of what they have in common"
                )
            child.logprobs = parent.logprobs.copy()
        if params.prompt_logprobs is not None:
            # What is computed of their prompt is computed: its rows are told to both or to none.
            if parent.report is None or params.prompt_logprobs != parent.params.prompt_logprobs:
                raise RequestError(
                    f"prompt_logprobs of a fork must be None, or its parent's "
                    f"{parent.params.prompt_logprobs}, got {params.prompt_logprobs}"
                )
            child.report = parent.report.fork()
        child.grammar = self._grammar_of_fork(child, parent)
        return RequestGroup(request_id, [child])

    def new_report(
        self,
        request_id: str,
        prompt: ParsedPrompt,
        report: PromptReport,
        priority: float,
        tenant: str,
        now: float,
    ) -> RequestGroup:
        """A request that generates nothing: only what is reported of its prompt is wanted.

        Raises RequestError naming what is wrong.
        """
        _check_tenant(tenant)
        # As if for one token, whose place nobody computes.
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, priority=priority)
        request = self._new_request(request_id, Prepared(prompt), params, tenant, now, 0, 0)
        request.report, request.generates = report, False
        return RequestGroup(request_id, [request])

    def parse_continued(self, prompt: Prompt, continuations: Any) -> tuple[ParsedPrompt, list[ParsedPrompt]]:
        """A prompt, and it with each of the continuations behind it, which are text or token ids.

        A text is made tokens by itself, without special tokens: so the prompt is the same for all of them.
        """
        parsed = self.parse(prompt)
        salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
        if isinstance(continuations, str | bytes) or not isinstance(continuations, Sequence):
            raise RequestError(
                f"continuations must be a list of texts or token ids, got {shown(continuations)}"
            )
        if not continuations:
            raise RequestError("continuations must have at least one entry, got []")
        wholes = []
        for i, continuation in enumerate(continuations):
            name = f"continuations[{i}]"
            self._check_far_too_long(name, continuation)
            _, token_ids = self._encode(continuation, name, add_special_tokens=False)
            if not token_ids:
                raise RequestError(f"{name} is empty; it must have at least one token")
            self._check_vocabulary(name, token_ids)
            whole = [*parsed.token_ids, *map(int, token_ids)]
            self._check_length(f"{name}: the prompt", len(whole))
            wholes.append(ParsedPrompt(None, whole, self._namespace(salt, len(whole))))
        return parsed, wholes

    def _grammar_of_fork(self, child: Request, parent: Request) -> Grammar | None:
        wanted = child.params.structured_outputs
        if wanted is None:
            return None
        if parent.grammar is not None and wanted == parent.params.structured_outputs:
            return parent.grammar.copy()
        grammar = self.grammars.start(wanted)
        if not grammar.follow(child):
            raise RequestError(
                f"structured_outputs {wanted.kind} does not allow the {parent.num_output_tokens} tokens that "
                "the parent has generated"
            )
        return grammar

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
                raise RequestError(f"cache_salt must be a non-empty string, got {shown(salt)}")
            if len(fields) != 1:
                raise RequestError(
                    f"a prompt dict has either prompt or prompt_token_ids, got {sorted(fields)}"
                )
            ((key, prompt),) = fields.items()
            if isinstance(prompt, str) != (key == "prompt"):
                wanted = "text" if key == "prompt" else "a list of token ids"
                raise RequestError(f"{key} in a prompt dict must be {wanted}, got {shown(prompt)}")
        self._check_far_too_long("the prompt", prompt)
        text, token_ids = self._encode(prompt, add_special_tokens=add_special_tokens)
        if not token_ids:
            raise RequestError("the prompt is empty; it must have at least one token")
        self._check_length("the prompt", len(token_ids))
        self._check_vocabulary("prompt_token_ids", token_ids)
        token_ids = [int(token_id) for token_id in token_ids]
        return ParsedPrompt(text, token_ids, self._namespace(salt, len(token_ids)))

    def _encode(
        self, prompt: Any, name: str = "a prompt", *, add_special_tokens: bool = True
    ) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    f"{name} that is text needs the tokenizer, which skip_tokenizer_init=True left out"
                )
            if not prompt:
                return prompt, []
            return prompt, self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens, name=name)
        if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
            return None, [*prompt]
        raise RequestError(
            f"{name} is text or a list of token ids, a prompt may be a dict, got {shown(prompt)}"
        )

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
        prepared: Prepared,
        params: SamplingParams,
        tenant: str,
        now: float,
        index: int,
        seed: int,
    ) -> Request:
        prompt = prepared.prompt
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
            rules=prepared.rules,
            priority=params.priority,
            tenant=tenant,
            stops=prepared.stops,
            namespace=prompt.namespace,
            deadline=math.inf if params.timeout_s is None else now + params.timeout_s,
            metrics=RequestMetrics(now),
        )

    def _prompt_report(self, num_prompt_tokens: int, num_top: int) -> PromptReport:
        vocab_size, num_rows = self.model_config.vocab_size, num_prompt_tokens - 1
        size = 1 + (vocab_size if num_top < 0 else min(num_top, vocab_size))
        if size * num_rows > MAX_PROMPT_LOGPROBS:
            raise RequestError(
                f"prompt_logprobs {num_top} for {num_prompt_tokens} tokens would report {size * num_rows:,} "
                f"log-probabilities; at most {MAX_PROMPT_LOGPROBS:,} are reported of a prompt"
            )
        return PromptReport(0, num_rows, num_top)

    def _check_params(self, params: Any) -> None:
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be SamplingParams, got {shown(params)}")
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need the tokenizer, which skip_tokenizer_init=True left out")
        if params.num_samples > self.max_num_seqs:
            raise RequestError(
                f"{params.num_samples} samples cannot run at once; max_num_seqs is {self.max_num_seqs}"
            )
        self._check_vocabulary("stop_token_ids", params.stop_token_ids)
        self._check_vocabulary("allowed_token_ids", params.allowed_token_ids or ())
        self._check_vocabulary("logit_bias", [*(params.logit_bias or ())])

    def _token_rules(self, params: SamplingParams) -> TokenRules:
        breakers = params.dry_sequence_breakers if params.dry_multiplier else ()
        return self._rules_of(params.bad_words, breakers)

    def _new_rules(self, bad_words: Sequence[str], breakers: Sequence[str]) -> TokenRules:
        tokenizer = self.tokenizer
        if tokenizer is None:
            return TokenRules.of(bad_words, breakers, None, list)
        rules = TokenRules.of(bad_words, breakers, tokenizer.encode_bare, lambda: tokenizer.token_texts)
        for token_ids in rules.bad_words:
            self._check_vocabulary("a token of bad_words", token_ids)
        return rules

    def _check_vocabulary(self, name: str, token_ids: Sequence[int]) -> None:
        vocab_size = self.model_config.vocab_size
        for i, token_id in enumerate(token_ids):
            if isinstance(token_id, bool) or not isinstance(token_id, Integral):
                raise RequestError(f"{name}[{i}] must be an int, got {shown(token_id)}")
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"{name}[{i}] is {shown(int(token_id))}; the vocabulary is 0 to {vocab_size - 1}"
                )

    def _check_far_too_long(self, name: str, prompt: Any) -> None:
        """Refuse megabytes of text, or a range of more than memory holds, before all of it is looked at."""
        if isinstance(prompt, str):
            if self.tokenizer is not None:
                least = self.tokenizer.least_tokens(prompt, self.max_model_len)
                self._check_length(name, least, at_least="at least ")
        elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
            self._check_length(name, len(prompt))

    def _check_length(self, name: str, num_tokens: int, at_least: str = "") -> None:
        if num_tokens > self.max_model_len:
            raise RequestError(
                f"{name} has {at_least}{num_tokens} tokens, more than max_model_len {self.max_model_len}"
            )

    def _max_total_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Prompt and output together at most; one that could never fit is refused now, not left waiting."""
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


def _stops(params: SamplingParams) -> StopStrings | None:
    return stop_strings(tuple(params.stop)) if params.stop else None


def _check_tenant(tenant: object) -> None:
    if not isinstance(tenant, str):
        raise RequestError(f"tenant must be a string, got {shown(tenant)}")


def _sample_seed(seed: int, index: int) -> int:
    """The first sample's seed is the request's: it is what n=1 would have given."""
    return _digest(f"{seed}#{index}") if index else seed


def _digest(text: str) -> int:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "little")
