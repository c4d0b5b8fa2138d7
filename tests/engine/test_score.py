"""Scores of continuations equal those of transformers and share the prompt's blocks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from paged import LLMEngine, RequestError, SamplingParams, ScoreOutput
from tests.support.checkpoints import assert_all_free, checkpoint, new_engine, ragged_prompts, reference


def expected_logprobs(model: Any, prompt: list[int], continuation: list[int]) -> torch.Tensor:
    """Return f32[len(continuation)]."""
    rows = copy.deepcopy(model)(torch.tensor([prompt + continuation])).logits[0, len(prompt) - 1 : -1]
    return rows.log_softmax(-1).gather(-1, torch.tensor(continuation)[:, None])[:, 0].detach()


def check(outputs: list[ScoreOutput], model: Any, prompt: list[int], continuations: list[list[int]]) -> None:
    for output, continuation in zip(outputs, continuations, strict=True):
        expected = expected_logprobs(model, prompt, continuation)
        told = torch.tensor(output.token_logprobs)
        torch.testing.assert_close(told, expected, rtol=0, atol=1e-4)
        assert (output.token_ids, output.num_tokens) == (continuation, len(continuation))
        assert output.logprob == pytest.approx(sum(output.token_logprobs))
        assert output.mean_logprob == pytest.approx(output.logprob / len(continuation))


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("name", ["llama", "qwen2-mixed", "llama-dynamic"])
def test_scores_match_transformers(name, caching):
    """Some continuations are longer than a step; one exceeds the context that the rope was trained for."""
    engine = new_engine(
        checkpoint(name), block_size=8, max_num_batched_tokens=48, enable_prefix_caching=caching
    )
    prompt, *continuations = ragged_prompts([29, 1, 1, 5, 50, 8])
    continuations.append(reference(name).greedy(prompt, 4)[0])
    engine.add_request("beside", prompt, SamplingParams(temperature=0, max_tokens=5))
    outputs = engine.score(prompt, continuations, use_tqdm=False)
    check(outputs, reference(name).model, prompt, continuations)
    assert outputs[-1].is_greedy
    assert not outputs[3].is_greedy
    while engine.has_unfinished_requests():
        engine.step()
    assert_all_free(engine)


def test_prompt_is_computed_once_and_only_continuations_have_logits(monkeypatch):
    engine = new_engine(checkpoint("llama"), block_size=8)
    prompt, *continuations = ragged_prompts([40, 3, 4, 5])
    head, num_rows = engine.runner.reporter.head, []
    monkeypatch.setattr(engine.runner.reporter, "head", lambda rows: num_rows.append(len(rows)) or head(rows))
    engine.score(prompt, continuations, use_tqdm=False)
    assert num_rows == [3 + 4 + 5]
    # The others hit four of the prompt's five blocks: its last token must be computed again for a logit.
    counters = engine.scheduler.counters
    assert (counters.num_prefill_tokens, counters.num_steps) == (40 + 3 + 8 + 4 + 8 + 5, 1)
    assert_all_free(engine)


def test_preempted_scores_are_the_same():
    engine = new_engine(
        checkpoint("llama"), block_size=8, num_blocks=14, long_prefill_token_threshold=3, watermark=0.0
    )
    *short, prompt = ragged_prompts([7, 7, 7, 7, 20])
    for i, other in enumerate(short):
        engine.add_request(str(i), other, SamplingParams(temperature=0, max_tokens=30))
    continuations = ragged_prompts([40, 9], seed=5)
    outputs = engine.score(prompt, continuations, use_tqdm=False)
    assert engine.scheduler.counters.num_recomputed
    check(outputs, reference("llama").model, prompt, continuations)


@pytest.fixture(scope="module")
def demo() -> LLMEngine:
    return new_engine("demo", skip_tokenizer_init=False)


def test_text_is_made_tokens_apart_from_the_prompt(demo):
    encode = demo.tokenizer.hf
    texts = ["return a + b", " return a - b", "\n"]
    tokens = [encode(text, add_special_tokens=False)["input_ids"] for text in texts]
    prompt = "def add(a, b):\n    "
    outputs = demo.score({"prompt": prompt, "cache_salt": "s"}, [*texts[:2], tokens[2]], use_tqdm=False)
    assert [output.token_ids for output in outputs] == tokens
    by_ids = demo.score(encode(prompt)["input_ids"], tokens, use_tqdm=False)
    assert [o.token_logprobs for o in by_ids] == [pytest.approx(o.token_logprobs, abs=1e-4) for o in outputs]
    assert outputs[0].mean_logprob > outputs[1].mean_logprob


@pytest.mark.parametrize(
    ("continuations", "message"),
    [
        ("text", "continuations must be a list of texts or token ids, got 'text'"),
        ([], "continuations must have at least one entry"),
        ([[1], []], r"continuations\[1\] is empty"),
        ([""], r"continuations\[0\] is empty"),
        ([[1], [9999]], r"continuations\[1\]\[0\] is 9999; the vocabulary is 0 to 4095"),
        ([[1], 7], r"continuations\[1\] is text or a list of token ids"),
        ([1, 2], r"continuations\[0\] is text or a list of token ids"),
        ([[1], [1] * 2048], r"continuations\[1\]: the prompt has 2050 tokens, more than max_model_len 2048"),
        ([range(10**12)], r"continuations\[0\] has 1000000000000 tokens, more than max_model_len"),
        (["\ud800"], "not valid Unicode"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_wrong_continuations_are_refused(demo, continuations, message):
    with pytest.raises(RequestError, match=message):
        demo.score([1, 2], continuations, use_tqdm=False)
    assert_all_free(demo)
