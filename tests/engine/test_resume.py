"""generated_token_ids: a request goes on from tokens that another engine made."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paged import LLMEngine, RequestError, RequestOutput, RequestOutputKind, SamplingParams
from paged import StructuredOutputsParams as Structured
from tests.support.checkpoints import assert_all_free

PROMPT = "def fibonacci(n):"
SAMPLED = SamplingParams(temperature=0.9, seed=7, max_tokens=24, repetition_penalty=1.2)


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    return LLMEngine("demo", num_blocks=256)


def run(engine: LLMEngine, params: SamplingParams, given: list[int]) -> list[RequestOutput]:
    engine.add_request("r", PROMPT, params, generated_token_ids=given)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert_all_free(engine)
    return outputs


@pytest.mark.parametrize("num_given", [1, 5, 23])
@pytest.mark.parametrize(
    "params",
    [
        replace(SAMPLED, temperature=0.0, repetition_penalty=1.0),
        SAMPLED,
        replace(SAMPLED, structured_outputs=Structured(regex="[a-z ]{60,}")),
        replace(SAMPLED, dry_multiplier=0.8, bad_words=["the"], min_tokens=20),
    ],
    ids=["greedy", "penalty", "regex", "dry"],
)
def test_the_tokens_are_those_of_an_undisturbed_run(engine, params, num_given):
    (whole,) = engine.generate(PROMPT, params, use_tqdm=False)
    given = whole.outputs[0].token_ids[:num_given]
    before = engine.stats()
    last = run(engine, params, given)[-1]
    after = engine.stats()
    # Of the given tokens some are cached too; they are no tokens of a prompt.
    counts = [after.num_prompt_tokens - before.num_prompt_tokens, len(whole.prompt_token_ids)]
    assert counts[0] == counts[1] >= after.num_cached_tokens - before.num_cached_tokens
    assert last.outputs[0] == whole.outputs[0]
    assert last.prompt_token_ids == whole.prompt_token_ids


def test_deltas_hold_only_what_is_new(engine):
    """Also where the given tokens end within text that may become a stop string."""
    (whole,) = engine.generate(PROMPT, SAMPLED, use_tqdm=False)
    text, token_ids = whole.outputs[0].text, whole.outputs[0].token_ids
    params = replace(SAMPLED, stop=text[8:12] + "\x00", output_kind=RequestOutputKind.DELTA)
    every = [output.outputs[0] for output in run(engine, params, [])]
    for num_given in range(1, 24):
        shown = "".join(delta.text for delta in every[:num_given])
        deltas = [output.outputs[0] for output in run(engine, params, token_ids[:num_given])]
        assert [i for delta in deltas for i in delta.token_ids] == token_ids[num_given:]
        assert shown + "".join(delta.text for delta in deltas) == text


@pytest.mark.parametrize(
    ("change", "given", "message"),
    [
        ({"n": 2}, [5], "does not go with n"),
        ({"best_of": 2}, [5], "does not go with best_of"),
        ({"logprobs": 0}, [5], "does not go with logprobs"),
        ({}, [5] * 24, "leaves nothing to generate"),
        ({}, [5, -1], r"generated_token_ids\[1\] is -1"),
        ({}, [5, 10**9], r"generated_token_ids\[1\]"),
        ({"stop_token_ids": [6]}, [5, 6], r"generated_token_ids\[1\] is 6, which ends the output"),
        ({"structured_outputs": Structured(regex="[0-9]+")}, [40, 41, 42], "not in the language"),
    ],
)
def test_wrong_tokens_are_refused(engine, change, given, message):
    with pytest.raises(RequestError, match=message):
        engine.add_request("r", PROMPT, replace(SAMPLED, **change), generated_token_ids=given)
    assert not engine.has_unfinished_requests()
