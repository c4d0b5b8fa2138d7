"""Scheduling: first come first served under a token budget, preemption, and that everything finishes."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from paged.block_manager import BlockManager
from paged.request import Request, RequestStatus
from paged.sampling_params import SamplingParams
from paged.scheduler import Schedule, Scheduler

BLOCK_SIZE = 8
STOP = 999


def new_request(name: str, prompt_len: int, max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    prompt = [hash_token(name, i) for i in range(prompt_len)]
    return Request(name, None, prompt, params, prompt_len + max_tokens, frozenset([STOP]), seed=0)


def hash_token(name: str, position: int) -> int:
    """What the made-up model says at a position: a fixed function, so that recomputing changes nothing."""
    return random.Random(f"{name}/{position}").randrange(100)


def new_scheduler(num_blocks: int = 16, max_num_seqs: int = 8, budget: int = 64) -> Scheduler:
    manager = BlockManager(num_blocks, BLOCK_SIZE)
    return Scheduler(manager, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)


def added(scheduler: Scheduler, *requests: Request) -> list[Request]:
    for request in requests:
        scheduler.add(request)
    return list(requests)


def run_step(scheduler: Scheduler) -> dict[str, int]:
    """One step of the made-up model. Returns how many tokens each request computed."""
    schedule = scheduler.schedule()
    scheduler.check()
    ids = [request.request_id for request in schedule.requests]
    computed = dict(zip(ids, schedule.num_new_tokens, strict=True))
    scheduler.update(schedule, sampled(schedule))
    scheduler.check()
    return computed


def sampled(schedule: Schedule) -> list[int | None]:
    return [hash_token(request.request_id, request.num_tokens) for request in schedule.sampled_requests]


def test_one_rule_computes_prompts_in_chunks_and_then_token_by_token():
    scheduler = new_scheduler(budget=10)
    a, b = added(scheduler, new_request("a", 4, 3), new_request("b", 17, 2))
    steps = []
    while scheduler.has_unfinished():
        steps.append(run_step(scheduler))
    # a's first step gives its first token; b takes what the budget leaves, and samples once it is complete.
    assert steps == [{"a": 4, "b": 6}, {"a": 1, "b": 9}, {"a": 1, "b": 2}, {"b": 1}]
    assert a.output_token_ids == [hash_token("a", i) for i in (4, 5, 6)]
    assert b.output_token_ids == [hash_token("b", i) for i in (17, 18)]
    assert (a.finish_reason, b.finish_reason) == ("length", "length")
    assert scheduler.block_manager.num_used_blocks == 0


def test_requests_are_admitted_in_order_even_if_a_later_one_would_fit():
    scheduler = new_scheduler(num_blocks=4)
    added(scheduler, new_request("a", 16, 8), new_request("long", 24, 8), new_request("short", 1, 1))
    assert run_step(scheduler) == {"a": 16}
    assert [r.request_id for r in scheduler.waiting] == ["long", "short"]


def test_max_num_seqs_run_at_once():
    scheduler = new_scheduler(max_num_seqs=2)
    added(scheduler, *(new_request(name, 2, 2) for name in "abc"))
    assert run_step(scheduler) == {"a": 2, "b": 2}
    assert run_step(scheduler) == {"a": 1, "b": 1}
    assert run_step(scheduler) == {"c": 2}


def test_youngest_is_preempted_first_and_admitted_again_before_later_ones():
    scheduler = new_scheduler(num_blocks=6)
    a, b, c, d = added(scheduler, *(new_request(name, 15, 16) for name in "abcd"))
    assert run_step(scheduler) == {"a": 15, "b": 15, "c": 15}
    assert run_step(scheduler) == {"a": 1, "b": 1, "c": 1}
    # All three need a third block and none is free: c, the youngest, gives back two.
    assert run_step(scheduler) == {"a": 1, "b": 1}
    assert [r.request_id for r in scheduler.waiting] == ["c", "d"]
    assert (c.num_computed_tokens, c.num_output_tokens, c.status) == (0, 2, RequestStatus.WAITING)
    assert [r.metrics.num_preemptions for r in (a, b, c, d)] == [0, 0, 1, 0]
    while scheduler.has_unfinished():
        run_step(scheduler)
    assert [r.output_token_ids for r in (a, b, c, d)] == [
        [hash_token(name, i) for i in range(15, 31)] for name in "abcd"
    ]


def test_request_that_can_never_fit_is_refused():
    scheduler = new_scheduler(num_blocks=2)
    # The last token is only sampled: 17 tokens take 16 slots.
    scheduler.add(new_request("fits", 16, 1))
    with pytest.raises(AssertionError, match="never fit"):
        scheduler.add(new_request("too long", 17, 1))


def test_stop_token_ends_a_request_and_frees_its_blocks():
    scheduler = new_scheduler()
    a, b = added(scheduler, new_request("a", 4, 9), new_request("b", 4, 9))
    schedule = scheduler.schedule()
    assert scheduler.update(schedule, [STOP, 5]) == [a, b]
    assert (a.finish_reason, b.finish_reason) == ("stop", None)
    assert scheduler.running == [b]
    assert scheduler.block_manager.num_used_blocks == 1
    scheduler.check()


def test_logits_that_are_not_finite_end_only_their_request():
    scheduler = new_scheduler()
    a, b = added(scheduler, new_request("a", 4, 9), new_request("b", 4, 9))
    scheduler.update(scheduler.schedule(), [None, 5])
    assert a.finish_reason == "error"
    assert a.output_token_ids == []
    assert "not finite" in a.stop_reason
    assert scheduler.running == [b]
    scheduler.check()


@pytest.mark.parametrize("stage", ["waiting", "in-prompt", "decoding", "preempted"])
def test_abort_at_any_stage_frees_blocks(stage):
    scheduler = new_scheduler(num_blocks=6, budget=20)
    requests = added(scheduler, new_request("a", 15, 30), new_request("b", 15, 16), new_request("c", 2, 9))
    _, b, c = requests
    victim = {"waiting": c, "in-prompt": b, "decoding": b, "preempted": b}[stage]
    steps = {"waiting": 0, "in-prompt": 1, "decoding": 4}.get(stage)
    if steps is None:
        while not b.metrics.num_preemptions:
            run_step(scheduler)
        assert b.status is RequestStatus.WAITING
    else:
        for _ in range(steps):
            run_step(scheduler)
    if stage == "in-prompt":
        assert 0 < b.num_computed_tokens < 15
    scheduler.abort(victim)
    scheduler.check()
    assert victim.finish_reason == "abort"
    assert victim not in scheduler.running
    assert victim not in scheduler.waiting
    while scheduler.has_unfinished():
        run_step(scheduler)
    assert all(r.finish_reason == "length" for r in requests if r is not victim)
    assert scheduler.block_manager.num_used_blocks == 0


@pytest.mark.parametrize("seed", range(12))
def test_simulation_keeps_every_promise(seed):
    rng = random.Random(seed)
    num_blocks, max_num_seqs = rng.randint(6, 24), rng.randint(1, 6)
    budget = rng.choice([1, 7, 16, 64])
    scheduler = new_scheduler(num_blocks, max_num_seqs, budget)
    everyone: list[Request] = []
    capacity = num_blocks * BLOCK_SIZE
    step = num_preemptions = 0
    while scheduler.has_unfinished() or len(everyone) < 40:
        step += 1
        assert step < 20_000, "somebody waits for ever"
        while len(everyone) < 40 and rng.random() < 0.3:
            prompt_len = rng.randint(1, capacity // 2)
            request = new_request(str(len(everyone)), prompt_len, rng.randint(1, capacity - prompt_len + 1))
            everyone += added(scheduler, request)
        unfinished = [r for r in everyone if r.status is not RequestStatus.FINISHED]
        if unfinished and rng.random() < 0.02:
            scheduler.abort(rng.choice(unfinished))
            scheduler.check()
            continue
        num_preemptions += check_step(scheduler, rng)
    for request in everyone:
        # "abort" and "stop" too: what there is must be what the model says, recomputed or not.
        start = len(request.prompt_token_ids)
        output = [token for token in request.output_token_ids if token != STOP]
        assert output == [hash_token(request.request_id, start + i) for i in range(len(output))]
        if request.finish_reason == "length":
            assert request.num_tokens == request.max_total_tokens
    assert scheduler.block_manager.num_used_blocks == 0
    assert num_preemptions == sum(r.metrics.num_preemptions for r in everyone)


def check_step(scheduler: Scheduler, rng: random.Random) -> int:
    """Run a step and hold it against what a reader of the rules would do. Returns its preemptions."""
    before, waiting = list(scheduler.running), list(scheduler.waiting)
    in_order = before + waiting
    schedule = scheduler.schedule()
    scheduler.check()
    assert sum(schedule.num_new_tokens) == schedule.num_tokens <= scheduler.max_num_batched_tokens
    assert all(n > 0 for n in schedule.num_new_tokens)
    # The oldest always moves, nobody overtakes, and only the youngest were preempted.
    assert schedule.requests == in_order[: len(schedule.requests)]
    assert scheduler.running + list(scheduler.waiting) == in_order
    preempted = [r for r in before if r.status is RequestStatus.WAITING]
    assert preempted == before[len(before) - schedule.num_preempted :]
    if schedule.num_tokens < scheduler.max_num_batched_tokens and scheduler.waiting:
        # Room in the budget is left only for want of blocks or of a place.
        assert (
            schedule.num_preempted
            or len(scheduler.running) == scheduler.max_num_seqs
            or missing_blocks(scheduler) > scheduler.block_manager.pool.num_free
        )
    for request, num_new in zip(schedule.requests, schedule.num_new_tokens, strict=True):
        needed = scheduler.block_manager.blocks_for(request.num_computed_tokens + num_new)
        assert len(scheduler.block_manager.table(request.request_id)) == needed
    tokens = [STOP if rng.random() < 0.01 else token for token in sampled(schedule)]
    scheduler.update(schedule, tokens)
    scheduler.check()
    return schedule.num_preempted


def missing_blocks(scheduler: Scheduler) -> int:
    """What the running and the first waiting request lack to compute all their tokens and the next."""
    manager = scheduler.block_manager
    held = sum(len(manager.table(request.request_id)) for request in scheduler.running)
    wanted = (*scheduler.running, scheduler.waiting[0])
    return sum(manager.blocks_for(request.num_tokens + 1) for request in wanted) - held


def test_no_prompt_is_begun_that_the_running_ones_leave_no_room_for():
    # A pool for 3 of 16 long prompts: without a look ahead each is computed many times over.
    scheduler = new_scheduler(num_blocks=200, max_num_seqs=16, budget=256)
    requests = added(scheduler, *(new_request(str(i), 400, 100) for i in range(16)))
    computed = 0
    while scheduler.has_unfinished():
        computed += sum(run_step(scheduler).values())
    needed = sum(request.num_tokens - 1 for request in requests)
    assert computed < 1.5 * needed


def test_scheduling_needs_no_torch():
    absent = dict.fromkeys(("torch", "numpy", "triton", "transformers"))
    code = f"import sys; sys.modules |= {absent!r}; import paged.scheduler"
    subprocess.run([sys.executable, "-c", code], check=True)
