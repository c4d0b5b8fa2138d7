"""RequestFactory: makes requests from prompts and parameters, and validates everything up front."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from ..base.errors import RequestError, about
from ..base.validation import shown
from ..blocks.manager import BlockManager
from ..options.sampling_params import SamplingParams
from ..requests.request import (
    Grammar,
    Prompt,
    Request,
    RequestGroup,
    RequestInputs,
    RequestMetrics,
    SamplingState,
    derived_seed,
    sample_seed,
)
from ..requests.token_rules import TokenRules
from ..scheduler.policy import Policy
from ..text.prompt_parser import ParsedPrompt, PromptParser
from .model_text import ModelText
from .request_spec import (
    Prepared,
    ReportSpec,
    ReportTerms,
    RequestSpec,
    SampleSoFar,
    check_is_params,
    check_tenant,
)

if TYPE_CHECKING:
    from ..options.lora_request import LoRARequest
    from ..requests.prompt_report import PromptReport
    from ..requests.stop_strings import StopStrings
    from ..sampling.structured_outputs import Grammars
    from .adapters import Adapters

MAX_PROMPT_LOGPROBS = 2**22  # of one request; each takes about 200 bytes in its output


class RequestFactory:
    """Makes requests for one model and its KV cache."""

    def __init__(
        self,
        text: ModelText,
        block_manager: BlockManager,
        prompts: PromptParser,
        *,
        max_num_seqs: int,
        scheduling_policy: str | Policy,
        seed: int,
    ) -> None:
        self._text = text
        self.model_config = text.model_config
        self.block_manager = block_manager
        self.prompts = prompts
        self.tokenizer = text.tokenizer
        self.eos_token_ids = text.eos_token_ids
        self.max_model_len = prompts.max_model_len
        self.max_num_seqs = max_num_seqs
        self.seed = seed
        self.scheduling_policy = scheduling_policy
        self.adapters: Adapters | None = None
        self.default_params = text.default_params
        # Finding the tokens that contain a breaker reads the whole vocabulary; most requests share breakers.
        self._rules_of = lru_cache(maxsize=64)(self._new_rules)

    @cached_property
    def grammars(self) -> Grammars:
        """The compiler and cache of grammars for structured_outputs."""
        from ..sampling.structured_outputs import Grammars

        return Grammars(self.tokenizer, self.model_config.vocab_size, self.eos_token_ids)

    def new_group(self, request_id: str, spec: RequestSpec, now: float) -> RequestGroup:
        """Make a request with params.num_samples samples. The other samples are siblings of the first.

        Raises RequestError naming what is wrong.
        """
        self._check_head()
        params = spec.params(self.default_params)
        tenant = spec.tenant
        prepared = spec.prompt if isinstance(spec.prompt, Prepared) else self.prepare(spec.prompt, params)
        check_tenant(tenant)
        seed = derived_seed(self.seed, request_id) if params.seed is None else params.seed
        inputs = self._inputs(
            request_id, prepared, params, tenant, _deadline(params, now), part_of=spec.part_of
        )
        if spec.lora_request is not None:
            inputs = self._with_adapter(inputs, spec.lora_request)
        resumed = spec.resumed
        if resumed is not None:
            inputs = replace(inputs, is_resumed=True)
        indices = range(params.num_samples) if resumed is None else [output.sample for output in resumed]
        samples = [
            Request(
                inputs, index, sampling=SamplingState(sample_seed(seed, index)), metrics=RequestMetrics(now)
            )
            for index in indices
        ]
        if prepared.grammar is not None:
            for sample in samples:
                sample.sampling.grammar = prepared.grammar.copy()
        if resumed is not None:
            for sample, output in zip(samples, resumed, strict=True):
                self._check_given(sample, output.token_ids)
                self._go_on(sample, output)
        elif len(spec.generated_token_ids):
            self._resume(samples, spec.generated_token_ids)
        # Samples that have tokens of their own do not begin together at the end of the prompt.
        if not any(sample.num_output_tokens for sample in samples):
            samples[0].siblings = samples[1:]
        if params.prompt_logprobs is not None:
            length = len(prepared.prompt.token_ids)
            samples[0].report = self._prompt_report(length, params.prompt_logprobs)
        return RequestGroup(request_id, samples)

    def _with_adapter(self, inputs: RequestInputs, request: LoRARequest) -> RequestInputs:
        """Return the inputs of a request with an adapter, on which its KV depends."""
        if self.adapters is None:
            raise RequestError(
                f"the engine takes no LoRA adapters, got lora_request {request!r}: make it with "
                "enable_lora=True",
                param="lora_request",
            )
        number, namespace = self.adapters.find(request)
        return replace(inputs, adapter=number, lora_request=request, namespace=namespace + inputs.namespace)

    def _resume(self, samples: list[Request], generated: Sequence[int]) -> None:
        """Let the only sample go on after tokens that the user gives."""
        sample, *others = samples
        name = "generated_token_ids"
        if others or sample.inputs.wants_logprobs:
            given = "logprobs" if not others else "best_of" if sample.inputs.params.best_of else "n"
            raise RequestError(
                f"{name} does not go with {given}: one output goes on, without log-probabilities", param=name
            )
        self._check_given(sample, generated)
        least = sample.inputs.params.min_tokens
        for i, token_id in enumerate(generated):
            if token_id in sample.stop_ids and i >= least:
                raise RequestError(f"{name}[{i}] is {token_id}, which ends the output", param=name)
        self._go_on(sample, SampleSoFar(0, [*map(int, generated)]))
        reports = sample.inputs.params.prompt_logprobs is not None
        if reports and sample.namespace != sample.inputs.namespace:
            raise RequestError(
                f"{name} does not go with prompt_logprobs where prompt and output have {sample.num_tokens} "
                f"tokens: from {sample.inputs.long_from} on, longrope rotates the prompt otherwise",
                param=name,
            )

    def _check_given(self, sample: Request, generated: Sequence[int]) -> None:
        name = "generated_token_ids"
        num = len(generated)
        self.prompts.check_vocabulary(name, generated)
        if num >= (most := sample.inputs.max_total_tokens - sample.num_prompt_tokens):
            raise RequestError(
                f"{name} has {num} tokens, which leaves nothing to generate of at most {most}", param=name
            )

    @staticmethod
    def _go_on(sample: Request, so_far: SampleSoFar) -> None:
        """Let a sample go on after the tokens that another engine made."""
        num = len(so_far.token_ids)
        if not num:
            return
        logprob = so_far.cumulative_logprob or 0.0
        sample.inputs = replace(sample.inputs, num_given_tokens=num, given_logprob=logprob)
        sample.token_ids += so_far.token_ids
        if sample.inputs.wants_logprobs:
            from ..requests.prompt_report import REPORTED

            sample.sampling.logprobs = [REPORTED] * num
        grammar = sample.sampling.grammar
        if grammar is not None and not grammar.follow(sample):
            name = "generated_token_ids"
            raise RequestError(f"{name} is not in the language of structured_outputs", param=name)

    def prepare(self, prompt: Prompt | ParsedPrompt, params: SamplingParams) -> Prepared:
        """Do the slow part of `new_group`. Runs on any thread. Raises RequestError."""
        self._check_params(params)
        if isinstance(prompt, ParsedPrompt):
            self.prompts.check_parsed(parsed := prompt)
        else:
            parsed = self.prompts.parse(prompt, params.cache_salt)
        wanted = params.structured_outputs
        grammar = None if wanted is None else self.grammars.start(wanted)
        rules = self._token_rules(params)
        self._check_possible(params, self._stop_ids(params), rules, grammar)
        return Prepared(parsed, rules, _stops(params), grammar)

    def new_fork(
        self, request_id: str, parent: Request, params: SamplingParams | None, now: float
    ) -> RequestGroup:
        """Make a request that continues after the newest token of `parent`.

        params: by default the parent's, with a new seed for the fork. New stop strings apply to new text
            only.

        Raises RequestError naming what is wrong.
        """
        seed = derived_seed(self.seed, request_id)
        inherited = parent.inputs
        if params is None:
            params = inherited.params
        elif isinstance(params, SamplingParams):
            seed = seed if params.seed is None else params.seed
            params = replace(params, priority=params.priority or inherited.priority)
        self._check_params(params)
        if params.num_samples > 1:
            raise RequestError(
                f"a fork is one sequence, got {params.num_samples}; fork as often as there are to be",
                param="n",
            )
        salt = params.cache_salt
        if salt not in (None, inherited.params.cache_salt) and not inherited.namespace.endswith(
            self.prompts.namespace(salt, parent.num_prompt_tokens)
        ):
            raise RequestError(
                f"cache_salt of a fork must be None or its parent's, whose blocks it shares, got {salt!r}",
                param="cache_salt",
            )
        parsed = ParsedPrompt(inherited.prompt, inherited.prompt_token_ids, inherited.namespace)
        rules = inherited.rules if params is inherited.params else self._token_rules(params)
        prepared = Prepared(parsed, rules, _stops(params))
        same_deadline = params is inherited.params or params.timeout_s is None
        deadline = inherited.deadline if same_deadline else _deadline(params, now)
        inputs = self._inputs(request_id, prepared, params, inherited.tenant, deadline)
        same_stops = params.stop == inherited.params.stop
        num_unstopped = inherited.num_unstopped_tokens if same_stops else parent.num_output_tokens
        inputs = replace(
            inputs,
            num_unstopped_tokens=num_unstopped,
            adapter=inherited.adapter,
            lora_request=inherited.lora_request,
        )
        if inputs.max_total_tokens <= parent.num_tokens:
            raise RequestError(
                f"max_tokens {params.max_tokens} leaves a fork nothing to generate: its parent has "
                f"{parent.num_output_tokens} tokens already",
                param="max_tokens",
            )
        child = Request(inputs, sampling=SamplingState(seed), metrics=RequestMetrics(now))
        child.token_ids = parent.token_ids.copy()
        if inputs.wants_logprobs:
            if not inherited.wants_logprobs:
                raise RequestError(
                    f"logprobs of a fork must be None as its parent's, got {params.logprobs}: there are "
                    "none for the tokens they share",
                    param="logprobs",
                )
            child.sampling.logprobs = parent.sampling.logprobs.copy()
        if params.prompt_logprobs is not None:
            # Positions of the shared prompt that are computed already cannot be reported to the fork alone.
            if parent.report is None or params.prompt_logprobs != inherited.params.prompt_logprobs:
                raise RequestError(
                    f"prompt_logprobs of a fork must be None, or its parent's "
                    f"{inherited.params.prompt_logprobs}, got {params.prompt_logprobs}",
                    param="prompt_logprobs",
                )
            child.report = parent.report.fork()
        grammar = child.sampling.grammar = self._grammar_of_fork(child, parent)
        self._check_possible(params, inputs.stop_ids, rules, grammar, parent.num_output_tokens)
        return RequestGroup(request_id, [child])

    def new_report(
        self, request_id: str, spec: ReportSpec[object], terms: ReportTerms, now: float
    ) -> RequestGroup:
        """Make a request that generates no tokens and only reports on its prompt.

        Raises RequestError naming what is wrong.
        """
        report = spec.report(self._text)
        if report.num_top is not None:
            self._check_head()
        params = terms.params()
        self._check_priority(terms.priority)
        deadline = _deadline(params, now)
        inputs = self._inputs(
            request_id,
            Prepared(spec.prompt),
            params,
            terms.tenant,
            deadline,
            generates=False,
            part_of=terms.part_of,
        )
        if terms.lora_request is not None:
            inputs = self._with_adapter(inputs, terms.lora_request)
        request = Request(inputs, report=report, metrics=RequestMetrics(now))
        return RequestGroup(request_id, [request])

    def _grammar_of_fork(self, child: Request, parent: Request) -> Grammar | None:
        wanted = child.inputs.params.structured_outputs
        if wanted is None:
            return None
        grammar: Grammar
        if parent.sampling.grammar is not None and wanted == parent.inputs.params.structured_outputs:
            grammar = parent.sampling.grammar.copy()
        else:
            grammar = self.grammars.start(wanted)
        if not grammar.follow(child):
            raise RequestError(
                f"structured_outputs {wanted.kind} does not allow the {parent.num_output_tokens} tokens that "
                "the parent has generated",
                param="structured_outputs",
            )
        return grammar

    def _inputs(
        self,
        request_id: str,
        prepared: Prepared,
        params: SamplingParams,
        tenant: str,
        deadline: float,
        *,
        generates: bool = True,
        part_of: str = "",
    ) -> RequestInputs:
        prompt = prepared.prompt
        return RequestInputs(
            request_id=request_id,
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            params=params,
            max_total_tokens=self._max_total_tokens(len(prompt.token_ids), params),
            stop_ids=self._stop_ids(params),
            rules=prepared.rules,
            stops=prepared.stops,
            generates=generates,
            priority=params.priority,
            tenant=tenant,
            part_of=part_of,
            namespace=prompt.namespace,
            long_from=self.prompts.long_from,
            deadline=deadline,
        )

    def _check_possible(
        self,
        params: SamplingParams,
        stop_ids: frozenset[int],
        rules: TokenRules,
        grammar: Grammar | None,
        num_tokens: int = 0,
    ) -> None:
        """Raise RequestError where parameters that exclude tokens leave none; most exclude none."""
        excludes = rules.bad_words or params.min_tokens or params.allowed_token_ids is not None
        if not excludes and grammar is None:
            return
        from ..requests.contradictions import check_possible

        vocab_size = self.model_config.vocab_size
        check_possible(params, stop_ids, rules, grammar, vocab_size=vocab_size, num_tokens=num_tokens)

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        eos = frozenset[int]() if params.ignore_eos else self.eos_token_ids
        return eos.union(params.stop_token_ids)

    def _prompt_report(self, num_prompt_tokens: int, num_top: int) -> PromptReport:
        vocab_size = self.model_config.vocab_size
        num_rows = num_prompt_tokens - 1
        size = 1 + (vocab_size if num_top < 0 else min(num_top, vocab_size))
        if size * num_rows > MAX_PROMPT_LOGPROBS:
            raise RequestError(
                f"prompt_logprobs {num_top} for {num_prompt_tokens} tokens would report {size * num_rows:,} "
                f"log-probabilities; at most {MAX_PROMPT_LOGPROBS:,} are reported of a prompt",
                param="prompt_logprobs",
            )
        from ..requests.prompt_report import PromptReport

        return PromptReport(0, num_rows, num_top)

    def _check_head(self) -> None:
        if not self.model_config.has_head:
            raise RequestError(
                f"this {self.model_config.architecture} was saved without its head, as a model that makes "
                "embeddings alone: it gives no tokens and no log-probabilities",
                param="model",
            )

    def _check_params(self, params: SamplingParams) -> None:
        check_is_params(params)
        if params.stop and self.tokenizer is None:
            raise RequestError(
                "stop strings need the tokenizer, which skip_tokenizer_init=True left out", param="stop"
            )
        if params.num_samples > self.max_num_seqs:
            name = "n" if params.best_of is None else "best_of"
            raise RequestError(
                f"{name} {params.num_samples} is more samples than can run at once; max_num_seqs is "
                f"{self.max_num_seqs}",
                param=name,
            )
        self._check_priority(params.priority)
        self.prompts.check_vocabulary("stop_token_ids", params.stop_token_ids)
        self.prompts.check_vocabulary("allowed_token_ids", params.allowed_token_ids or ())
        self.prompts.check_vocabulary("logit_bias", [*(params.logit_bias or ())])

    def _check_priority(self, priority: object) -> None:
        policy = self.scheduling_policy
        if priority and isinstance(policy, str) and policy != "priority":
            raise RequestError(
                f"priority {shown(priority)} needs scheduling_policy='priority'; this engine has {policy!r}",
                param="priority",
            )

    def _token_rules(self, params: SamplingParams) -> TokenRules:
        breakers = params.dry_sequence_breakers if params.dry_multiplier else ()
        return self._rules_of(params.bad_words, breakers)

    def _new_rules(self, bad_words: Sequence[str], breakers: Sequence[str]) -> TokenRules:
        tokenizer = self.tokenizer
        if tokenizer is None:
            return TokenRules.of(bad_words, breakers, None, list)
        rules = TokenRules.of(bad_words, breakers, tokenizer.encode_bare, lambda: tokenizer.token_texts)
        for token_ids in rules.bad_words:
            with about("bad_words"):
                self.prompts.check_vocabulary("a token of bad_words", token_ids)
        return rules

    def _max_total_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Return the limit of prompt and output together.

        Raises RequestError if that many tokens can never fit the KV cache: the request would wait forever.
        """
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
                f"the KV cache of {capacity} tokens; raise num_blocks, lower max_tokens or unpin a prefix",
                param="prompt",
            )
        if params.min_tokens > most - num_prompt_tokens:
            raise RequestError(
                f"min_tokens {params.min_tokens} is more than the {most - num_prompt_tokens} that there is "
                f"room for after a prompt of {num_prompt_tokens}",
                param="min_tokens",
            )
        return most


def _deadline(params: SamplingParams, now: float) -> float:
    return math.inf if params.timeout_s is None else now + params.timeout_s


def _stops(params: SamplingParams) -> StopStrings | None:
    if not params.stop:
        return None
    from ..requests.stop_strings import stop_strings

    return stop_strings(tuple(params.stop))
