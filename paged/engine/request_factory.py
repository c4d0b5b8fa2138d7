"""RequestFactory: makes requests from prompts and parameters, and validates everything up front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

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
    RequestSpec,
    check_is_params,
    check_tenant,
    deadline_of,
)

if TYPE_CHECKING:
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
        most_uncut: int,
        scheduling_policy: str | Policy,
        seed: int,
    ) -> None:
        self.text = text
        self.model_config = text.model_config
        self.block_manager = block_manager
        self.prompts = prompts
        self.tokenizer = text.tokenizer
        self.eos_token_ids = text.eos_token_ids
        self.max_model_len = prompts.max_model_len
        self.max_num_seqs = max_num_seqs
        self.most_uncut = most_uncut
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
        """Make a request with params.num_samples samples. The other samples are siblings of the first one.

        Raises RequestError, which names what is wrong.
        """
        self.check_head()
        params = spec.params(self.default_params)
        tenant = spec.tenant
        prepared = spec.prompt if isinstance(spec.prompt, Prepared) else self.prepare(spec.prompt, params)
        check_tenant(tenant)
        seed = derived_seed(self.seed, request_id) if params.seed is None else params.seed
        inputs = self.inputs(
            request_id, prepared, params, tenant, deadline_of(params, now), part_of=spec.part_of
        )
        if spec.lora_request is not None:
            inputs = self.with_adapter(inputs, spec.lora_request)
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
            from .resumed import resume

            resume(samples, resumed, self.prompts)
        elif len(spec.generated_token_ids):
            from .resumed import continue_output

            continue_output(samples, spec.generated_token_ids, self.prompts)
        # Samples that have tokens of their own do not begin together at the end of the prompt.
        if not any(sample.num_output_tokens for sample in samples):
            samples[0].siblings = samples[1:]
        if params.prompt_logprobs is not None:
            if inputs.uncut:
                raise RequestError(
                    f"prompt_logprobs is not supported for images of {self.model_config.architecture}, whose "
                    "tokens see later ones",
                    param="prompt_logprobs",
                )
            length = len(prepared.prompt.token_ids)
            samples[0].report = self._prompt_report(length, params.prompt_logprobs)
        return RequestGroup(request_id, samples)

    def with_adapter(self, inputs: RequestInputs, given: Any) -> RequestInputs:
        """Return the inputs of a request with its LoRA adapter, which changes the namespace of its KV.

        given: a `LoRARequest`, or a `ReadAdapter`.
        """
        request = getattr(given, "request", given)
        if self.adapters is None:
            raise RequestError(
                f"the engine takes no LoRA adapters, got lora_request {request!r}: make it with "
                "enable_lora=True",
                param="lora_request",
            )
        number, namespace = self.adapters.find(given)
        return replace(inputs, adapter=number, lora_request=request, namespace=namespace + inputs.namespace)

    def prepare(self, prompt: Prompt | ParsedPrompt, params: SamplingParams) -> Prepared:
        """Tokenize a prompt and compile its parameters: the slow part of `new_group`. Runs on any thread."""
        self.check_params(params)
        if isinstance(prompt, ParsedPrompt):
            self.prompts.check_parsed(parsed := prompt)
        else:
            parsed = self.prompts.parse(prompt, params.cache_salt)
        wanted = params.structured_outputs
        grammar = None if wanted is None else self.grammars.start(wanted)
        rules = self.token_rules(params)
        self.check_possible(params, self._stop_ids(params), rules, grammar)
        return Prepared(parsed, rules, stops_of(params), grammar)

    def inputs(
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
        """Return the immutable part of a request. Only its lengths are checked here."""
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
            images=prompt.images,
            uncut=self._uncut(prompt),
            long_from=self.prompts.long_from,
            deadline=deadline,
        )

    def _uncut(self, prompt: ParsedPrompt) -> tuple[tuple[int, int], ...]:
        """Return the runs of a prompt's tokens that see each other; see `runs_of`."""
        vision = self.model_config.vision
        if vision is None or not vision.sees_itself:
            return ()
        from ..scheduler.uncut import runs_of

        return runs_of(prompt.images, self.most_uncut)

    def check_possible(
        self,
        params: SamplingParams,
        stop_ids: frozenset[int],
        rules: TokenRules,
        grammar: Grammar | None,
        num_tokens: int = 0,
    ) -> None:
        """Raise RequestError if the parameters exclude every token. Most parameters exclude none."""
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

    def check_head(self) -> None:
        """Raise RequestError if the model has no output head."""
        if not self.model_config.has_head:
            raise RequestError(
                f"this {self.model_config.architecture} was saved without its head, as a model that makes "
                "embeddings alone: it gives no tokens and no log-probabilities",
                param="model",
            )

    def check_params(self, params: SamplingParams) -> None:
        """Raise RequestError if the parameters do not fit this engine."""
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
        self.check_priority(params.priority)
        self.prompts.check_vocabulary("stop_token_ids", params.stop_token_ids)
        self.prompts.check_vocabulary("allowed_token_ids", params.allowed_token_ids or ())
        self.prompts.check_vocabulary("logit_bias", [*(params.logit_bias or ())])

    def check_priority(self, priority: object) -> None:
        """Raise RequestError if a priority is given that the scheduling policy ignores."""
        policy = self.scheduling_policy
        if priority and isinstance(policy, str) and policy != "priority":
            raise RequestError(
                f"priority {shown(priority)} needs scheduling_policy='priority'; this engine has {policy!r}",
                param="priority",
            )

    def token_rules(self, params: SamplingParams) -> TokenRules:
        """Return the bad words and the breakers of DRY as tokens."""
        breakers = params.dry_sequence_breakers if params.dry_multiplier else ()
        return self._rules_of(params.bad_words, breakers)

    def _new_rules(self, bad_words: Sequence[str], breakers: Sequence[str]) -> TokenRules:
        if not bad_words and not breakers:
            return TokenRules()
        from ..requests.tokenized_rules import tokenized

        tokenizer = self.tokenizer
        if tokenizer is None:
            return tokenized(bad_words, breakers, None, list)
        rules = tokenized(bad_words, breakers, tokenizer.encode_bare, lambda: tokenizer.token_texts)
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


def stops_of(params: SamplingParams) -> StopStrings | None:
    """Return the automaton that finds the stop strings; None without stop strings."""
    if not params.stop:
        return None
    from ..requests.stop_strings import stop_strings

    return stop_strings(tuple(params.stop))
