"""A schedule as ragged tensors, compared with slots computed by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from paged.blocks.manager import BlockManager
from paged.device.transfers import Transfers
from paged.kernels.attention_options import AttentionPlan
from paged.model.batch import Batch, Queries
from paged.requests.prompt_report import PromptReport
from paged.requests.request import Request, RequestInputs
from paged.runner.batches.batches import put_adapters
from paged.runner.batches.host import HostBatches
from paged.runner.plan import Planner
from paged.scheduler.schedule import Schedule
from paged.scheduler.scheduler import Scheduler
from tests.support import scheduler_cases as cases
from tests.support.batches import assert_equal, made, made_and_drawn, planned, whole

CPU = torch.device("cpu")


def new_schedule(manager: BlockManager, rows: list[tuple[int, int, int, int]]) -> Schedule:
    """Make a step of requests, given as (prompt tokens, all tokens, computed so far, new in this step)."""
    schedule = Schedule()
    for prompt, total, computed, new in rows:
        request = Request(RequestInputs(prompt_token_ids=list(range(100, 100 + prompt)), max_total_tokens=99))
        for i in range(prompt, total):
            request.token_ids.append(100 + i)
        request.num_computed_tokens = computed
        request.blocks = manager.open(request.token_ids)
        manager.start(request.blocks, [[] for _ in manager.windows])
        for start, end in ((0, computed), (computed, computed + new)):
            assert manager.grow(request.blocks, start, end, [])
        request.seat = len(schedule.requests)
        schedule.num_decode_tokens += new == 1 and schedule.num_decode_tokens == len(schedule.requests)
        schedule.add(request, new)
        if computed + new == total:
            schedule.sample(request, len(schedule.requests) - 1)
    return schedule


def new_batches(num_groups: int, num_kept: int = 1) -> HostBatches:
    return HostBatches(8, CPU, num_groups=num_groups, max_num_seqs=8, with_rope_lens=True, num_kept=num_kept)


def build(schedule: Schedule) -> Batch:
    """Make the batch of a schedule alone."""
    num_groups = len(schedule.requests[0].blocks.tables)
    plan = planned(Planner(8, num_groups, with_prompt_lens=True), whole(schedule))
    return made(new_batches(num_groups), plan, Transfers(CPU))[1]


def tensors_of(queries: Queries) -> list[torch.Tensor]:
    return [queries.seq_lens, queries.cu_seqlens_q, *queries.block_tables]


def numbers_of(queries: Queries | None) -> list[object]:
    if queries is None:
        return []
    extremes = queries.min_seqlen_q, queries.max_seqlen_q
    return [*extremes, *(numbers.tolist() for numbers in tensors_of(queries))]


def test_tokens_are_concatenated_without_padding():
    schedule = new_schedule(BlockManager(16, 8), [(3, 10, 9, 1), (12, 12, 5, 4), (2, 2, 0, 2)])
    batch = build(schedule)
    # Blocks are allocated in order: the first request has 0 and 1, the second 2 and 3, the third 4.
    assert batch.token_ids.tolist() == [109, 105, 106, 107, 108, 100, 101]
    assert batch.positions.tolist() == [9, 5, 6, 7, 8, 0, 1]
    assert [slots.tolist() for slots in batch.slot_mapping] == [[9, 21, 22, 23, 24, 32, 33]]
    assert [table.tolist() for table in batch.queries.block_tables] == [[[0, 1], [2, 3], [4, 0]]]
    assert batch.queries.seq_lens.tolist() == [10, 9, 2]
    assert batch.queries.cu_seqlens_q.tolist() == [0, 1, 5, 7]
    assert batch.rope_lens.tolist() == [10, 12, 12, 12, 12, 2, 2]
    # The second is in the middle of its prompt: nothing is sampled from it.
    assert batch.output_rows.tolist() == [0, 6]
    assert (batch.num_tokens, batch.num_logits) == (7, 2)
    assert (batch.queries.min_seqlen_q, batch.queries.max_seqlen_q) == (1, 4)
    assert {numbers.dtype for numbers in tensors_of(batch.queries)} == {torch.int32}
    assert batch.token_ids.dtype == batch.slot_mapping[0].dtype == torch.int64


def test_single_tokens_are_concatenated_alike():
    schedule = new_schedule(BlockManager(16, 8), [(9, 9, 8, 1), (1, 1, 0, 1), (16, 16, 15, 1)])
    batch = build(schedule)
    assert batch.token_ids.tolist() == [108, 100, 115]
    assert batch.positions.tolist() == [8, 0, 15]
    assert batch.slot_mapping[0].tolist() == [8, 16, 39]
    assert batch.queries.block_tables[0].tolist() == [[0, 1], [2, 0], [3, 4]]
    assert batch.rope_lens.tolist() == batch.queries.seq_lens.tolist() == [9, 1, 16]
    assert batch.queries.cu_seqlens_q.tolist() == [0, 1, 2, 3]
    assert batch.output_rows.tolist() == [0, 1, 2]


def test_each_layer_group_has_its_own_tables():
    manager = BlockManager(16, 8, windows=[None, 4])
    batch = build(new_schedule(manager, [(17, 17, 16, 1)]))
    # The first group has three blocks; the second has freed what the window passed.
    full, windowed = (table.tolist()[0] for table in batch.queries.block_tables)
    assert full[:2] == [0, 1]
    assert windowed[0] == 0
    assert len({full[2], windowed[1], windowed[2]} - {0, 1}) == 3
    assert [slots.tolist() for slots in batch.slot_mapping] == [[8 * full[2]], [8 * windowed[2]]]


def test_several_samples_use_the_logits_of_one_row():
    schedule = new_schedule(BlockManager(16, 8), [(3, 3, 0, 3), (2, 3, 2, 1)])
    schedule.sampled = [0, 0, 1]
    batch = build(schedule)
    assert batch.output_rows.tolist() == [2, 2, 3]
    assert numbers_of(batch.output_queries) == [1, 1, [3, 3, 3], [0, 1, 2, 3], [[0], [0], [1]]]


def test_output_rows_are_queries_of_their_own():
    """Rows to sample from come first, then those for reports, which may end before the step does."""
    schedule = new_schedule(BlockManager(16, 8), [(3, 10, 9, 1), (12, 12, 5, 4), (20, 20, 2, 9)])
    schedule.requests[1].report = PromptReport(6, 8, 0)
    schedule.requests[2].report = PromptReport(2, 19, 0)
    batch = build(schedule)
    assert batch.output_rows.tolist() == [0, 2, 3, *range(5, 14)]
    # The first has blocks 0 and 1, the second 2 and 3, the third 4 and 5.
    tables = [[0, 1], [2, 3], [4, 5]]
    assert numbers_of(batch.output_queries) == [1, 9, [10, 8, 11], [0, 1, 3, 12], tables]
    schedule = new_schedule(BlockManager(16, 8), [(12, 12, 5, 4)])
    assert build(schedule).output_queries is None
    schedule = new_schedule(BlockManager(16, 8), [(9, 9, 8, 1), (1, 1, 0, 1)])
    batch = build(schedule)
    assert batch.output_queries is batch.queries


def test_tokens_that_pad_a_step_have_no_adapter():
    plan = SimpleNamespace(adapters=[2, 0], counts=[1, 3], sampled=[0, 1], asked=[])
    upload = Transfers(CPU).new_upload()
    adapters = put_adapters(plan, upload, 6)
    upload.send()
    by_token, by_output = adapters.tensors()
    assert by_token.tolist() == [2, 0, 0, 0, -1, -1]
    assert by_output.tolist() == [2, 0]


@pytest.mark.parametrize("num_kept", [1, 2])
@pytest.mark.parametrize("windows", [(None,), (None, 12)], ids=["full", "windowed"])
def test_advanced_batch_equals_a_new_one(windows, num_kept):
    """While requests arrive, fork, grow by blocks, are preempted and finish."""
    manager = BlockManager(60, cases.BLOCK_SIZE, windows=windows, max_step_tokens=32)
    scheduler = Scheduler(manager, max_num_seqs=8, max_num_batched_tokens=32)
    batches = new_batches(len(windows), num_kept)
    planner = Planner(8, len(windows), with_prompt_lens=True)
    last = None
    num_steps = num_again = 0
    for i in range(24):
        scheduler.add(cases.new_request(str(i), prompt_len=1 + 5 * i % 37, max_tokens=20 + 7 * i % 50))
    while scheduler.has_unfinished():
        schedule = scheduler.schedule()
        batch = made_and_drawn(batches, planned(planner, schedule), schedule, CPU)
        assert_equal(batch, build(schedule))
        assert not batch.queries.plans, "the plan was made for other lengths"
        batch.queries.plans[None, 1] = AttentionPlan(())  # by the first layer
        num_steps, num_again, last = num_steps + 1, num_again + (batch is last), batch
        cases.updated(scheduler, schedule)
        if num_steps in (30, 60) and scheduler.running[0].ready:
            parent = scheduler.running[0]
            child = cases.new_request(f"fork {num_steps}", 1, parent.inputs.max_total_tokens + 8)
            child.token_ids = parent.token_ids.copy()
            scheduler.fork(parent, child)
    assert num_again > num_steps / 4
    assert scheduler.counters.num_recomputed
