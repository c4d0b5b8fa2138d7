"""Sampling parameters in the engine: with preemption, with n > 1, forked, aborted, and refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from paged import LLMEngine, SamplingParams
from paged.base.errors import RequestError
from tests.support.checkpoints import VOCAB_SIZE, assert_all_free, checkpoint, new_engine, ragged_prompts

# Random sampling with every parameter whose effect depends on earlier tokens.
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"presence_penalty": 1.0, "top_k": 20},
    {"temperature": 0.0, "dry_multiplier": 3.0, "dry_allowed_length": 1, "dry_sequence_breakers": ()},
    {"frequency_penalty": 1.5, "top_p": 0.8, "logprobs": 2},
    {"min_tokens": 20, "stop_token_ids": list(range(0, VOCAB_SIZE, 2))},
    {"logit_bias": {7: 6.0}, "frequency_penalty": 0.5, "min_p": 0.05},
    {"allowed_token_ids": [*range(50)], "typical_p": 0.8, "repetition_penalty": 1.1},
    {
        "top_n_sigma": 1.5,
        "logits_processors": [lambda ids, row: row.index_fill(0, torch.tensor(ids[-3:]).long(), -9.0)],
    },
]


def params_of(**changes: Any) -> list[SamplingParams]:
    common = {"max_tokens": 24, "seed": 11}
    return [SamplingParams(**{**common, **params, **changes}) for params in PARAMS]


def check_histories(engine: LLMEngine) -> None:
    engine.runner.sampler.history.check()
    engine.runner.sampler.dry.check()


def run(engine: LLMEngine, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    """Return the outputs; check the sampler's token histories after every step."""
    for i, (prompt, chosen) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), prompt, chosen)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs.update((output.request_id, output) for output in engine.step())
        check_histories(engine)
    assert_all_free(engine)
    return [
        [(c.token_ids, c.finish_reason, c.logprobs and [*map(dict.keys, c.logprobs)]) for c in o.outputs]
        for _, o in sorted(outputs.items(), key=lambda item: int(item[0]))
    ]


@functools.cache
def roomy(n: int) -> list[Any]:
    params = params_of() if n == 1 else params_of(n=n, temperature=0.8)
    return run(new_engine(checkpoint("llama")), ragged_prompts([9, 17, 5, 30, 12, 20, 7, 3]), params)


@pytest.mark.parametrize(
    "options", [{}, {"preemption_mode": "swap", "swap_space": 0.1}], ids=["compute", "swap"]
)
def test_parameters_compose_with_preemption(options):
    engine = new_engine(checkpoint("llama"), num_blocks=12, block_size=16, **options)
    assert run(engine, ragged_prompts([9, 17, 5, 30, 12, 20, 7, 3]), params_of()) == roomy(1)
    counters = engine.scheduler.counters
    assert (counters.num_swapped if options else counters.num_recomputed) > 0


def test_parameters_compose_with_samples_of_one_prompt_and_preemption():
    params = params_of(n=2, temperature=0.8)
    engine = new_engine(checkpoint("llama"), num_blocks=14, block_size=16)
    assert run(engine, ragged_prompts([9, 17, 5, 30, 12, 20, 7, 3]), params) == roomy(2)
    assert engine.scheduler.counters.num_recomputed > 0


# Parameters of the text, or of which samples are returned.
TEXT_PARAMS: list[dict[str, Any]] = [
    {"bad_words": ["self", "return", " "]},
    {"stop": ["self.", ")\n"], "min_tokens": 4},
    {"stop": ["e", "\n"], "include_stop_str_in_output": True, "min_tokens": 6},
    {"best_of": 3},
    {"ignore_eos": True, "skip_special_tokens": False, "logit_bias": {0: 4.0}},
    {"ignore_eos": True, "skip_special_tokens": False, "spaces_between_special_tokens": False},
    {"cache_salt": "mine", "timeout_s": 600.0},
    {"detokenize": False, "logprobs": 1},
    {"dry_multiplier": 2.0, "dry_base": 3.0, "dry_allowed_length": 1, "dry_sequence_breakers": ["os"]},
    {"dry_multiplier": 2.0, "dry_penalty_last_n": 24},
]


def test_parameters_of_text_compose_with_samples_and_preemption():
    params = [SamplingParams(n=2, seed=5, max_tokens=40, **changes) for changes in TEXT_PARAMS]
    texts = [
        "class A:\n    def f(self",
        "x = [",
        "import",
        "def add(a, b):\n    ",
        "if",
        "for i in",
        "#",
        "a",
        "import os\nimport sys\nimport os\nimport",
        "x = [1, 1, 1, 1, 1, 1, 1, 1,",
    ]
    seen, preemptions = [], []
    for num_blocks in (512, 40):
        engine = new_engine("demo", skip_tokenizer_init=False, num_blocks=num_blocks, block_size=8)
        outputs = engine.generate(texts, params, use_tqdm=False)
        seen.append([[(c.token_ids, c.text, c.stop_reason) for c in o.outputs] for o in outputs])
        preemptions.append(engine.scheduler.counters.num_recomputed)
        assert_all_free(engine)
    assert seen[0] == seen[1]
    assert preemptions[0] == 0 < preemptions[1]
    stopped = [reason for _, _, reason in [*seen[0][1], *seen[0][2]]]
    assert set(stopped) <= {"self.", ")\n", "e", "\n", None}
    assert any(stopped)
    assert all("self" not in text for _, text, _ in seen[0][0])


def test_order_and_neighbours_do_not_matter():
    prompts, params = ragged_prompts([9, 17, 5, 30, 12, 20, 7, 3]), params_of()
    engine = new_engine(checkpoint("llama"), max_num_seqs=3, max_num_batched_tokens=16)
    assert run(engine, prompts[::-1], params[::-1]) == roomy(1)[::-1]


@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": 0.7, "presence_penalty": 0.5},
        {"dry_multiplier": 3.0, "dry_allowed_length": 1, "dry_sequence_breakers": ()},
    ],
    ids=["penalties", "DRY"],
)
def test_fork_counts_the_tokens_of_its_parent(params):
    engine = new_engine(checkpoint("llama"))
    penalised = SamplingParams(temperature=0.0, max_tokens=24, **params)
    prompt = ragged_prompts([9])[0]
    expected = run(new_engine(checkpoint("llama")), [prompt], [penalised])[0][0][0]
    engine.add_request("a", prompt, penalised)
    for _ in range(8):
        engine.step()
    engine.fork("a", "b")
    engine.step()
    engine.abort_request("a")
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        check_histories(engine)
    assert outputs[-1].outputs[0].token_ids == expected


def test_no_memory_is_left_of_requests_that_ended():
    engine = new_engine(checkpoint("llama"))
    history, dry = engine.runner.sampler.history, engine.runner.sampler.dry
    penalised = SamplingParams(
        frequency_penalty=0.5, max_tokens=3, dry_multiplier=1.0, dry_sequence_breakers=()
    )
    for round_ in range(6):
        for i in range(5):
            engine.add_request(str(i), [1 + i, 2], penalised)
        engine.step()
        engine.abort_request("0")
        while engine.has_unfinished_requests():
            engine.step()
        assert history.num_slots == 5 + 1 if round_ == 0 else history.num_slots <= 8
        assert dry.capacity <= 64
    engine.generate([[1, 2]], SamplingParams(max_tokens=1), use_tqdm=False)
    assert not len(history.slots.tensor)
    assert not dry.capacity
    check_histories(engine)


def test_error_of_a_request_ends_that_request_with_its_message():
    engine = new_engine(checkpoint("llama"))
    bad = [
        SamplingParams(
            temperature=0.0, max_tokens=5, logits_processors=[lambda ids, row: row[: 3 - len(ids)]]
        ),
        SamplingParams(logits_processors=[lambda _, row: row.fill_(-torch.inf)], max_tokens=5),
    ]
    plain = SamplingParams(temperature=0.0, max_tokens=5)
    first, second, third = engine.generate([[1, 2, 3]] * 3, [*bad, plain], use_tqdm=False)
    assert (first.outputs[0].finish_reason, second.outputs[0].finish_reason) == ("error", "error")
    assert first.outputs[0].stop_reason.startswith("logits_processors[0] must return a tensor of shape [211]")
    assert second.outputs[0].stop_reason.startswith("no token is left")
    assert (
        third.outputs[0].token_ids
        == engine.generate([[1, 2, 3]], plain, use_tqdm=False)[0].outputs[0].token_ids
    )
    assert_all_free(engine)


def test_what_needs_a_tokenizer_or_is_outside_the_vocabulary_is_refused():
    engine = new_engine(checkpoint("llama"))
    for params, message in (
        ({"bad_words": ["x"]}, "bad_words need the tokenizer"),
        ({"dry_multiplier": 1.0}, "dry_sequence_breakers need the tokenizer"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias.0. is 211; the vocabulary is 0 to 210"),
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids.0. is 211"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.add_request("a", [1], SamplingParams(**params))
    assert_all_free(engine)


def test_bad_words_are_never_completed():
    engine = LLMEngine("demo", num_blocks=64)
    prompt, greedy = "def add(a, b):\n    return", {"temperature": 0.0, "max_tokens": 12}
    free = engine.generate([prompt], SamplingParams(**greedy), use_tqdm=False)[0].outputs[0].token_ids
    # One token, and a sequence spelled as it was generated.
    encode, decode = engine.tokenizer.encode_bare, engine.tokenizer.hf.decode
    windows = (free[i : i + n] for n in (2, 3) for i in range(len(free) - n))
    words = [decode(free[5:6]), next(decode(w) for w in windows if w == encode(decode(w).lstrip()))]
    params = SamplingParams(**greedy, bad_words=words)
    banned = engine.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
    spelled = engine.core.factory.token_rules(params).bad_words

    def found(token_ids):
        return {w for w in spelled for i in range(len(token_ids)) if tuple(token_ids[i : i + len(w)]) == w}

    assert min(len(word) for word in found(free)) == 1
    assert max(len(word) for word in found(free)) > 1
    assert not found(banned)
