"""Embeddings equal transformers' last_hidden_state: chunked, preempted, beside requests that generate."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from paged import RequestError, SamplingParams
from tests.support.checkpoints import assert_all_free, checkpoint, new_engine, ragged_prompts, reference

LENGTHS = (1, 2, 17, 64, 100)


def hidden_states(name: str, prompt: list[int]) -> Tensor:
    """Return f32[n, hidden_size], after the last norm."""
    model = copy.deepcopy(reference(name).model.model)
    return model(torch.tensor([prompt])).last_hidden_state[0].detach()


@pytest.mark.parametrize("name", ["llama", "mistral", "llama-dynamic"])
def test_embeddings_match_transformers(name, monkeypatch):
    """Prompts are longer than a step, some are cached, and another request generates."""
    engine = new_engine(checkpoint(name), block_size=8, max_num_batched_tokens=40)
    prompts = ragged_prompts(LENGTHS)
    engine.generate(prompts[2:4], SamplingParams(max_tokens=1), use_tqdm=False)
    head, num_logits = engine.runner.model.logits, []
    monkeypatch.setattr(
        engine.runner.model, "logits", lambda rows: num_logits.append(len(rows)) or head(rows)
    )
    engine.add_request("beside", prompts[0], SamplingParams(temperature=0, max_tokens=5))
    for pooling in ("last", "mean"):
        outputs = engine.encode(prompts, pooling=pooling, normalize=False, use_tqdm=False)
        for output, prompt in zip(outputs, prompts, strict=True):
            states = hidden_states(name, prompt)
            expected = states[-1] if pooling == "last" else states.mean(0)
            torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, rtol=1e-4, atol=1e-4)
            assert (output.finished, output.prompt_token_ids) == (True, prompt)
            cached = (len(prompt) - 1) // 8 * 8 if pooling == "last" and prompt in prompts[2:4] else 0
            assert output.num_cached_tokens == cached
    assert sum(num_logits) == 5  # of the request that generates
    (beside,) = engine.step()
    assert beside.outputs[0].token_ids == reference(name).greedy(prompts[0], 5)[0]
    assert_all_free(engine)


def test_embeddings_are_normalised():
    engine = new_engine(checkpoint("llama"))
    (prompt,) = ragged_prompts([7])
    (one,) = engine.encode(prompt, use_tqdm=False)
    vector = hidden_states("llama", prompt)[-1]
    torch.testing.assert_close(torch.tensor(one.outputs.embedding), vector / vector.norm())


def test_preempted_mean_counts_every_row_once(monkeypatch):
    """Decoding requests preempt one within its prompt, and steps fail after its rows are recorded."""
    engine = new_engine(
        checkpoint("llama"), block_size=8, num_blocks=14, long_prefill_token_threshold=3, watermark=0.0
    )
    *short, long = ragged_prompts([7, 7, 7, 7, 60])
    for i, prompt in enumerate(short):
        engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=30))
    preempt, midway = engine.scheduler.preemption.preempt, []

    def preempting(victim, schedule):
        midway.append(victim.report is not None and victim.report.next_row > 0)
        preempt(victim, schedule)

    monkeypatch.setattr(engine.scheduler.preemption, "preempt", preempting)
    (output,) = engine.encode([long], pooling="mean", normalize=False, use_tqdm=False)
    assert any(midway)
    expected = hidden_states("llama", long).mean(0)
    torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, rtol=1e-4, atol=1e-4)
    while engine.has_unfinished_requests():
        engine.step()
    assert_all_free(engine)


def test_last_token_left_over_by_a_chunk_is_no_decode():
    engine = new_engine(checkpoint("llama"), max_num_batched_tokens=16)
    (prompt,) = ragged_prompts([33])
    (output,) = engine.encode([prompt], normalize=False, use_tqdm=False)
    expected = hidden_states("llama", prompt)[-1]
    torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, rtol=1e-4, atol=1e-4)
    assert engine.scheduler.counters.num_decode_tokens == 0
    assert_all_free(engine)


def test_prompt_whose_states_are_not_finite_has_an_error_for_an_embedding():
    engine = new_engine(checkpoint("llama"))
    engine.runner.model.norm.weight[3] = torch.inf
    (output,) = engine.encode([[5, 6]], use_tqdm=False)
    assert output.outputs.embedding is None
    assert "not finite" in output.outputs.error
    assert_all_free(engine)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, r"prompts must have at least one entry, got \[\]"),
        ([[1]], {"pooling": "max"}, "pooling must be one of 'last', 'mean', 'cls', got 'max'"),
        ([[1]], {"pooling": ["mean"]}, "pooling must be one of"),
        ([[1]], {"normalize": 1}, "normalize must be True or False, got 1"),
        ([[1], [500]], {}, r"prompts\[1\]: prompt_token_ids\[0\] is 500; the vocabulary is 0 to 210"),
        ([[1], [1] * 600], {}, r"prompts\[1\]: the prompt has 600 tokens, more than max_model_len 512"),
        ([[1]], {"tenant": 3}, "tenant must be a string, got 3"),
        ([[1]], {"priority": "high"}, "priority must be a number, got 'high'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_embedded_is_refused(prompts, options, message):
    engine = new_engine(checkpoint("llama"))
    with pytest.raises(RequestError, match=message):
        engine.encode(prompts, use_tqdm=False, **options)
    assert_all_free(engine)
