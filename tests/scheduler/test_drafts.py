"""Drafts take what a step has left, and leave nothing behind but the tokens that were accepted."""

from __future__ import annotations

import logging

import pytest

from paged.drafting.drafter import Draft
from paged.drafting.drafters import GrammarDrafter
from paged.drafting.lengths import DraftLengths
from paged.options.sampling_params import SamplingParams
from paged.scheduler.drafts import Drafts, verified
from paged.scheduler.schedule import StepOutput
from paged.scheduler.scheduler import Scheduler
from tests.support.scheduler_cases import (
    BLOCK_SIZE,
    STOP,
    Guesses,
    added,
    computed,
    finish,
    hash_token,
    new_request,
    new_scheduler,
    run_step,
    scheduled,
    updated,
)


def drafting(most: int = 4, drafter: object = None, max_rows: int = 64, **options) -> Scheduler:
    scheduler = new_scheduler(**options)
    scheduler.drafts = Drafts(drafter or Guesses(), most, 1000, max_rows)  # type: ignore[arg-type]
    return scheduler


def test_drafts_take_what_prompts_leave_of_the_budget():
    scheduler = drafting(budget=8)
    added(scheduler, new_request("a", 4, 20), new_request("sure", 3, 20))
    updated(scheduler, scheduled(scheduler))
    added(scheduler, new_request("long", 12, 9))
    assert computed(scheduled(scheduler)) == {"a": 1, "sure": 1, "long": 6}


def test_the_surest_drafts_come_first_and_move_behind_plain_decodes():
    scheduler = drafting(budget=8, most=5)
    added(scheduler, new_request("a", 2, 20), new_request("sure", 2, 20), new_request("c", 2, 20))
    updated(scheduler, scheduled(scheduler))
    schedule = scheduled(scheduler)
    assert list(computed(schedule).items()) == [("a", 1), ("c", 1), ("sure", 6)]
    assert schedule.num_decode_tokens == 2
    assert not schedule.has_prompts
    updated(scheduler, schedule)
    assert {r.request_id: r.num_output_tokens for r in scheduler.running} == {"a": 2, "sure": 7, "c": 2}
    finish(scheduler)


def test_a_draft_model_has_blocks_for_as_long_as_it_guesses():
    """It writes into them: none that it does not keep, and none that the step moves later."""
    seen = []

    class OfModel(Guesses):
        def propose(self, requests, limits):
            seen.extend((requests[0].blocks.capacity - requests[0].num_tokens, limits[0]) for _ in requests)
            return [draft._replace(tokens=draft.tokens[:1]) for draft in super().propose(requests, limits)]

    scheduler = drafting(most=6, num_blocks=8, watermark=0.0)
    scheduler.drafts = Drafts(OfModel(), 6, 1000, 64, in_blocks=True)
    (request,) = added(scheduler, new_request("a", BLOCK_SIZE - 2, 30))
    run_step(scheduler)
    for _ in range(6):
        schedule = scheduled(scheduler)
        assert computed(schedule) == {"a": 2}
        assert len(request.blocks.tables[0]) == scheduler.block_manager.blocks_for(request.num_tokens + 1)
        updated(scheduler, schedule)
    assert all(room >= limit == 6 for room, limit in seen)
    seen.clear()
    scheduler.fork(request, new_request("a", BLOCK_SIZE - 2, 30))
    scheduler.running[1].token_ids[:] = request.token_ids
    schedule = scheduled(scheduler)
    assert schedule.copies
    assert not seen
    assert not schedule.drafts


def test_few_rows_may_be_sampled():
    scheduler = drafting(max_rows=4)
    added(scheduler, new_request("a", 2, 20), new_request("b", 2, 20))
    updated(scheduler, scheduled(scheduler))
    assert computed(scheduled(scheduler)) == {"b": 1, "a": 3}


@pytest.mark.parametrize(
    ("params", "num"),
    [
        ({}, 4),
        ({"num_speculative_tokens": 2}, 2),
        ({"num_speculative_tokens": 9}, 4),
        ({"num_speculative_tokens": 0}, 0),
        ({"logprobs": 3, "logit_bias": {1: 2.0}, "stop": "x", "seed": 1}, 4),
        ({"repetition_penalty": 1.1, "min_tokens": 2, "bad_words": ["x"]}, 4),
    ],
    ids=str,
)
def test_a_request_gets_as_many_as_it_and_the_engine_allow(params, num):
    scheduler = drafting()
    added(scheduler, new_request("a", 3, 20, params=SamplingParams(**params)))
    updated(scheduler, scheduled(scheduler))
    assert computed(scheduled(scheduler)) == {"a": 1 + num}


class Grammar:
    """Allows tokens below a bound, and forces some."""

    def __init__(self, bound: int, forced: list[int]) -> None:
        self._bound = bound
        self._forced = forced

    def num_allowed(self, _request, tokens):
        return next((i for i, token in enumerate(tokens) if token >= self._bound), len(tokens))

    def forced(self, _request):
        return self._forced


@pytest.mark.parametrize(
    ("guess", "forced", "drafts"),
    [
        ([1, 2, 3], [], [1, 2, 3]),
        ([1, 9, 3], [], [1]),
        ([9, 1], [], []),
        ([1, 2, 3], [1, 2], [1, 2, 3]),
        ([1, 2, 3], [1, 3], [1, 3]),
        ([], [4, 3, 2, 1, 0], [4, 3, 2, 1]),
    ],
)
def test_a_grammar_cuts_drafts_and_what_it_forces_comes_first(guess, forced, drafts):
    always = type("Always", (), {"propose": lambda _, rs, __: [Draft(guess)] * len(rs)})()
    scheduler = drafting(drafter=GrammarDrafter(always))
    (request,) = added(scheduler, new_request("a", 3, 20))
    updated(scheduler, scheduled(scheduler))
    request.sampling.grammar = Grammar(9, forced)
    assert scheduled(scheduler).drafts == ([drafts] if drafts else [])


@pytest.mark.parametrize(("max_tokens", "long_from", "num"), [(4, None, 2), (2, None, 0), (20, 7, 2)])
def test_drafts_end_where_a_token_would_not_count(max_tokens, long_from, num):
    scheduler = drafting()
    (request,) = added(scheduler, new_request("a", 3, max_tokens, long_from=long_from))
    updated(scheduler, scheduled(scheduler))
    schedule = scheduled(scheduler)
    assert computed(schedule) == {"a": 1 + num}
    updated(scheduler, schedule)
    assert request.num_output_tokens == 2 + num
    assert (request.finish_reason == "length") is (long_from is None)


@pytest.mark.parametrize("num_right", [0, 1, 2, 5])
def test_only_accepted_tokens_stay(num_right):
    scheduler = drafting(most=5, drafter=Guesses(num_right))
    manager = scheduler.block_manager
    (request,) = added(scheduler, new_request("a", BLOCK_SIZE - 1, 40))
    updated(scheduler, scheduled(scheduler))
    schedule = scheduled(scheduler)
    assert request.blocks.capacity == 2 * BLOCK_SIZE
    updated(scheduler, schedule)
    assert request.output_token_ids == [hash_token("a", BLOCK_SIZE - 1 + i) for i in range(num_right + 2)]
    assert request.num_computed_tokens == request.num_tokens - 1
    assert len(request.blocks.tables[0]) == manager.blocks_for(request.num_computed_tokens)
    assert scheduler.counters.num_accepted_at == [1] * num_right + [0] * (5 - num_right)
    finish(scheduler)
    # What is cached has the request's own tokens: of a guess nothing was registered.
    assert len(manager.find(request.token_ids)[0]) == (request.num_tokens - 1) // BLOCK_SIZE


def test_a_chooser_learns_from_steps_and_leaves_out_what_does_not_pay():
    now = [0.0]
    guesses = Guesses(0)
    scheduler = drafting(drafter=guesses, clock=lambda: now[0])
    lengths = scheduler.drafts.lengths = DraftLengths(4, lambda rows: 1 + rows / 24, lambda: now[0])

    def rows_of(num_steps: int) -> list[int]:
        rows = []
        for _ in range(num_steps):
            schedule = scheduled(scheduler)
            rows.append(schedule.num_tokens)
            now[0] += 1 + 0.1 * schedule.num_tokens
            updated(scheduler, schedule)
        return rows

    added(scheduler, new_request("a", 3, 100))
    assert rows_of(24) == [3, *[1] * 23]
    guesses.num_right = 2
    assert rows_of(20)[-1] == 3
    assert lengths.ledger.won == pytest.approx(sum(scheduler.counters.num_accepted_at) * 1.1, rel=0.5)
    # A step with a prompt has no drafts, and its time counts for nothing.
    added(scheduler, new_request("b", 20, 9))
    assert rows_of(1) == [21]
    finish(scheduler)


def test_nothing_follows_the_end_of_a_run():
    scheduler = drafting()
    (request,) = added(scheduler, new_request("a", 3, 20))
    updated(scheduler, scheduled(scheduler))
    schedule = scheduled(scheduler)
    scheduler.update(schedule, [None], runs={0: [7, STOP, 8, 9]})
    scheduler.check()
    assert request.output_token_ids[1:] == [7, STOP]
    assert (request.finish_reason, request.num_computed_tokens) == ("stop", 5)
    assert scheduler.counters.num_generated_tokens == 3


def test_drafts_take_no_block_that_another_needs():
    scheduler = drafting(num_blocks=4, budget=32, watermark=0.0)
    first, second = added(scheduler, new_request("a", BLOCK_SIZE - 1, 9), new_request("b", 5, 20))
    updated(scheduler, scheduled(scheduler))
    second.protected = True
    scheduler._running._num_protected += 1
    # b may come to need two more blocks, all that are free. Its drafts fill the one that it has.
    assert computed(scheduled(scheduler)) == {"a": 1, "b": 1 + 2}
    assert first.blocks.capacity == BLOCK_SIZE


def test_drafts_take_no_block_that_a_begun_prompt_needs():
    scheduler = drafting(num_blocks=5, long_prefill_token_threshold=BLOCK_SIZE, watermark=0.0)
    added(scheduler, new_request("a", BLOCK_SIZE - 1, 9))
    run_step(scheduler)
    added(scheduler, new_request("long", 3 * BLOCK_SIZE, 9))
    assert computed(scheduled(scheduler)) == {"a": 1, "long": BLOCK_SIZE}


def test_a_row_without_logits_ends_a_run_and_then_the_request():
    scheduler = drafting()
    (request,) = added(scheduler, new_request("a", 3, 20))
    updated(scheduler, scheduled(scheduler))
    schedule = scheduled(scheduler)
    right = schedule.drafts[0]
    output = verified(schedule, StepOutput([*right[:2], None, None, None]))
    assert output.runs == {0: right[:2]}
    scheduler.update(schedule, output.tokens, output.errors, output.runs)
    schedule = scheduled(scheduler)
    output = verified(schedule, StepOutput([None] * 5))
    scheduler.update(schedule, output.tokens, output.errors, output.runs)
    assert (request.finish_reason, request.num_output_tokens) == ("error", 3)
    scheduler.check()


@pytest.mark.parametrize(
    "wrong", [ValueError("bad luck"), [Draft([1000])], [Draft([-1])], [Draft([1.0])], [Draft([1] * 9)], []]
)
def test_a_drafter_that_fails_is_switched_off_with_one_warning(wrong, caplog):
    class Wrong:
        def propose(self, *_):
            if isinstance(wrong, Exception):
                raise wrong
            return wrong

    scheduler = drafting(drafter=Wrong())
    (request,) = added(scheduler, new_request("a", 3, 20))
    with caplog.at_level(logging.WARNING):
        finish(scheduler)
    assert request.num_output_tokens == 20
    assert [record.message[:34] for record in caplog.records] == ["no tokens are guessed any more, as"]


def test_steps_without_drafts_stay_as_they_are():
    scheduler = drafting(drafter=type("None", (), {"propose": lambda _, rs, __: [Draft([])] * len(rs)})())
    added(scheduler, new_request("a", 3, 20))
    run_step(scheduler)
    assert scheduled(scheduler).is_decode
