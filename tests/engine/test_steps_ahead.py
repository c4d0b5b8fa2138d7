"""Steps in flight of the same requests, on a CPU that is told to: the tokens are those of one at a time."""

from __future__ import annotations

import random
from typing import Any

import pytest

from paged import LLMEngine, SamplingParams, StructuredOutputsParams
from paged.base.errors import ConfigError
from paged.runner.model_runner import Pending
from paged.sampling.token_history import TokenHistory
from tests.support.checkpoints import checkpoint
from tests.support.engine_uses import WAYS_TO_SAMPLE, generated, with_steps_ahead

OPTIONS = {"dtype": "float32", "device": "cpu", "attention_backend": "torch", "max_model_len": 64}
WAYS: list[dict[str, Any]] = [
    *WAYS_TO_SAMPLE,
    {"seed": 9, "bad_words": ["def f"], "top_k": 9},
    {"seed": 4, "frequency_penalty": 0.4, "n": 2},
    {"seed": 4, "presence_penalty": 1.4, "stop": ["a", "e"]},
    {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(regex="[0-9]+,[a-z]+")},
]


def engine_of(depth: int, **options: Any) -> LLMEngine:
    engine = LLMEngine("demo", **{**OPTIONS, "num_blocks": 64, **options})
    return with_steps_ahead(engine, depth) if depth > 1 else engine


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_those_of_one_step_at_a_time(seed):
    rng = random.Random(seed)
    params = [SamplingParams(max_tokens=rng.randint(3, 16), ignore_eos=True, **way) for way in WAYS]
    prompts = [[rng.randint(5, 4000) for _ in range(rng.randint(1, 30))] for _ in WAYS]
    options = {
        "num_blocks": rng.choice([10, 64]),
        "max_num_seqs": rng.choice([3, 12]),
        "max_num_batched_tokens": rng.choice([16, 64]),
    }
    expected = generated(engine_of(1, **options), prompts, params)
    for depth in (2, 3):
        engine = engine_of(depth, **options)
        assert generated(engine, prompts, params) == expected
        engine.scheduler.check()
        assert not any(request.num_pending for request in engine.scheduler.running)


def test_what_the_device_has_counted_is_not_counted_again(monkeypatch):
    """No token of a request with penalties is sent, unless it has missed a step: then all of them are."""
    engine, sent = engine_of(2), []
    prepare = TokenHistory.prepare

    def preparing(self: TokenHistory, *given: Any) -> Any:
        recount = prepare(self, *given)
        sent.append(recount.slots is not None)
        return recount

    monkeypatch.setattr(TokenHistory, "prepare", preparing)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, frequency_penalty=0.3)
    engine.add_request("a", [5, 6, 7], params)
    engine.add_request("b", [5], SamplingParams(max_tokens=40, ignore_eos=True))
    tokens = {}
    for step in range(20):
        if step in (5, 8):
            engine.core.hold("a", step == 5)
        tokens |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
    assert sent == [True] + [False] * 5 + [True] + [False] * 5
    assert [tokens["a"]] == generated(engine_of(1), [[5, 6, 7]], params)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_failed_step_loses_no_token(error, monkeypatch):
    """Neither Ctrl-C nor an error, with two steps in flight."""
    engine, calls, result = engine_of(2), 0, Pending.result
    params = [SamplingParams(max_tokens=9, seed=i, ignore_eos=True, repetition_penalty=1.2) for i in (1, 2)]
    expected = generated(engine_of(1), [[5, 6], [7] * 20], params)

    def failing(self: Pending) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise error
        return result(self)

    monkeypatch.setattr(Pending, "result", failing)
    for i, prompt in enumerate([[5, 6], [7] * 20]):
        engine.add_request(str(i), prompt, params[i])
    tokens = {}
    while engine.has_unfinished_requests():
        try:
            tokens |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
        except error:
            assert not engine.core._in_flight
            assert all(r.num_pending == 0 for r in engine.scheduler.waiting())
    assert [tokens["0"], tokens["1"]] == expected
    assert calls > 4


def test_forks_in_flight_continue_their_parents():
    params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    outcomes = []
    for depth in (1, 2):
        engine = engine_of(depth)
        engine.add_request("parent", [*range(9, 30)], params)
        tokens: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[output.request_id] = output.outputs[0].token_ids
            if len(tokens.get("parent", ())) in (2, 5) and len(tokens) < 3:
                name = f"child {len(tokens['parent'])}"
                if name not in engine.core.groups:
                    engine.fork("parent", name)
        outcomes.append(tokens)
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0]) == 3


def test_a_hybrid_that_stops_in_flight_leaves_the_state_before_its_end():
    """Its last token is that of a block's end, and the step that goes on from there is in flight."""
    prompt, params = [*range(9, 19)], {"seed": 3, "max_tokens": 40, "ignore_eos": True}
    options = {**OPTIONS, "block_size": 8, "num_blocks": 64, "skip_tokenizer_init": True}
    outcomes = []
    for depth in (1, 2, 3):
        engine = LLMEngine(str(checkpoint("lfm2")), **options)
        if depth > 1:
            with_steps_ahead(engine, depth)
        whole = SamplingParams(**params)
        ((tokens,), (others,)) = (generated(engine, [prompt], whole), generated(engine, [[5]], whole))
        engine.reset_prefix_cache()
        assert tokens[14] not in tokens[:14]
        stops = SamplingParams(**params, stop_token_ids=[tokens[14]])
        assert generated(engine, [prompt], stops) == [tokens[:15]]
        (again,) = engine.generate([[*prompt, *tokens[:15], 5]], whole, use_tqdm=False)
        assert again.num_cached_tokens == 24
        outcomes.append((tokens, others, again.outputs[0].token_ids))
        engine.scheduler.check()
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_where_steps_cannot_overlap_it_is_refused_to_ask_for_it():
    assert LLMEngine("demo", **OPTIONS, num_blocks=8, async_scheduling=False).runner.num_in_flight == 1
    with pytest.raises(ConfigError, match=r"async_scheduling=True is for a GPU .* on cpu the host waits"):
        LLMEngine("demo", **OPTIONS, async_scheduling=True)
    with pytest.raises(ConfigError, match=r"for a model in one process, and this one has 2"):
        LLMEngine("demo", **OPTIONS, async_scheduling=True, pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match=r"async_scheduling must be True or False, got 2"):
        LLMEngine("demo", **OPTIONS, async_scheduling=2)
