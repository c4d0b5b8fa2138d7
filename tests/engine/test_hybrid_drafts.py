"""Drafts change no bit of a model whose layers keep states, which see a token once it is known."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest

from paged import BeamSearchParams, LLMEngine, SamplingParams
from paged.drafting.drafter import Draft
from paged.drafting.drafters import new_drafter
from paged.options.speculative_config import SpeculativeConfig
from paged.requests.request import Request
from paged.runner.plan import StepPlan
from paged.scheduler.drafts import Drafts
from paged.scheduler.state_moves import SettledSeat
from tests.engine.test_hybrids import PROMPTS, SWAP, bits, run
from tests.support.checkpoints import HYBRIDS, VOCAB_SIZE, checkpoint, new_engine, reference
from tests.support.ranks import ranked_engines

MOST = 4
LENGTH = 48  # tokens of an answer
# The number of guesses, and how many of them are right before a wrong one.
GUESSES = [(number, right) for number in range(1, MOST + 1) for right in range(number + 1)]
FIXED: dict[str, Any] = {"num_speculative_tokens": MOST, "adaptive": False}
NGRAM = {"speculative_config": {"method": "ngram", **FIXED}}
GREEDY = SamplingParams(temperature=0.0, max_tokens=LENGTH, logprobs=1, ignore_eos=True)


class Scripted:
    """Guesses every number of tokens, with the first wrong one in every place, in turn."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        self.guesses = itertools.cycle(GUESSES)
        self.made = set[tuple[int, int]]()
        self._answers = answers

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        return [Draft(self._guess(request, limit)) for request, limit in zip(requests, limits, strict=True)]

    def answer_of(self, request: Request) -> list[int]:
        return self._answers[tuple(request.inputs.prompt_token_ids)]

    def _guess(self, request: Request, limit: int) -> list[int]:
        number, num_right = next(self.guesses)
        tokens = self.answer_of(request)[request.num_output_tokens :][: min(number, limit)]
        if len(tokens) == number:
            self.made.add((number, num_right))
        return [token if i < num_right else (token + 1 + i) % VOCAB_SIZE for i, token in enumerate(tokens)]


def scripted(engine, answers):
    """Let an engine's drafts be `Scripted`. Return the drafter."""
    drafter = Scripted({tuple(p): tokens for p, (tokens, _) in zip(PROMPTS, answers, strict=True)})
    engine.scheduler.drafts = Drafts(drafter, MOST, VOCAB_SIZE, 64)
    return drafter


def settled_seats(engine) -> list[SettledSeat]:
    """Return a list to which every step adds the runs that it ends before states are moved."""
    found = list[SettledSeat]()
    launch = engine.runner.launch

    def noted(plan: StepPlan) -> Any:
        found.extend(plan.computed.settled)
        return launch(plan)

    engine.runner.launch = noted
    return found


@pytest.fixture(scope="module")
def alone():
    """Return the bits of each prompt alone, computed whole and without drafts."""
    found = {}
    for name in HYBRIDS:
        engine = new_engine(checkpoint(name))
        found[name] = [run(engine, [prompt], LENGTH)[0][0] for prompt in PROMPTS]
    return found


@pytest.mark.parametrize("name", HYBRIDS)
def test_bits_do_not_depend_on_drafts(name, alone):
    """Of every number, the first wrong one in every place; all at once, in chunks, preempted both ways."""
    made = set()
    for options in ({}, {"preemption_mode": "recompute"}, SWAP):
        few = {"num_blocks": 9, "max_num_batched_tokens": 24} if options else {}
        engine = new_engine(checkpoint(name), **few, **options, **NGRAM)
        drafter = scripted(engine, alone[name])
        settled = settled_seats(engine)
        assert run(engine, PROMPTS, LENGTH)[0] == alone[name], options
        made |= drafter.made
        stats = engine.stats()
        assert bool(stats.num_swap_preemptions) == (options == SWAP)
        assert bool(stats.num_recompute_preemptions) == ("recompute" in options.values())
        assert settled or options != SWAP
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
        if not options:  # from snapshots, some of which were taken behind runs
            assert run(engine, PROMPTS, LENGTH)[0] == alone[name]
            assert engine.stats().num_cached_tokens
    assert made == {*GUESSES}


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
def test_steps_with_runs_are_recorded_as_without(name, alone):
    for options in ({"enforce_eager": True}, {"block_size": 64, "max_num_seqs": 2}):
        engine = new_engine(checkpoint(name), **options, **NGRAM)
        scripted(engine, alone[name])
        assert run(engine, PROMPTS, LENGTH)[0] == alone[name]
        assert (engine.runner.graphs is None) == ("enforce_eager" in options)
    plain = new_engine(checkpoint(name), dtype="bfloat16")
    expected = [run(plain, [prompt], LENGTH)[0][0] for prompt in PROMPTS]
    engine = new_engine(checkpoint(name), dtype="bfloat16", **NGRAM)
    scripted(engine, expected)
    assert run(engine, PROMPTS, LENGTH)[0] == expected


@pytest.mark.parametrize(
    ("name", "num_stages", "num_shards"), [("qwen3_5", 1, 2), ("lfm2", 2, 1), ("nemotron_h", 1, 2)]
)
def test_ranks_give_the_bits_of_one_process(name, num_stages, num_shards, alone):
    """With steps in flight, runs of drafts, and requests that are swapped behind a run."""
    with ranked_engines(num_stages, num_shards):
        crowded = {"num_blocks": 9, "max_num_batched_tokens": 24, "device": "cpu", "dtype": "float32"}
        model = str(checkpoint(name))
        engine = LLMEngine(model, skip_tokenizer_init=True, **crowded, **SWAP, **NGRAM)
        scripted(engine, alone[name])
        settled = settled_seats(engine)
        assert run(engine, PROMPTS, LENGTH)[0] == alone[name]
        assert settled


@pytest.mark.parametrize("method", ["ngram", "suffix", "llama"])
def test_every_drafter(method, alone):
    """A draft model computes nothing that a hybrid keeps: its K and V are in the blocks."""
    config = {"model": str(checkpoint(method))} if method == "llama" else {"method": method}
    engine = new_engine(checkpoint("qwen3_5"), speculative_config={**config, **FIXED}, **SWAP, num_blocks=12)
    assert run(engine, PROMPTS, LENGTH)[0] == alone["qwen3_5"]
    stats = engine.stats()
    assert stats.num_draft_tokens
    assert stats.num_accepted_tokens or method == "llama"
    assert stats.num_swap_preemptions


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "falcon_h1"])
def test_a_fork_and_a_swap_between_two_runs(name, alone):
    """Of a request whose last run its state has not seen; the parent goes on, ends, or gives its seat up."""
    for ends in (False, True):
        engine = new_engine(checkpoint(name), **NGRAM)
        drafter = scripted(engine, alone[name])
        drafter.guesses = itertools.repeat((MOST, 2))
        settled = settled_seats(engine)
        engine.add_request("a", PROMPTS[0], GREEDY)
        for _ in range(5):  # two for the prompt, which leaves a snapshot
            engine.step()
        assert engine.scheduler.running[0].num_output_tokens == 10  # the first token, then runs of three
        children = [engine.fork("a"), engine.fork("a")]
        if ends:
            engine.abort_request("a")
        engine.add_request("b", PROMPTS[3], GREEDY)
        found = {}
        while engine.has_unfinished_requests():
            found |= {o.request_id: bits(o.outputs[0]) for o in engine.step() if o.finished}
        assert len(settled) == 1  # the second child finds nothing left to apply
        assert settled[0][1:] == (3, len(PROMPTS[0]) + 9)
        assert found["b"] == alone[name][3]
        expected = alone[name][0]
        assert [found[child][0] for child in children] == [expected[0]] * 2
        assert ends or found["a"] == expected


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
def test_samples_and_beams(name):
    engine = new_engine(checkpoint(name), max_num_batched_tokens=24)
    drafting = new_engine(checkpoint(name), max_num_batched_tokens=24, num_blocks=12, **SWAP, **NGRAM)
    many = {"n": 3, "temperature": 0.7, "seed": 0, "logprobs": 0}
    expected, results = run(engine, PROMPTS[:3], LENGTH, **many)
    drafter = Scripted({})
    drafter.answer_of = lambda request: (
        results[PROMPTS.index(request.inputs.prompt_token_ids)].outputs[request.index].token_ids
    )
    drafting.scheduler.drafts = Drafts(drafter, MOST, VOCAB_SIZE, 64)
    assert run(drafting, PROMPTS[:3], LENGTH, **many)[0] == expected
    assert drafting.stats().num_accepted_tokens
    assert drafting.stats().num_swap_preemptions
    drafting.scheduler.drafts = Drafts(new_drafter(SpeculativeConfig(method="ngram")), MOST, VOCAB_SIZE, 64)
    beams = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    found, wanted = (each.beam_search(PROMPTS[:1], beams)[0].sequences for each in (drafting, engine))
    assert [each.tokens for each in found] == [each.tokens for each in wanted]


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
def test_decodes_behind_a_run_apply_it_once(name, alone):
    """Their batch is advanced in place; the one that applies the run is its first."""
    engine = new_engine(checkpoint(name), **NGRAM)
    drafter = scripted(engine, alone[name])
    drafter.guesses = itertools.cycle([(MOST, 2), (0, 0), (0, 0), (0, 0)])
    assert run(engine, PROMPTS[:1], LENGTH)[0] == alone[name][:1]


def test_a_run_without_a_token_leaves_nothing_to_apply(alone):
    """Its first row is sampled again, as its mask comes too late."""
    engine = new_engine(checkpoint("qwen3_5"), **NGRAM)
    scripted(engine, alone["qwen3_5"])
    update, late = engine.scheduler.update, [*range(4, 40, 5)]

    def without_a_token(schedule, sampled, errors=(), runs=()):
        request = schedule.sampled_requests[0] if schedule.sampled_requests else None
        if request is not None and schedule.drafts and late and request.num_output_tokens >= late[0]:
            late.pop(0)
            runs = {0: []}
        return update(schedule, sampled, errors or {}, runs or {})

    with mock.patch.object(engine.scheduler, "update", without_a_token):
        (result,) = engine.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    assert not late
    assert result.outputs[0].token_ids == alone["qwen3_5"][0][0]


def test_runs_survive_a_step_that_fails(alone):
    """All requests are computed anew: nothing is left to apply."""
    engine = new_engine(checkpoint("qwen3_5"), **NGRAM)
    scripted(engine, alone["qwen3_5"])
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, GREEDY)
    found = {}
    for number in itertools.count():
        if not engine.has_unfinished_requests():
            break
        if number in (5, 9):
            engine.fork("0", f"child {number}")
            engine.scheduler.cancel()
        found |= {o.request_id: bits(o.outputs[0])[0] for o in engine.step() if o.finished}
    assert [found[str(i)] for i in range(6)] == [tokens for tokens, _ in alone["qwen3_5"]]
    assert found["child 5"] == found["child 9"] == found["0"]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_other_backends_give_the_tokens_of_transformers(backend):
    """In float32, with prompts of one token and of eight, in two chunks."""
    prompts = [PROMPTS[1], PROMPTS[3]]
    answers = [reference("qwen3_5").greedy(prompt, 8)[0] for prompt in prompts]
    engine = new_engine(
        checkpoint("qwen3_5"), attention_backend=backend, num_blocks=32, max_num_batched_tokens=8, **NGRAM
    )
    drafter = Scripted({tuple(p): tokens for p, tokens in zip(prompts, answers, strict=True)})
    drafter.guesses = itertools.cycle([(3, 1), (2, 2)])
    engine.scheduler.drafts = Drafts(drafter, MOST, VOCAB_SIZE, 64)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    outputs = engine.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == answers
    assert engine.stats().num_accepted_tokens


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "falcon_h1"])
def test_inputs_of_runs_are_counted(name):
    """What a seat keeps for drafts is memory of the states, before any is allocated."""
    plain, engine = (new_engine(checkpoint(name), max_num_seqs=5, **options) for options in ({}, NGRAM))
    without, sizes = plain.runner.sizes, engine.runner.sizes
    assert without.seat_bytes == 2 * without.state_bytes == 2 * sizes.state_bytes  # with the rolling snapshot
    columns = {"qwen3_5": 3 * (128 + 128 + 2 * 4), "lfm2": 2 * 48, "falcon_h1": 2 * (64 + 64 + 5)}[name]
    assert sizes.seat_bytes - without.seat_bytes == 2 * (1 + MOST) * 4 * columns
    assert engine.runner.kv_cache.states.num_bytes == sizes.all_state_bytes
    assert sizes.all_state_bytes == 5 * sizes.seat_bytes + sizes.num_snapshots * sizes.state_bytes
    assert plain.runner.kv_cache.states.num_bytes == without.all_state_bytes
