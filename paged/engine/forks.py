"""Forks: requests that continue from where another one is, and share its blocks."""

from __future__ import annotations

from dataclasses import replace

from ..base.errors import RequestError
from ..options.sampling_params import SamplingParams
from ..requests.request import (
    Grammar,
    Request,
    RequestGroup,
    RequestMetrics,
    SamplingState,
    derived_seed,
)
from ..text.prompt_parser import ParsedPrompt
from .request_factory import RequestFactory, stops_of
from .request_spec import Prepared, deadline_of


def new_fork(
    factory: RequestFactory,
    request_id: str,
    parent: Request,
    params: SamplingParams | None,
    now: float,
) -> RequestGroup:
    """Make a request that continues after the newest token of `parent`.

    params: by default the parent's, with a new seed. New stop strings apply to new text only.

    Raises RequestError, which names what is wrong.
    """
    seed = derived_seed(factory.seed, request_id)
    inherited = parent.inputs
    if params is None:
        params = inherited.params
    elif isinstance(params, SamplingParams):
        seed = seed if params.seed is None else params.seed
        params = replace(params, priority=params.priority or inherited.priority)
    factory.check_params(params)
    if params.num_samples > 1:
        raise RequestError(
            f"a fork is one sequence, got {params.num_samples}; fork as often as there are to be",
            param="n",
        )
    salt = params.cache_salt
    if salt not in (None, inherited.params.cache_salt) and not inherited.namespace.endswith(
        factory.prompts.namespace(salt, parent.num_prompt_tokens)
    ):
        raise RequestError(
            f"cache_salt of a fork must be None or its parent's, whose blocks it shares, got {salt!r}",
            param="cache_salt",
        )
    parsed = ParsedPrompt(inherited.prompt, inherited.prompt_token_ids, inherited.namespace, inherited.images)
    rules = inherited.rules if params is inherited.params else factory.token_rules(params)
    prepared = Prepared(parsed, rules, stops_of(params))
    same_deadline = params is inherited.params or params.timeout_s is None
    deadline = inherited.deadline if same_deadline else deadline_of(params, now)
    inputs = factory.inputs(request_id, prepared, params, inherited.tenant, deadline)
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
    grammar = child.sampling.grammar = _grammar_of_fork(factory, child, parent)
    factory.check_possible(params, inputs.stop_ids, rules, grammar, parent.num_output_tokens)
    return RequestGroup(request_id, [child])


def _grammar_of_fork(factory: RequestFactory, child: Request, parent: Request) -> Grammar | None:
    wanted = child.inputs.params.structured_outputs
    if wanted is None:
        return None
    grammar: Grammar
    if parent.sampling.grammar is not None and wanted == parent.inputs.params.structured_outputs:
        grammar = parent.sampling.grammar.copy()
    else:
        grammar = factory.grammars.start(wanted)
    if not grammar.follow(child):
        raise RequestError(
            f"structured_outputs {wanted.kind} does not allow the {parent.num_output_tokens} tokens that "
            "the parent has generated",
            param="structured_outputs",
        )
    return grammar
