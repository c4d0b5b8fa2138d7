"""Batches made of what seats keep, on a GPU and on the host, against those of plans that tell everything."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from paged.architectures.spec import LongContext
from paged.base.errors import ConfigError
from paged.blocks.manager import BlockManager
from paged.device.transfers import Transfers
from paged.kernels import seats as steps
from paged.kernels.gpu.target import in_interpreter
from paged.kernels.gpu.unpack_step import unpack_step
from paged.kernels.seats import StepTensors
from paged.model.batch import Batch
from paged.requests.prompt_report import PromptReport
from paged.runner.batches.batches import WITHOUT_ADAPTER
from paged.runner.batches.host import HostBatches
from paged.runner.batches.seats import NO_NEW_ENTRIES, SeatedBatches
from paged.runner.plan import Planner
from paged.runner.states import run_numbers
from paged.scheduler.drafts import Drafts
from paged.scheduler.scheduler import Scheduler
from tests.support import scheduler_cases as cases
from tests.support.batches import assert_equal, made, made_and_drawn, planned, whole

CPU = torch.device("cpu")
DEVICE = torch.device("cpu" if in_interpreter() else "cuda")
MAX_NUM_SEQS, MAX_LEN = 6, 100
WITH_WINDOW = (None, 12)


# How positions depend on a request's length: dynamic rope, and longrope from 30 tokens on.
ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"with_rope_lens": True},
    "longrope": {"long_context": LongContext(30, 1000)},
}

# A request that grows as long is computed anew.
LONG_FROM = {"dynamic": None, "longrope": 30}


def new_seated(num_groups: int = 1, rope: str = "dynamic", **options: Any) -> SeatedBatches:
    return SeatedBatches(
        unpack_step,
        cases.BLOCK_SIZE,
        DEVICE,
        num_groups=num_groups,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_LEN,
        **ROPES[rope],
        **options,
    )


def new_planner(num_groups: int = 1, rope: str = "dynamic", depth: int = 1) -> Planner:
    options = {"with_prompt_lens": rope == "dynamic", "with_lens": rope == "longrope"}
    options["with_last_tokens"] = depth > 1
    return Planner(cases.BLOCK_SIZE, num_groups, **options)


def new_host_batches(num_groups: int, rope: str, depth: int = 1) -> HostBatches:
    options = {"num_groups": num_groups, "max_num_seqs": MAX_NUM_SEQS, "num_kept": depth, **ROPES[rope]}
    return HostBatches(cases.BLOCK_SIZE, CPU, **options)


@pytest.mark.parametrize(
    ("windows", "num_host_blocks", "rope", "num_right", "depth"),
    [
        ((None,), 0, "dynamic", None, 1),
        ((None,), 40, "dynamic", 2, 1),
        (WITH_WINDOW, 40, "dynamic", None, 1),
        (WITH_WINDOW, 0, "longrope", 1, 1),
        (WITH_WINDOW, 40, "dynamic", None, 2),
        ((None,), 0, "longrope", 1, 3),
    ],
    ids=str,
)
def test_equals_batches_of_plans_that_tell_everything(windows, num_host_blocks, rope, num_right, depth):
    """While requests are chunked, fork, grow, are preempted both ways, changed and reported on, and end.

    num_right: how many of 3 drafts are right; None: there are none.
    depth: steps in flight; with several, plans tell the tokens that another process has drawn.
    """
    rng = random.Random(len(windows) + num_host_blocks)
    manager = BlockManager(
        18, cases.BLOCK_SIZE, windows=windows, max_step_tokens=24, num_host_blocks=num_host_blocks
    )
    scheduler = Scheduler(
        manager,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=24,
        long_prefill_token_threshold=11,
        swap_pays=(lambda _: True) if num_host_blocks else None,
    )
    scheduler.num_in_flight = depth
    if num_right is not None:
        scheduler.drafts = Drafts(cases.Guesses(num_right), 3, 100, MAX_NUM_SEQS)
    num_groups = len(windows)
    seated, on_host = new_seated(num_groups, rope), new_host_batches(num_groups, rope, depth)
    planner, is_decode, in_flight = new_planner(num_groups, rope, depth), [], []
    for i in range(8):
        request = cases.new_request(str(i), 1 + 5 * i % 37, 6 + 7 * i % 20, long_from=LONG_FROM[rope])
        if i % 3 == 0:
            request.report = PromptReport(0, request.num_tokens, 0)
        if i % 4 == 1:
            request.siblings = [
                cases.new_request(f"{i}/{j}", request.num_tokens, 9, long_from=LONG_FROM[rope])
                for j in (0, 1)
            ]
            for sibling in request.siblings:
                sibling.token_ids[:] = request.token_ids
        scheduler.add(request)
    while scheduler.has_unfinished():
        schedule = scheduler.schedule()
        if schedule.requests:
            plan = planned(planner, schedule)
            everything = planned(new_planner(num_groups, rope), whole(schedule))
            reference = made(new_host_batches(num_groups, rope), everything, Transfers(CPU))[1]
            for batches, device in ((seated, DEVICE), (on_host, CPU)):
                if depth == 1:
                    batch = made_and_drawn(batches, plan, schedule, device)
                else:
                    batch = made(batches, plan, Transfers(device))[1]
                assert_equal(batch, reference)
            is_decode.append(schedule.is_decode)
        if not schedule.is_empty:
            in_flight.append(schedule)
        if len(in_flight) < depth and not schedule.is_empty:
            continue
        schedule = in_flight.pop(0)
        cases.updated(scheduler, schedule)
        for request in schedule.requests:
            if request.report is not None and not request.report.is_complete:
                request.report.progress = (min(request.num_computed_tokens, request.report.end), None)
        running = [request for request in scheduler.running if request.ready and request.generates]
        if running and len(is_decode) % 12 == 5:
            parent = rng.choice(running)
            most = parent.inputs.max_total_tokens - 1
            child = cases.new_request(f"{parent.request_id}+", 1, most, long_from=LONG_FROM[rope])
            child.token_ids = [*parent.token_ids[:-1], 7]
            scheduler.fork(parent, child)
        if running and rng.random() < 0.1:
            changed = rng.choice(running)
            if changed.num_computed_tokens + 1 == changed.num_tokens:
                scheduler.replace_last_token(changed, 8)
    assert (scheduler.counters.num_draft_tokens > 30) is (num_right is not None)
    assert is_decode.count(True) > 2
    assert is_decode.count(False) > 10
    assert scheduler.counters.num_swapped if num_host_blocks else scheduler.counters.num_recomputed


def test_only_what_is_new_is_sent():
    scheduler = cases.new_scheduler()
    cases.added(scheduler, cases.new_request("a", 30, 50), cases.new_request("b", 6, 50))
    seated, planner, sent = new_seated(), new_planner(), []
    for _ in range(6):
        schedule = cases.scheduled(scheduler)
        step = seated.put(planned(planner, schedule), Transfers(DEVICE).new_upload())
        assert (step.tokens.numbers.size, step.entries.numbers.size) == ((64, 16) if not sent else (16, 16))
        rows = step.rows.numbers
        num_tokens = sum(
            schedule.num_new_tokens[row] for row in (rows[:, steps.FIRST_TOKEN] >= 0).nonzero()[0]
        )
        sent.append((num_tokens, rows[:, steps.NUM_ENTRIES].sum()))
        cases.updated(scheduler, schedule)
    # The prompts with 4 and 1 blocks; then only those by which the tables grow, at 9 and at 33 tokens.
    assert sent == [(36, 5), (0, 0), (0, 0), (0, 2), (0, 0), (0, 0)]


def padded_step(batches: SeatedBatches, **changes: Any) -> Any:
    """Put a step that decodes three requests, padded to five. changes: of its plan."""
    scheduler, planner = cases.new_scheduler(), new_planner()
    batches.padded_sizes = (2, 5)
    cases.added(scheduler, *(cases.new_request(name, 4, 9) for name in "abc"))
    for _ in range(2):
        schedule = cases.scheduled(scheduler)
        upload = Transfers(DEVICE).new_upload()
        plan = planned(planner, schedule)
        step = batches.put(replace(plan, **changes) if plan.is_decode else plan, upload)
        upload.send()
        batches.unpack(step)
        cases.updated(scheduler, schedule)
    assert step.is_padded
    return step


def test_a_padded_batch_knows_how_many_of_its_tokens_are_real():
    """So that experts read no weights for the others."""
    batches = new_seated()
    padded_step(batches)
    batch = batches.padded_batch(5, 5, is_short=True)
    assert batch.real_count is not None
    assert (batch.real_count.tolist(), batch.queries.seq_lens.tolist()) == ([3], [5, 5, 5, 0, 0])


@pytest.mark.parametrize("rope", ROPES)
def test_a_padded_batch_begins_with_all_that_the_batch_has(rope):
    """With states, drafts, adapters and images: what a graph leaves out, no launch in it can read."""
    batches = new_seated(rope=rope, split_keys=64, with_seats=True, run_numbers=run_numbers)
    batches.take_adapters()
    batches.take_rope_offsets()
    changes = {"adapters": [1, WITHOUT_ADAPTER, 0], "rope_offsets": [-2, 0, 7]}
    step = padded_step(batches, **changes)
    batch = batches.batch(step)
    padded = batches.padded_batch(5, 5, is_short=True, has_adapters=True)
    for name in (each.name for each in fields(Batch)):
        own, more = getattr(batch, name), getattr(padded, name)
        if isinstance(own, torch.Tensor):
            assert more[: len(own)].tolist() == own.tolist(), name
        elif name not in ("slot_mapping", "queries", "output_queries", "num_logits", "real_count"):
            assert own == more, name
    queries, more = batch.queries, padded.queries
    lengths = queries.seq_lens.tolist(), queries.max_seqlen_q, queries.min_seqlen_q, queries.max_seq_len
    assert (more.seq_lens[:3].tolist(), more.max_seqlen_q, more.min_seqlen_q, more.max_seq_len) == lengths
    for own, padding in zip(batch.slot_mapping, padded.slot_mapping, strict=True):
        assert padding.tolist() == [*own.tolist(), -1, -1]
    assert padded.adapters.tolist() == [1, -1, 0, -1, -1]
    assert padded.runs.tolist() == [[0, 0]] * 5
    assert padded.seats.tolist()[3:] == [MAX_NUM_SEQS] * 2
    assert (batch.positions - batch.positions[1]).tolist() == [-2, 0, 7]
    assert padded.positions.tolist()[3:] == [0, 0]
    padded_step(batches)
    assert len({*batches.padded_batch(5, 5, is_short=True).positions.tolist()[:3]}) == 1, "offsets are kept"


def test_seats_beyond_memory_are_refused(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "zeros", fail)
    with pytest.raises(ConfigError, match=r"max_num_seqs 6 .* max_model_len 100 .* lower either"):
        new_seated()


def test_kernel_refuses_what_does_not_fit():
    row = [0, 0, steps.FROM_SEAT, steps.FROM_SEAT, NO_NEW_ENTRIES, 0, 0]
    rows = torch.tensor([row, row], dtype=torch.int32, device=DEVICE)
    ints, longs = rows[0, :0], torch.zeros(4, dtype=torch.int64, device=DEVICE)
    tables = torch.zeros(1, 4, 3, dtype=torch.int32, device=DEVICE)
    out = new_tensors(1, 2, 2, 3)
    sizes = {"num_tokens": 2, "longest": 1, "block_size": 8}
    ends, none = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE), ints.view(1, 0)
    good = [rows, ends, ints, none, longs, tables, None, None, out]
    unpack_step(*good, **sizes)
    wrong = {
        0: [rows[:, :5], rows.long(), rows.T],
        1: [ends.long(), torch.zeros(5, dtype=torch.int32), ends[:1]],
        2: [longs],
        3: [ints, none.expand(2, 0)],
        4: [longs[:3], longs.int()],
        5: [tables[0], tables.transpose(1, 2)],
        6: [longs],
        7: [ints],
        8: [
            out._replace(by_token=out.by_token[:4]),
            out._replace(by_token=out.by_token[:, :1]),
            out._replace(tables=out.tables[:, :, :2]),
            out._replace(
                seq_lens=out.seq_lens[:1], cu_seqlens_q=out.cu_seqlens_q[:2], tables=out.tables[:, :1]
            ),
        ],
    }
    for place, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError):
                unpack_step(*good[:place], value, *good[place + 1 :], **sizes)


def new_tensors(
    num_groups: int, num_rows: int, num_tokens: int, width: int, num_more: int = 0
) -> StepTensors:
    """Return tensors for a step that hold nothing yet."""

    def filled(dtype: torch.dtype, *size: int) -> torch.Tensor:
        return torch.full(size, 10**6, dtype=dtype, device=DEVICE)

    return StepTensors(
        filled(torch.int64, steps.NUM_TOKEN_COLUMNS + num_groups, num_tokens),
        filled(torch.int32, num_groups, num_rows + num_more, width),
        filled(torch.int32, num_rows),
        filled(torch.int32, num_rows + 1),
    )


@pytest.mark.parametrize(("num_padded", "num_more_tokens"), [(0, 0), (1, 2), (3, 3), (0, 700), (3, 5)])
def test_rows_are_those_of_numpy(num_padded, num_more_tokens):
    """The kernel alone, on random rows with seats in any order, against a loop.

    num_padded, num_more_tokens: rows and tokens that the step lacks.
    """
    rng = np.random.default_rng(0)
    for _ in range(5):
        num_rows, num_extra, block = int(rng.integers(1, 5)), int(rng.integers(0, 2)), 4
        seats = rng.permutation(7)[: num_rows + num_extra]  # of 8, the last of which is the scratch seat
        kept = rng.integers(0, 99, (2, 8, 300)).astype(np.int32)
        last = rng.integers(0, 99, 8)
        expected_last = last.copy()
        rows, tokens, entries, expected = [], [], [[], []], []
        ends = [0]
        for row, seat in enumerate(seats):
            from_seat = row < num_rows and rng.random() < 0.5
            num_new = 0 if row >= num_rows else 1 if from_seat else int(rng.integers(1, 700))
            start, first = int(rng.integers(0, 400)), int(rng.integers(0, 100))
            num_entries = -(-(start + num_new) // block) - first
            if (from_seat and rng.random() < 0.5) or num_entries < 0:
                first, num_entries = NO_NEW_ENTRIES, 0
            own = [int(last[seat])] if from_seat else rng.integers(0, 99, num_new).tolist()
            is_told = row >= num_rows or (rng.random() < 0.5 and not from_seat)
            new_last = int(rng.integers(0, 99)) if is_told else steps.FROM_SEAT
            rows.append(
                [seat, start, -1 if from_seat else len(tokens), new_last, first, len(entries[0]), num_entries]
            )
            expected_last[seat] = last[seat] if new_last < 0 else new_last
            tokens += [] if from_seat else own
            new = rng.integers(100, 199, (2, num_entries)).tolist()
            for group in range(2):
                entries[group] += new[group]
            if row < num_rows:
                ends.append(ends[-1] + num_new)
            table = kept[:, seat].copy()
            if num_entries:
                table[:, first : first + num_entries] = new
            expected.append((seat, start, own, table))
        ints = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (rows, ends, tokens, entries)]
        tables, last_tokens = torch.tensor(kept, device=DEVICE), torch.tensor(last, device=DEVICE)
        sources = torch.arange(num_rows, dtype=torch.int32, device=DEVICE).flip(0)
        num_out = num_rows + num_padded
        out = new_tensors(2, num_out, ends[-1] + num_more_tokens, 300, num_rows)
        unpack_step(
            *ints,
            last_tokens,
            tables,
            sources,
            None,
            out,
            num_tokens=ends[-1],
            longest=700,
            block_size=block,
        )
        by_token, found, seq_lens, cu_seqlens_q = out
        at = 0
        for row, (seat, start, own, table) in enumerate(expected):
            assert tables[:, seat].tolist() == table.tolist()
            if row >= num_rows:
                continue
            positions = np.arange(start, start + len(own))
            part = by_token[:, at : at + len(own)].tolist()
            slots = (table[:, positions // block].astype(np.int64) * block + positions % block).tolist()
            drawn_at = positions + 1
            assert part == [own, positions.tolist(), [seat] * len(own), drawn_at.tolist(), *slots]
            at += len(own)
            num = -(-(start + len(own)) // block)
            for place in (row, num_out + num_rows - 1 - row):
                assert found[:, place, :num].tolist() == table[:, :num].tolist()
                assert not found[:, place, num:].any()
        assert last_tokens.tolist() == expected_last.tolist()
        assert cu_seqlens_q.tolist() == [*ends, *[ends[-1]] * num_padded]
        assert (
            seq_lens.tolist()
            == [start + len(own) for _, start, own, _ in expected[:num_rows]] + [0] * num_padded
        )
        scratch = len(last) - 1
        assert by_token[:, at:].T.tolist() == [[0, 0, scratch, 0, -1, -1]] * num_more_tokens
        assert not found[:, num_rows:num_out].any()
