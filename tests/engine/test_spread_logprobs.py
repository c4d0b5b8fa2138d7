"""Log-probabilities are made readable a bounded number in each step, and outputs are the same."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from paged import LLMEngine, RequestOutput, SamplingParams
from paged.engine import logprob_turns
from paged.engine.request_factory import RequestSpec
from paged.requests.request import RequestGroup
from paged.server import frames
from paged.server.engine_process import FrameOutbox
from paged.text import logprobs as module
from tests.support.checkpoints import assert_all_free, checkpoint, new_engine

PLACE = 4  # candidates of a place, by which a step may make more
REPORTS = {
    "prompt": SamplingParams(max_tokens=2, prompt_logprobs=3, ignore_eos=True, seed=1),
    "prompt alone": SamplingParams(max_tokens=2, prompt_logprobs=0, ignore_eos=True, seed=1),
    "samples": SamplingParams(max_tokens=9, logprobs=3, n=8, ignore_eos=True, seed=1),
    "best": SamplingParams(max_tokens=9, logprobs=2, n=2, best_of=4, ignore_eos=True, seed=1),
}


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    return new_engine(checkpoint("llama"))


def run(engine: LLMEngine, params: SamplingParams, num_requests: int = 3) -> list[RequestOutput]:
    for i in range(num_requests):
        engine.add_request(str(i), [1 + i, *range(2, 42)], params)
    finished = []
    while engine.has_unfinished_requests():
        finished += [output for output in engine.step() if output.finished]
    assert_all_free(engine)
    return sorted(finished, key=lambda output: int(output.request_id))


class Watch:
    """Counts candidates. excess: for each step, what was made beyond those of its tokens."""

    def __init__(self, engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.excess: list[int] = []
        self.made: Counter[RequestGroup] = Counter()
        made, readable, execute, step = [0], module._candidates, engine.runner.execute, engine.core.step
        read = engine.core.outputs.decode_logprobs

        def counted(*args: Any, **kwargs: Any) -> Any:
            made[0] += len(args[0].token_ids)
            return readable(*args, **kwargs)

        def executed(schedule: Any) -> Any:
            output = execute(schedule)
            made[0] -= sum(len(place.token_ids) for place in output.logprobs.values())
            return output

        def stepped(*args: Any, **kwargs: Any) -> Any:
            made[0] = 0
            advanced = step(*args, **kwargs)
            self.excess.append(made[0])
            return advanced

        def noted(group: RequestGroup, most: int) -> int:
            num = read(group, most)
            self.made[group] += num
            return num

        monkeypatch.setattr(module, "_candidates", counted)
        monkeypatch.setattr(engine.runner, "execute", executed)
        monkeypatch.setattr(engine.core, "step", stepped)
        monkeypatch.setattr(engine.core.outputs, "decode_logprobs", noted)
        monkeypatch.setattr(logprob_turns, "CANDIDATES_OF_STEP", 24)
        monkeypatch.setattr(logprob_turns, "CANDIDATES_ALONE", 24)
        monkeypatch.setattr(logprob_turns, "CANDIDATES_OF_EACH", 4)


@pytest.mark.parametrize("params", REPORTS.values(), ids=[*REPORTS])
def test_few_are_made_in_a_step_and_outputs_are_the_same(engine, monkeypatch, params):
    expected = run(engine, params)
    watch = Watch(engine, monkeypatch)
    found = run(engine, params)
    assert max(watch.excess) <= 24 + PLACE
    for output, other in zip(found, expected, strict=True):
        assert output.prompt_logprobs == other.prompt_logprobs
        assert output.outputs == other.outputs


def test_many_readers_share_one_budget_in_turn(engine, monkeypatch):
    watch = Watch(engine, monkeypatch)
    for i in range(20):
        engine.add_request(str(i), [1 + i, *range(2, 42)], REPORTS["prompt"])
    unfair = []
    while engine.has_unfinished_requests():
        engine.step()
        begun = [watch.made[group] for group in engine.core.groups.values()]
        unfair.append(max(begun, default=0) - min(begun, default=0))
    assert max(watch.excess) <= 24 + PLACE, "more than one budget"
    assert max(unfair) <= 24 + PLACE, "some got more than others"


@pytest.mark.parametrize("num_tokens", [1, 2, 41])
def test_an_engine_process_sends_those_of_a_prompt_as_they_are_made(engine, monkeypatch, num_tokens):
    """Sent with the first output, those of a long prompt would hold one step and one event loop."""
    prompt = [*range(1, 1 + num_tokens)]
    params = REPORTS["prompt"]
    (expected,) = engine.generate([prompt], params, use_tqdm=False)
    Watch(engine, monkeypatch)
    sent: list[frames.PromptPlaces] = []
    server: Any = SimpleNamespace(link=SimpleNamespace(send=sent.append), outputs=[], forget=lambda *_: None)
    engine.core.add("r", RequestSpec(prompt, params), FrameOutbox(7, "r", server))
    received = frames.Places[Any]()
    while engine.has_unfinished_requests():
        engine.core.step()
        assert sum(len(place[0]) for frame in sent for place in frame.places if place) <= 24 + PLACE
        assert not (sent and server.outputs[:-1]), "they come before the first token"
        for frame in sent:
            received.add(frame.places)
        sent.clear()
    assert received == expected.prompt_logprobs
    assert not engine.core.outputs._prompts
