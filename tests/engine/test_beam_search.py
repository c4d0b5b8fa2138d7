"""Beam search finds the beams and scores of transformers, whatever the scheduler does."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paged import BeamSearchOutput, BeamSearchParams, LLMEngine, PagedError, RequestError, SamplingParams
from tests.support.checkpoints import (
    VOCAB_SIZE,
    assert_all_free,
    checkpoint,
    new_engine,
    ragged_prompts,
    reference,
)

PROMPTS = ragged_prompts([1, 9, 33])


@functools.cache
def expected(name: str, prompt: tuple[int, ...], eos: tuple[int, ...], **options: Any) -> tuple[Any, Tensor]:
    """Return what transformers finds: the generated tokens of all beams, up to EOS, and their scores."""
    model = copy.deepcopy(reference(name).model)
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        num_return_sequences=options["num_beams"],
        eos_token_id=list(eos) or None,
        pad_token_id=VOCAB_SIZE - 1,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    rows = []
    for row in found.sequences[:, len(prompt) :].tolist():
        ends = [i + 1 for i, token in enumerate(row) if token in eos]
        rows.append(row[: ends[0]] if ends else row)
    return rows, found.sequences_scores


@pytest.fixture(scope="module")
def eos() -> tuple[int, ...]:
    """Return two EOS ids that end some beams of transformers early and others never."""
    rows, _ = expected("llama", tuple(PROMPTS[1]), (), num_beams=6, max_new_tokens=12)
    return (rows[0][4], rows[5][8])


def with_eos(engine: LLMEngine, eos: tuple[int, ...]) -> LLMEngine:
    engine.core.factory.eos_token_ids = frozenset(eos)
    return engine


def check(
    outputs: list[BeamSearchOutput],
    name: str,
    prompts: list[list[int]],
    eos: tuple[int, ...],
    params: BeamSearchParams,
) -> None:
    for output, prompt in zip(outputs, prompts, strict=True):
        rows, scores = expected(
            name,
            tuple(prompt),
            () if params.ignore_eos else eos,
            num_beams=params.beam_width,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
        )
        assert [sequence.tokens for sequence in output.sequences] == [prompt + row for row in rows]
        torch.testing.assert_close(
            torch.tensor([sequence.score for sequence in output.sequences]), scores, rtol=1e-5, atol=1e-5
        )
        for sequence, row in zip(output.sequences, rows, strict=True):
            assert sequence.cum_logprob == pytest.approx(sequence.score * len(row) ** params.length_penalty)
            ended = bool(eos) and not params.ignore_eos and row[-1] in eos
            assert sequence.finish_reason == ("stop" if ended else "length")


@pytest.mark.parametrize(
    ("length_penalty", "early_stopping"),
    [(1.0, False), (1.0, True), (1.0, "never"), (0.0, False), (2.5, False), (-1.0, "never")],
)
def test_beams_are_those_of_transformers(eos, length_penalty, early_stopping):
    engine = with_eos(new_engine(checkpoint("llama"), block_size=8), eos)
    ended = 0
    for beam_width, max_tokens in ((2, 20), (5, 16)):
        params = BeamSearchParams(
            beam_width=beam_width,
            max_tokens=max_tokens,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        outputs = engine.beam_search(PROMPTS, params, use_tqdm=False)
        check(outputs, "llama", PROMPTS, eos, params)
        ended += sum(s.finish_reason == "stop" for output in outputs for s in output.sequences)
        assert_all_free(engine)
    assert ended or length_penalty > 2  # longer beams win


def test_one_beam_is_greedy():
    engine = new_engine(checkpoint("llama"))
    for output, prompt in zip(search(engine, beam_width=1, max_tokens=8), PROMPTS, strict=True):
        assert [s.tokens for s in output.sequences] == [prompt + reference("llama").greedy(prompt, 8)[0]]


def search(engine: LLMEngine, prompts: Any = PROMPTS, **params: Any) -> list[BeamSearchOutput]:
    return engine.beam_search(prompts, BeamSearchParams(**params), use_tqdm=False)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"num_blocks": 9}),
        ("llama", {"num_blocks": 12, "enable_prefix_caching": False}),
        ("llama", {"num_blocks": 12, "preemption_mode": "swap", "swap_space": 0.001}),
        ("llama", {"max_num_seqs": 4, "max_waiting": 2, "max_num_batched_tokens": 7}),
        ("mistral", {"num_blocks": 14}),
        ("qwen2-mixed", {"num_blocks": 24}),
    ],
    ids=["tiny", "no cache", "swap", "few seats", "window", "mixed"],
)
def test_beams_are_the_same_when_the_scheduler_gets_in_their_way(eos, name, options):
    """Beams are preempted, wait for a place, and run beside requests that generate."""
    engine = with_eos(new_engine(checkpoint(name), block_size=8, watermark=0.0, **options), eos)
    beside = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    engine.add_request("beside", PROMPTS[1], beside)
    params = BeamSearchParams(beam_width=4, max_tokens=18)
    outputs = engine.beam_search(PROMPTS, params, use_tqdm=False)
    check(outputs, name, PROMPTS, eos, params)
    counters = engine.scheduler.counters
    assert counters.num_recomputed + counters.num_swapped or "max_waiting" in options
    finished = [output for output in iter_steps(engine) if output.finished]
    assert finished[0].outputs[0].token_ids == reference(name).greedy(PROMPTS[1], 20)[0]
    assert_all_free(engine)


def iter_steps(engine: LLMEngine) -> Any:
    while engine.has_unfinished_requests():
        yield from engine.step()


def test_beams_share_blocks_and_copy_only_the_last(monkeypatch):
    engine = new_engine(checkpoint("llama"), block_size=8)
    pool, update, most = engine.block_manager.pool, engine.scheduler.update, []
    monkeypatch.setattr(engine.scheduler, "update", lambda *args: most.append(pool.num_used) or update(*args))
    (prompt,) = ragged_prompts([65])
    search(engine, [prompt], beam_width=5, max_tokens=6)
    # The eight full blocks of the prompt are shared; each beam has a copy of the ninth.
    assert max(most) <= 8 + 5 + 1
    assert engine.scheduler.counters.num_prefill_tokens == 65
    assert_all_free(engine)


@pytest.mark.parametrize("where", ["schedule", "execute", "update", "fork"])
def test_interrupted_search_leaves_nothing_behind(monkeypatch, where):
    engine = new_engine(checkpoint("llama"), block_size=8, num_blocks=20)
    engine.add_request("beside", PROMPTS[1], SamplingParams(temperature=0, max_tokens=20))
    owner = engine.runner if where == "execute" else engine.scheduler
    part, calls = getattr(owner, where), iter(range(1000))

    def interrupted(*args: Any) -> Any:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return part(*args)

    monkeypatch.setattr(owner, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        search(engine, beam_width=3, max_tokens=9)
    engine.scheduler.check()
    finished = [output for output in iter_steps(engine) if output.finished]
    assert finished[0].outputs[0].token_ids == reference("llama").greedy(PROMPTS[1], 20)[0]
    assert_all_free(engine)


def test_beam_that_is_not_finite_ends_its_search_alone(monkeypatch):
    engine = new_engine(checkpoint("llama"))
    monkeypatch.setattr(engine.runner, "graphs", None)  # a recorded step would not call the replaced method
    logits, calls = engine.runner.model.logits, iter(range(1000))

    def broken(hidden: Tensor) -> Tensor:
        rows = logits(hidden)
        if next(calls) == 3:
            rows[1, 5] = torch.nan  # of the second beam of the first prompt
        return rows

    monkeypatch.setattr(engine.runner.model, "logits", broken)
    bad, good = search(engine, PROMPTS[:2], beam_width=2, max_tokens=6)
    assert (bad.sequences, len(good.sequences)) == ([], 2) or (good.sequences, len(bad.sequences)) == ([], 2)
    assert "not finite" in (bad.error or good.error)
    assert_all_free(engine)


def test_text_is_of_prompt_and_continuation():
    engine = new_engine("demo", skip_tokenizer_init=False)
    (output,) = search(engine, "def add(a, b):\n", beam_width=2, max_tokens=8)
    decode = engine.tokenizer.decode
    assert [s.text for s in output.sequences] == [decode(s.tokens) for s in output.sequences]
    assert all(s.text.startswith("def add(a, b):\n") for s in output.sequences)
    assert output.sequences[0].score >= output.sequences[1].score


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"beam_width": 0}, "beam_width must be at least 1, got 0"),
        ({"beam_width": True}, "beam_width must be an int, at least 1, got True"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"temperature": 0.5}, "temperature must be 0 in beam search, got 0.5"),
        (
            {"length_penalty": float("nan")},
            "length_penalty must be finite, at least -50, at",
        ),
        ({"early_stopping": "always"}, "early_stopping must be True, False or 'never', got 'always'"),
        ({"ignore_eos": None}, "ignore_eos must be True or False, got None"),
        ({"beam_width": 9}, "beam_width 9 cannot run at once; max_num_seqs is 8"),
        ({"max_tokens": 500}, r"prompts\[0\]: .*can never fit the KV cache of 128 tokens"),
        ({"top_k": 3}, "BeamSearchParams got an unknown argument 'top_k'"),
    ],
    ids=str,
)
def test_wrong_searches_are_refused(params, message):
    engine = new_engine(checkpoint("llama"), num_blocks=8, max_num_seqs=8)
    with pytest.raises(PagedError, match=message):
        search(engine, **{"beam_width": 2, "max_tokens": 4, **params})
    assert_all_free(engine)


def test_searches_for_nothing_are_refused():
    engine = new_engine(checkpoint("llama"), max_num_seqs=256)
    with pytest.raises(RequestError, match=r"prompts must have at least one entry, got \[\]"):
        search(engine, [], beam_width=2, max_tokens=4)
    with pytest.raises(RequestError, match="beam_width 106 looks at 212 tokens in each place; at most 211"):
        search(engine, beam_width=106, max_tokens=4)
    with pytest.raises(RequestError, match="params must be BeamSearchParams, got SamplingParams"):
        engine.beam_search(PROMPTS, SamplingParams())
    assert_all_free(engine)


@pytest.mark.parametrize("penalty", [10**300, 1e300, -1e300, 50.1])
def test_length_penalty_has_a_range(penalty):
    with pytest.raises(RequestError, match="length_penalty must be at least -50 and at most 50"):
        BeamSearchParams(beam_width=2, max_tokens=5, length_penalty=penalty)


def test_numbers_of_other_libraries_are_pythons_own():
    params = BeamSearchParams(
        beam_width=np.int64(2),
        max_tokens=np.uint8(3),
        temperature=np.float32(0),
        length_penalty=np.float16(2),
    )
    assert params == BeamSearchParams(beam_width=2, max_tokens=3, length_penalty=2.0)
    assert [type(value) for value in (params.beam_width, params.length_penalty)] == [int, float]
