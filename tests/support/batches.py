"""Plans and batches of schedules, as the runner makes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from paged.device.transfers import Transfers
from paged.model.batch import Batch, Queries
from paged.requests.request import Request
from paged.runner.batches.batches import Batches
from paged.runner.executor import PendingStep
from paged.runner.model_runner import ModelRunner, Pending
from paged.runner.plan import ComputedPart, Planner, StepPlan
from paged.runner.plan_bytes import from_bytes, to_bytes
from paged.scheduler.schedule import Schedule, StepOutput
from tests.support import scheduler_cases as cases


def read_back(plan: StepPlan) -> StepPlan:
    """Return a plan whose computed part is read from its bytes."""
    read = StepPlan(from_bytes(to_bytes(plan.computed)), plan.sampled)
    assert read == plan
    return read


def whole(schedule: Schedule) -> Schedule:
    """Return a schedule that tells all about its requests, as if their seats knew nothing."""
    return replace(schedule, newcomers=[*dict.fromkeys([*schedule.newcomers, *schedule.requests])])


def planned(planner: Planner, schedule: Schedule) -> ComputedPart:
    """Return what a step computes, read from its bytes."""
    return read_back(planner.plan(schedule)).computed


def made(batches: Batches[Any], plan: ComputedPart, transfers: Transfers) -> tuple[Any, Batch]:
    """Return what `put` returns, and the batch."""
    upload = transfers.new_upload()
    step = batches.put(plan, upload)
    upload.send()
    return step, batches.batch(step)


def made_and_drawn(
    batches: Batches[Any], plan: ComputedPart, schedule: Schedule, device: torch.device
) -> Batch:
    """Make a batch, and record the tokens that `cases.updated` appends."""
    step, batch = made(batches, plan, Transfers(device))
    names = {r.seat: r.request_id for r in schedule.sampled_requests}
    rows = zip(plan.sampled_seats, plan.positions(), strict=True)
    drawn = [cases.hash_token(names[seat], position) for seat, position in rows]
    batches.record(step, torch.tensor(drawn, dtype=torch.int64, device=device))
    return batch


def assert_equal(batch: Batch, expected: Batch) -> None:
    """Assert that two batches are equal, but for entries of block tables that nothing reads."""
    for name in ("token_ids", "positions", "output_rows"):
        assert getattr(batch, name).tolist() == getattr(expected, name).tolist(), name
    assert (batch.rope_lens is None) is (expected.rope_lens is None)
    if batch.rope_lens is not None and expected.rope_lens is not None:
        assert batch.rope_lens.tolist() == expected.rope_lens.tolist()
    for got, wanted in zip(batch.slot_mapping, expected.slot_mapping, strict=True):
        assert got.tolist() == wanted.tolist()
    assert (batch.num_logits, batch.is_decode) == (expected.num_logits, expected.is_decode)
    _assert_equal_queries(batch.queries, expected.queries)
    assert (batch.output_queries is None) is (expected.output_queries is None)
    if batch.output_queries is not None and expected.output_queries is not None:
        _assert_equal_queries(batch.output_queries, expected.output_queries)


def _assert_equal_queries(got: Queries, expected: Queries) -> None:
    for name in ("seq_lens", "cu_seqlens_q"):
        assert getattr(got, name).tolist() == getattr(expected, name).tolist(), name
    assert (got.max_seqlen_q, got.min_seqlen_q) == (expected.max_seqlen_q, expected.min_seqlen_q)
    num_blocks = [-(-length // cases.BLOCK_SIZE) for length in expected.seq_lens.tolist()]
    for group, (tables, wanted) in enumerate(zip(got.block_tables, expected.block_tables, strict=True)):
        for row, num in enumerate(num_blocks):
            dropped = wanted[row, :num] == 0 if group else torch.zeros(num, dtype=torch.bool)
            assert (dropped | (tables[row, :num] == wanted[row, :num])).all()
            # Blocks of drafts follow, where a token before them is a query.
            rest = tables[row, num:].tolist()
            known = wanted[row, num:].tolist()
            assert not any(rest) or rest == known + [0] * (len(rest) - len(known))


# Whole steps


@contextmanager
def steps_from_bytes() -> Iterator[list[StepPlan]]:
    """Inside, every step runs from the bytes of its plan, with its requests hidden. Yields the plans."""
    plans: list[StepPlan] = []
    hidden: set[Request] = set()
    make_plan, launch, result = ModelRunner.plan, ModelRunner.launch, Pending.result

    def read_plan(runner: ModelRunner, schedule: Schedule) -> StepPlan:
        plans.append(read_back(make_plan(runner, schedule)))
        hidden.clear()
        hidden.update((*schedule.requests, *schedule.sampled_requests, *schedule.newcomers))
        return plans[-1]

    def launch_alone(runner: ModelRunner, plan: StepPlan) -> PendingStep:
        with _hidden(hidden):
            return launch(runner, plan)

    def result_alone(pending: Pending) -> StepOutput:
        with _hidden(hidden):
            return result(pending)

    with (
        mock.patch.object(ModelRunner, "plan", read_plan),
        mock.patch.object(ModelRunner, "launch", launch_alone),
        mock.patch.object(Pending, "result", result_alone),
    ):
        yield plans


@contextmanager
def _hidden(requests: set[Request]) -> Iterator[None]:
    """Inside, what the scheduler changes of these requests cannot be read."""
    names = ("token_ids", "blocks", "report", "seat", "num_computed_tokens", "metrics")
    before = [(request, name, getattr(request, name)) for request in requests for name in names]
    for request, name, _ in before:
        delattr(request, name)
    try:
        yield
    finally:
        for request, name, value in before:
            setattr(request, name, value)
