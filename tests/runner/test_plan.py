"""StepPlan: every kind of step runs from the bytes of its plan, and reads nothing of its requests."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest

from paged import LLMEngine, SamplingParams
from paged.runner.model_runner import ModelRunner
from paged.runner.plan import IN_SEAT, ComputedPart, StepPlan
from paged.runner.plan_bytes import from_bytes, to_bytes
from paged.runner.states import run_numbers
from paged.scheduler.schedule import Schedule, StepOutput
from tests.support.batches import steps_from_bytes
from tests.support.engine_uses import CASES, Case, Result, generated, greedy, sampled


def repeated(engine: LLMEngine) -> Result:
    """Continue prompts in which what follows can be looked up, long enough that outputs repeat themselves."""
    return Result(generated(engine, [[7] * 20, [*range(9)]], greedy(30)))


SUFFIXES = {"method": "suffix", "prompt_lookup_min": 1, "adaptive": False}
# With prompts that are computed in chunks, beside decodes.
KINDS = {
    **CASES,
    "chunks": Case("qwen3", {"max_num_batched_tokens": 24}, sampled),
    "drafts": Case("qwen3", {"speculative_config": SUFFIXES}, repeated),
    "drafts and states": Case(
        "qwen3_5",
        {
            "speculative_config": SUFFIXES,
            "num_blocks": 4,
            "preemption_mode": "swap",
            "swap_space": 0.01,
            "watermark": 0.0,
        },
        repeated,
    ),
}
IS_SEEN: dict[str, Callable[[StepPlan], object]] = {
    "decode": lambda plan: plan.computed.is_decode,
    "nothing new": lambda plan: plan.computed.is_decode and not plan.computed.changes,
    "a grown block table": lambda plan: any(c.last_token == IN_SEAT for c in plan.computed.changes),
    "decodes beside a prompt": lambda plan: 0 < plan.computed.num_decodes < len(plan.computed.seats),
    "a part of a prompt": lambda plan: len({*plan.computed.sampled}) < len(plan.computed.seats),
    "samples of one row": lambda plan: len({*plan.computed.sampled}) < len(plan.computed.sampled),
    "a seat that is not in the step": lambda plan: plan.computed.absent_seats,
    "drafts": lambda plan: plan.computed.num_drafting,
    "a run that is applied": lambda plan: plan.computed.unapplied,
    "a run that is applied before its state moves": lambda plan: plan.computed.settled,
    "copies": lambda plan: plan.computed.copies,
    "swapped out": lambda plan: plan.computed.swap_out,
    "swapped in": lambda plan: plan.computed.swap_in,
    "edited logits": lambda plan: plan.sampled.new_tokens,
    "log-probabilities of a prompt": lambda plan: any(r.next_tokens for r in plan.sampled.reports),
    "sums of hidden states": lambda plan: any(r.num_top is None for r in plan.sampled.reports),
}


def test_every_kind_of_step_runs_from_bytes():
    plans: list[StepPlan] = []
    for name, case in KINDS.items():
        engine = case.engine()
        with steps_from_bytes() as seen:
            found = case.use(engine)
        assert found == case.use(engine), name
        plans += seen
    assert [kind for kind, is_seen in IS_SEEN.items() if not any(map(is_seen, plans))] == []
    assert len({len(plan.computed.entries) for plan in plans}) > 1, "no model has two layer groups"


def test_a_decode_is_a_seat_and_its_start():
    """What is sent of a decode does not grow with its length."""
    engine = KINDS["sampling"].engine(max_model_len=200)
    for i in range(3):
        engine.add_request(str(i), [5] * (40 + 40 * i), SamplingParams(max_tokens=9, ignore_eos=True))
    with steps_from_bytes() as plans:
        while engine.has_unfinished_requests():
            engine.step()
    sizes = {len(to_bytes(plan.computed)) for plan in plans if not plan.computed.changes}
    assert max(sizes) < 400
    assert sum(not plan.computed.changes for plan in plans) >= 5


@pytest.mark.parametrize("name", ["sampling", "a grammar"])
def test_a_row_that_gets_no_token_is_sampled_again(name):
    case, rng, dropped = CASES[name], random.Random(3), 0
    engine = case.engine()
    expected = case.use(engine)
    execute = ModelRunner.execute

    def dropping(runner: ModelRunner, schedule: Schedule) -> StepOutput:
        nonlocal dropped
        output = execute(runner, schedule)
        for row in range(len(output.tokens)):
            if rng.random() < 0.4:
                output.tokens[row], output.runs[row] = None, []
                output.logprobs.pop(row, None)
                dropped += 1
        return output

    with mock.patch.object(ModelRunner, "execute", dropping):
        assert case.use(engine).tokens == expected.tokens
    assert dropped > 2


def test_a_step_that_applies_a_run_is_no_repetition():
    """Nor is a batch advanced for it, whose numbers say that there is nothing to apply."""
    part = ComputedPart(num_decodes=2, seats=[0, 1], starts=[5, 6], counts=[1, 1], sampled=[0, 1])
    assert part.repeats([0, 1])
    assert not replace(part, unapplied=[0, 3]).repeats([0, 1])
    assert run_numbers(replace(part, unapplied=[0, 3])) == [0, 0, 3, 0]
    drafting = replace(part, num_decodes=1, num_drafting=1, counts=[1, 4], unapplied=[2, 3])
    assert run_numbers(drafting) == [2, 0, 3, 1]


def test_an_empty_plan_is_read_back():
    part = ComputedPart(swap_out=[], swap_in=[], copies=[], state_moves=[], settled=[], asked=[])
    assert from_bytes(to_bytes(part)) == part


@pytest.mark.parametrize("end", ["abort", "finish"])
def test_seats_keep_nothing_of_a_request_that_has_left(end):
    engine = KINDS["sampling"].engine()
    for name, max_tokens in (("gone", 2 if end == "finish" else 20), ("stays", 9)):
        engine.add_request(name, [5, 6], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    for _ in range(3):
        engine.step()
    if end == "abort":
        engine.abort_request("gone")
    assert len(engine.scheduler.running) == 1
    engine.step()
    kept = engine.runner.sampling_seats._seats
    assert [*kept] == [request.seat for request in engine.scheduler.running]
