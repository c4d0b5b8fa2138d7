"""Requests that go on after tokens that another engine made, or that the user gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..base.errors import RequestError
from ..requests.request import Request
from ..text.prompt_parser import PromptParser
from .request_spec import SampleSoFar


def resume(samples: Sequence[Request], resumed: Sequence[SampleSoFar], prompts: PromptParser) -> None:
    """Add to each sample the tokens that another engine generated, so that it continues after them."""
    for sample, output in zip(samples, resumed, strict=True):
        _check_given(sample, output.token_ids, prompts)
        _go_on(sample, output)


def continue_output(samples: list[Request], generated: Sequence[int], prompts: PromptParser) -> None:
    """Add the tokens that the user gives to the only sample, so that it continues after them."""
    sample, *others = samples
    name = "generated_token_ids"
    if others or sample.inputs.wants_logprobs:
        given = "logprobs" if not others else "best_of" if sample.inputs.params.best_of else "n"
        raise RequestError(
            f"{name} does not go with {given}: one output goes on, without log-probabilities", param=name
        )
    _check_given(sample, generated, prompts)
    least = sample.inputs.params.min_tokens
    for i, token_id in enumerate(generated):
        if token_id in sample.stop_ids and i >= least:
            raise RequestError(f"{name}[{i}] is {token_id}, which ends the output", param=name)
    _go_on(sample, SampleSoFar(0, [*map(int, generated)]))
    reports = sample.inputs.params.prompt_logprobs is not None
    if reports and sample.namespace != sample.inputs.namespace:
        raise RequestError(
            f"{name} does not go with prompt_logprobs where prompt and output have {sample.num_tokens} "
            f"tokens: from {sample.inputs.long_from} on, longrope rotates the prompt otherwise",
            param=name,
        )


def _check_given(sample: Request, generated: Sequence[int], prompts: PromptParser) -> None:
    name = "generated_token_ids"
    num = len(generated)
    prompts.check_vocabulary(name, generated)
    if num >= (most := sample.inputs.max_total_tokens - sample.num_prompt_tokens):
        raise RequestError(
            f"{name} has {num} tokens, which leaves nothing to generate of at most {most}", param=name
        )


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
