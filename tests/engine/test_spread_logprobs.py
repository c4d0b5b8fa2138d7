"""Log-probabilities are made readable a bounded number in each step, and outputs are the same."""

from __future__ import annotations

import pytest

from paged import LLMEngine, RequestOutput, SamplingParams
from paged.engine import core
from paged.text import outputs as module
from tests.support.checkpoints import assert_all_free, checkpoint, new_engine

REPORTS = {
    "prompt": SamplingParams(max_tokens=2, prompt_logprobs=3, ignore_eos=True, seed=1),
    "samples": SamplingParams(max_tokens=9, logprobs=3, n=8, ignore_eos=True, seed=1),
    "best": SamplingParams(max_tokens=9, logprobs=2, n=2, best_of=4, ignore_eos=True, seed=1),
}


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    return new_engine(checkpoint("llama"))


def run(engine: LLMEngine, params: SamplingParams) -> list[RequestOutput]:
    for i in range(3):
        engine.add_request(str(i), [1 + i, *range(2, 42)], params)
    finished = []
    while engine.has_unfinished_requests():
        finished += [output for output in engine.step() if output.finished]
    assert_all_free(engine)
    return sorted(finished, key=lambda output: output.request_id)


@pytest.mark.parametrize("params", REPORTS.values(), ids=[*REPORTS])
def test_few_are_made_in_a_step_and_outputs_are_the_same(engine, monkeypatch, params):
    expected = run(engine, params)
    made, readable = [0], module._readable

    def counted(*args, **kwargs):
        made[0] += len(args[0].token_ids)
        return readable(*args, **kwargs)

    monkeypatch.setattr(module, "_readable", counted)
    monkeypatch.setattr(core, "CANDIDATES_OF_STEP", 24)
    monkeypatch.setattr(core, "CANDIDATES_ALONE", 24)
    monkeypatch.setattr(core, "CANDIDATES_OF_EACH", 4)
    most, step = [0], engine.core.step

    def watched(*args, **kwargs):
        made[0] = 0
        advanced = step(*args, **kwargs)
        most[0] = max(most[0], made[0])
        return advanced

    monkeypatch.setattr(engine.core, "step", watched)
    found = run(engine, params)
    assert 0 < most[0] <= 24 + 3 * 8
    for output, other in zip(found, expected, strict=True):
        assert output.prompt_logprobs == other.prompt_logprobs
        assert output.outputs == other.outputs
