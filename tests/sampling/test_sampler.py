"""The sampler: parameters by hand and against Hugging Face's processors, errors, and kept state."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from paged.kernels import reference
from paged.kernels.backend import BackendName, load_kernels
from paged.options.sampling_params import SamplingParams
from paged.requests.request import Request, RequestInputs, SamplingState
from paged.requests.token_rules import TokenRules
from paged.sampling.sampler import Sampler
from paged.scheduler.schedule import StepOutput

VOCAB_SIZE = 13
EVERYTHING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 4, "top_p": 0.9, "min_p": 0.01},
    {"top_k": 1},
    {"top_p": 0.6, "logprobs": 2},
    {"typical_p": 0.7},
    {"top_n_sigma": 1.0},
    {"repetition_penalty": 1.4},
    {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.3, "logprobs": 0},
    {"dry_multiplier": 1.0, "dry_allowed_length": 1},
    {"temperature": 0.0, "logit_bias": {3: 1.5, 0: -100.0}},
    {"allowed_token_ids": [1, 5, 7]},
    {"min_tokens": 9},
    {"logits_processors": [lambda _, row: row.neg()]},
]


def new_request(
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    *,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    bad_words: Sequence[tuple[int, ...]] = (),
    **params: Any,
) -> Request:
    rules = TokenRules(bad_words=tuple(bad_words))
    sampling = SamplingParams(**params)
    inputs = RequestInputs(
        prompt_token_ids=[*prompt],
        params=sampling,
        max_total_tokens=10**6,
        stop_ids=frozenset(stop_ids),
        rules=rules,
    )
    request = Request(inputs, sampling=SamplingState(seed))
    request.token_ids += output
    return request


@pytest.fixture(params=["torch", "numba"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the backend of every sampler in this file."""
    monkeypatch.setattr(sys.modules[__name__], "BACKEND", request.param)


BACKEND: BackendName = "torch"


def new_sampler(vocab_size: int = VOCAB_SIZE) -> Sampler:
    return Sampler(load_kernels(BACKEND), vocab_size, torch.device("cpu"))


def sample(logits: Tensor, requests: Sequence[Request]) -> StepOutput:
    return new_sampler(logits.shape[1]).sample(logits.clone(), requests)


def edited(logits: Tensor, request: Request) -> Tensor:
    """Return the row that a logits processor, the last of the edits, gets."""
    seen: list[Tensor] = []
    params = replace(request.inputs.params, logits_processors=[lambda _, row: seen.append(row) or row])
    request.inputs = replace(request.inputs, params=params)
    sample(logits[None], [request])
    return seen[0]


def row_of(vocab_size: int = VOCAB_SIZE, seed: int = 3) -> Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


# Each edit by hand


def test_penalties_by_hand():
    row = torch.tensor([2.0, -2.0, 1.0, 0.0, 5.0])
    repetition = new_request([0, 1], [2], repetition_penalty=2.0)
    assert edited(row, repetition).tolist() == [1.0, -4.0, 0.5, 0.0, 5.0]
    counted = new_request([0, 1], [2, 4, 4], frequency_penalty=0.5, presence_penalty=0.25)
    assert edited(row, counted).tolist() == [2.0, -2.0, 0.25, 0.0, 3.75]


def test_logit_bias_allowed_tokens_and_bad_words_by_hand():
    row = torch.tensor([2.0, -2.0, 1.0, 0.0, 5.0])
    no = -math.inf
    assert edited(row, new_request(logit_bias={1: 3.0, 4: -100.0})).tolist() == [2.0, 1.0, 1.0, 0.0, -95.0]
    assert edited(row, new_request(allowed_token_ids=[1, 3])).tolist() == [no, -2.0, no, 0.0, no]
    # A bias does not make a token allowed.
    both = new_request(allowed_token_ids=[1, 3], logit_bias={4: 100.0, 3: 1.0})
    assert edited(row, both).tolist() == [no, -2.0, no, 1.0, no]
    words = [(2,), (3, 4), (3, 1, 0), (0, 0)]
    # Only generated tokens count as parts of a bad word, not the prompt.
    assert edited(row, new_request([3], [], bad_words=words)).tolist() == [2.0, -2.0, no, 0.0, 5.0]
    assert edited(row, new_request([0], [3], bad_words=words)).tolist() == [2.0, -2.0, no, 0.0, no]
    assert edited(row, new_request([0], [3, 1], bad_words=words)).tolist() == [no, -2.0, no, 0.0, 5.0]
    assert edited(row, new_request([3], [1], bad_words=words)).tolist() == [2.0, -2.0, no, 0.0, 5.0]


def test_min_tokens_bans_stop_ids_until_reached():
    sampler, row = new_sampler(3), torch.tensor([[0.0, 40.0, 0.0]])
    request = new_request(min_tokens=2, stop_ids=[1])
    for expected in ({0, 2}, {0, 2}, {1}):
        (token,) = sampler.sample(row.clone(), [request]).tokens
        assert token in expected
        request.token_ids.append(token)
    # With ignore_eos there are no stop tokens to mask.
    assert sample(row, [new_request(min_tokens=1)]).tokens == [1]


def test_greedy_chooses_the_most_likely_token_and_the_first_of_equals():
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 3.0, 1.0]])
    assert sample(logits, [new_request(temperature=0.0)] * 2).tokens == [1, 0]
    # Also with other requests, and with logprobs.
    requests = [new_request(temperature=0.0, logprobs=1), new_request(temperature=0.0)]
    assert sample(logits, requests).tokens == [1, 0]
    assert sample(logits, [requests[1], new_request(top_k=1)]).tokens[0] == 1


# Against Hugging Face


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 211])
def test_edits_equal_those_of_hugging_face(vocab_size):
    row, prompt, output = row_of(vocab_size), [1, 5, 5, 2], [7, 3, 7]
    words, ids = [(4,), (3, 7), (7, 3), (3, 7, 9)], torch.tensor([[*prompt, *output]])
    cases: list[tuple[LogitsProcessor, dict[str, Any]]] = [
        (RepetitionPenaltyLogitsProcessor(1.7), {"repetition_penalty": 1.7}),
        (
            SequenceBiasLogitsProcessor([[[2], 1.5], [[11], -3.0]]),
            {"logit_bias": {2: 1.5, 11: -3.0}},
        ),
        (NoBadWordsLogitsProcessor([[*w] for w in words], eos_token_id=None), {"bad_words": words}),
        (PrefixConstrainedLogitsProcessor(lambda *_: [3, 7, 9], 1), {"allowed_token_ids": [9, 3, 7]}),
        (MinNewTokensLengthLogitsProcessor(4, 4, [6, 8]), {"min_tokens": 4, "stop_ids": [6, 8]}),
        (MinNewTokensLengthLogitsProcessor(4, 3, [6, 8]), {"min_tokens": 3, "stop_ids": [6, 8]}),
    ]
    for processor, params in cases:
        expected = processor(ids, row[None].clone())[0]
        torch.testing.assert_close(edited(row, new_request(prompt, output, **params)), expected)


def test_a_window_of_repetitions_is_their_penalty_for_its_tokens_alone():
    row, tokens = row_of(), [1, 5, 5, 2, 7, 3, 7]
    for length in (1, 2, 4, 6, 99):
        for output in range(4):
            request = new_request(
                tokens[: 7 - output],
                tokens[7 - output :],
                repetition_penalty=1.7,
                repetition_penalty_last_n=length,
            )
            ids = torch.tensor([tokens[-length:]])
            expected = RepetitionPenaltyLogitsProcessor(1.7)(ids, row[None].clone())[0]
            assert torch.equal(edited(row, request), expected)
    none = new_request([1, 5], [2], repetition_penalty=1.7, repetition_penalty_last_n=0)
    assert torch.equal(edited(row, none), row)


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 211, 1009])
def test_logprobs_are_of_the_logits_before_any_parameter(vocab_size):
    logits = torch.stack([row_of(vocab_size, seed) for seed in range(6)])
    logits[5, 2:] = -math.inf
    expected = logits.double().log_softmax(-1)
    numbers = [0, 1, 5, -1, 2, 3]
    requests = [
        new_request(seed=i, logprobs=n, temperature=2.0, top_k=12, logit_bias={1: 5.0})
        for i, n in enumerate(numbers)
    ]
    step = sample(logits, requests)
    for row, n in enumerate(numbers):
        report = step.logprobs[row]
        order = expected[row].argsort(descending=True, stable=True).tolist()
        assert report.token_ids[0] == step.tokens[row]
        count = vocab_size if n < 0 else n
        assert sorted(report.token_ids[1:]) == sorted(order[:count]) or row == 5
        got = torch.tensor(report.logprobs).double()
        torch.testing.assert_close(got, expected[row, [*report.token_ids]], atol=1e-4, rtol=0)
        assert [*report.logprobs[1:]] == sorted(report.logprobs[1:], reverse=True)
        assert report.rank == order.index(report.token_ids[0]) + 1


# Errors


@pytest.mark.parametrize("params", EVERYTHING, ids=lambda params: "+".join(params))
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_row_without_a_finite_maximum_has_an_error_and_others_are_unaffected(value, params):
    requests = [new_request(seed=i, stop_ids=[1], **params) for i in range(4)]
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    sound = sample(logits, requests).tokens
    logits[1, 3] = value  # also where that token is not allowed
    logits[3] = -math.inf
    step = sample(logits, requests)
    assert step.tokens == [sound[0], None, sound[2], None]
    assert step.errors == dict.fromkeys((1, 3), ("the model's logits are not finite", "engine"))
    assert set(step.logprobs) <= {0, 2}


def test_processor_may_allow_and_report_a_token_that_the_model_excludes():
    row = torch.tensor([[0.0, 1.0, -math.inf]])
    bring_back = [lambda *_: torch.eye(3)[2] * 9.0]
    step = sample(row, [new_request(temperature=0.0, logprobs=0, logits_processors=bring_back)])
    assert (step.tokens, step.errors) == ([2], {})
    assert [*step.logprobs[0].logprobs] == [-math.inf]


def test_row_without_any_token_left_is_an_error():
    requests = [
        new_request(temperature=0.0, allowed_token_ids=[2, 3], bad_words=[(2,), (3,)]),
        new_request(allowed_token_ids=[2], min_tokens=1, stop_ids=[2], logprobs=1),
        new_request(logits_processors=[lambda _, row: row * math.nan]),
        new_request(),
    ]
    step = sample(torch.ones(4, VOCAB_SIZE), requests)
    assert [token is None for token in step.tokens] == [True, True, True, False]
    assert "no token is left" in step.errors[0].message
    assert "allowed_token_ids" in step.errors[1].message
    assert "not finite" in step.errors[2].message
    assert {error.kind for error in step.errors.values()} == {"request"}
    assert not step.logprobs


def test_logits_processor_of_three_arguments_gets_the_prompt_too():
    def seeing(prompt, ids, row):
        seen.append((prompt, ids))
        prompt.append(99)  # a copy
        return row

    seen: list[Any] = []
    requests = [new_request([1, 4], [2, 3], temperature=0.0, logits_processors=[seeing, lambda _, row: -row])]
    assert sample(torch.tensor([[0.0, 5.0, -1.0, 2.0, 3.0]]), requests).tokens == [2]
    assert seen == [([1, 4, 99], [2, 3])]
    assert requests[0].inputs.prompt_token_ids == [1, 4]


def test_logits_processors_get_the_output_and_their_row_and_fail_alone():
    def shout(ids, row):
        seen.append((ids, row.tolist()))
        ids.append(99)  # a copy: the request is not changed
        return torch.full_like(row, -1.0).index_fill_(0, torch.tensor(4), 1.0)

    seen: list[Any] = []
    requests = [
        new_request([1], [2, 3], temperature=0.0, logits_processors=[shout, lambda _, row: row.double()]),
        new_request(logits_processors=[lambda _, row: row, lambda *_: 1 / 0]),
        new_request(logits_processors=[lambda _, row: row[:3]]),
        new_request(logits_processors=[lambda _, row: [0.0] * len(row)]),
        new_request(logits_processors=[lambda _, row: row * math.nan]),
        new_request(temperature=0.0),
    ]
    logits = torch.eye(6, VOCAB_SIZE)
    step = sample(logits, requests)
    assert step.tokens == [4, None, None, None, None, 5]
    assert seen == [([2, 3, 99], logits[0].tolist())]
    assert requests[0].token_ids == [1, 2, 3]
    messages = {row: error.message for row, error in step.errors.items()}
    assert messages[1] == "logits_processors[1] raised ZeroDivisionError: division by zero"
    assert messages[2] == "logits_processors[0] must return a tensor of shape [13], got shape [3]"
    assert messages[3] == "logits_processors[0] must return a tensor of shape [13], got list"
    assert "not finite" in messages[4]


def test_grammar_masks_come_before_all_edits_and_after_logprobs():
    class Masks:
        def apply(self, _kernels, logits):
            logits[:, 5] = -math.inf

    logits = torch.eye(2, VOCAB_SIZE).roll(5, 1)
    requests = [new_request(temperature=0.0, logprobs=1), new_request(temperature=0.0, logit_bias={5: 99.0})]
    step = new_sampler().sample(logits, requests, Masks())
    assert 5 not in step.tokens[:1]
    assert step.logprobs[0].token_ids[1] == 5
    assert step.tokens == [0, 6]


# Batches


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 1009])
def test_tokens_do_not_depend_on_neighbours_or_order_or_what_was_sampled_before(vocab_size):
    def requests() -> list[Request]:
        return [
            new_request(
                [1, 2], [3, 1, 2, 1][: i % 5], seed=i, stop_ids=[1, 2], **EVERYTHING[i % len(EVERYTHING)]
            )
            for i in range(42)
        ]

    logits = torch.randn(42, vocab_size, generator=torch.Generator().manual_seed(1)) * 2
    together = sample(logits, requests())
    assert not together.errors
    for i, request in enumerate(requests()):
        alone = sample(logits[i : i + 1], [request])
        assert alone.tokens[0] == together.tokens[i], request.inputs.params
        assert alone.logprobs.get(0) == together.logprobs.get(i)
    assert sample(logits.flip(0), requests()[::-1]).tokens == together.tokens[::-1]
    # One sampler for changing batches: its kept state must not matter.
    sampler, shuffled = new_sampler(vocab_size), requests()
    for rows in ([*range(0, 42, 2)], [*range(42)], [5, 4, 3], [*range(42)]):
        step = sampler.sample(logits[rows], [shuffled[row] for row in rows])
        assert step.tokens == [together.tokens[row] for row in rows]
        sampler.history.check()
        sampler.dry.check()


def test_histories_follow_the_requests_of_the_batch():
    sampler = new_sampler()
    requests = [new_request([i], [], seed=i, presence_penalty=0.5, dry_multiplier=1.0) for i in range(6)]
    plain = new_request(temperature=0.0)
    generator = torch.Generator().manual_seed(0)
    for rows in ([0, 1], [0, 1], [1, 2, 3], [3, 0], [], [0, 4, 5, 1, 2, 3], [2], [2]):
        batch = [plain, *(requests[row] for row in rows)]
        step = sampler.sample(torch.randn(len(batch), VOCAB_SIZE, generator=generator), batch)
        sampler.history.check()
        sampler.dry.check()
        assert len(sampler.history.slots.tensor) == len(rows)
        for request, token in zip(batch, step.tokens, strict=True):
            request.token_ids.append(token)
    assert sampler.history.num_slots == 8  # doubled from 4, as 6 were needed


def test_batch_that_failed_half_way_leaves_no_state(monkeypatch):
    def fail(*_: Any) -> None:
        raise MemoryError

    params = {"repetition_penalty": 1.5, "dry_multiplier": 1.0, "dry_allowed_length": 1}
    requests = [new_request([1, 2, 1, i], [2, 1], seed=i, **params) for i in range(4)]
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    sampler = new_sampler()
    expected = sampler.sample(logits[:2].clone(), requests[:2]).tokens
    with monkeypatch.context() as patch:
        patch.setattr("paged.sampling.sampler.SentParameters", fail)
        with pytest.raises(MemoryError):
            sampler.sample(logits.clone(), requests[1:])
    # The same requests as before, but their old state must be gone.
    assert sampler.sample(logits[:2].clone(), requests[:2]).tokens == expected
    sampler.history.check()
    sampler.dry.check()
    assert len(sampler.history.slots.tensor) == 2


def test_greedy_batch_makes_no_other_pass_over_its_logits(monkeypatch):
    sampler, requests = new_sampler(), [new_request(temperature=0.0, top_k=5, top_p=0.5) for _ in range(3)]
    sampler.sample(torch.eye(3, VOCAB_SIZE), requests)
    for name in ("amax", "softmax", "log_softmax", "argmax"):
        monkeypatch.setattr(torch.Tensor, name, None)
    assert sampler.sample(torch.eye(3, VOCAB_SIZE), [*requests]).tokens == [0, 1, 2]


@pytest.mark.parametrize("size", [1, 7, 8, 17, 4097])
def test_greedy_is_the_first_of_the_highest(size):
    """With ties inside a vector and across vectors, with -inf, NaN and +inf, and in a wider tensor."""
    logits = torch.randint(-3, 3, (40, size)).float()
    logits[0], logits[1, size // 2], logits[2, -1], logits[3] = -torch.inf, torch.nan, torch.inf, -torch.inf
    logits[4, -1], logits[5, 0] = 7.0, torch.nan
    wide = torch.cat([logits, torch.full((40, 3), 9.0)], dim=1)[:, :size]
    for given in (logits, wide):
        tokens, highest = load_kernels(BACKEND).greedy(given)
        expected_tokens, expected = reference.greedy(logits)
        torch.testing.assert_close(highest, expected, rtol=0, atol=0, equal_nan=True)
        numbers = ~expected.isnan()
        assert torch.equal(tokens[numbers], expected_tokens[numbers])
