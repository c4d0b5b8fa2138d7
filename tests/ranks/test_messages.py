"""Messages of the driver: what is read is what was written, in few bytes, and only in order."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest

from paged.base.errors import RankError
from paged.ranks.messages import MessageKind, MessageReader, MessageWriter
from paged.requests.request import PromptImage
from paged.runner.image_rows import ImageRows
from paged.runner.plan import ComputedPart, Planner
from paged.scheduler.schedule import Schedule
from paged.scheduler.state_moves import SettledSeat
from paged.scheduler.towers import TowerSteps, TowerWork
from tests.support import scheduler_cases as cases

DEPTH = 3


def new_planner(**options: bool) -> Planner:
    return Planner(cases.BLOCK_SIZE, 1, with_last_tokens=True, **options)


def as_lists(part: ComputedPart) -> ComputedPart:
    """Return a part whose empty fields are of one type."""
    fields = ("swap_out", "swap_in", "copies", "settled", "asked", "adapters", "images")
    return replace(part, **{name: [*getattr(part, name)] for name in fields})


@pytest.mark.parametrize("seed", range(6))
def test_what_is_read_is_what_was_written(seed):
    """Requests come and go, decode in turns, are preempted and swapped."""
    rng = random.Random(seed)
    scheduler = cases.new_scheduler(
        num_blocks=rng.choice((14, 40)), num_host_blocks=20, num_in_flight=DEPTH, swap_pays=lambda _: seed % 2
    )
    planner = new_planner(with_prompt_lens=seed % 3 == 1, with_lens=seed % 3 == 2)
    writer, reader = MessageWriter(cases.BLOCK_SIZE, DEPTH), MessageReader(cases.BLOCK_SIZE, DEPTH, 1)
    kinds, in_flight = list[MessageKind](), list[Schedule]()
    for step in range(150):
        if len(scheduler.running) < 6 and rng.random() < 0.3:
            cases.added(scheduler, cases.new_request(f"{step}", rng.randint(1, 20), rng.randint(1, 30)))
        schedule = cases.scheduled(scheduler)
        if not schedule.is_empty:
            part = planner.plan(schedule).computed
            message = reader.read(writer.step(part))
            assert as_lists(message.step) == as_lists(part)
            kinds.append(message.kind)
            in_flight.append(schedule)
        if in_flight and (schedule.is_empty or len(in_flight) == DEPTH):
            cases.updated(scheduler, in_flight.pop(0))
    assert kinds.count(MessageKind.REPEATED_STEP) > 20
    assert kinds.count(MessageKind.STEP) > 5
    message = reader.read(writer.read_blocks([3, 5]))
    assert (message.kind, message.blocks) == (MessageKind.READ_BLOCKS, [3, 5])
    assert reader.read(writer.write_block(7)).blocks == [7]
    assert reader.read(writer.end()).kind is MessageKind.END


def test_a_decode_beside_a_settled_seat_is_told_whole():
    """Although the same seats decode once more: another seat's state sees the rest of its run."""
    writer, reader = MessageWriter(cases.BLOCK_SIZE, 1), MessageReader(cases.BLOCK_SIZE, 1, 1)
    part = ComputedPart(num_decodes=1, seats=[2], counts=[1], sampled=[0], sampled_seats=[2])
    for start, settled in ((8, []), (9, []), (10, [SettledSeat(1, 3, 20)]), (11, [])):
        step = replace(part, starts=[start], last_tokens=array("i", [start]), settled=settled)
        message = reader.read(writer.step(step))
        assert message.step is not None
        assert [*message.step.settled] == settled
        is_told = message.kind is MessageKind.STEP
        assert is_told == (start == 8 or bool(settled))


def test_what_a_step_has_of_images_is_told():
    """All but pixels. A decode behind an image is told as what has changed, but for other offsets."""
    writer, reader = MessageWriter(cases.BLOCK_SIZE, 1), MessageReader(cases.BLOCK_SIZE, 1, 1)
    first = PromptImage(0, 0, bytes([1] * 32), 8, 4, b"")
    second = PromptImage(0, 0, bytes([255] * 32), 8 * 255, 4, b"", values=bytes([0, 0, 0, 200] * 14))
    part = ComputedPart(
        num_decodes=1, seats=[2], counts=[1], sampled=[0], sampled_seats=[2], entries=[array("i")]
    )
    seeing = replace(
        part,
        starts=[7],
        images=[ImageRows(second, [0, 2], 3), ImageRows(first, [5], 0)],
        last_keys=array("i", [9, 9]),
        grid_positions=array("q", [1, 2, 3]),
        towers=TowerSteps([(second.sha256, False), (first.sha256, True)], [TowerWork(second, 1, 2, True)]),
    )
    behind = replace(part, starts=[8], last_tokens=array("i", [3]), rope_offsets=[-4])
    working = replace(behind, starts=[10], towers=TowerSteps([(first.sha256, False)], []))
    steps = [
        seeing,
        behind,
        replace(behind, starts=[9]),
        working,
        replace(behind, starts=[11], rope_offsets=[-5]),
    ]
    kinds = []
    for step in steps:
        message = reader.read(writer.step(step))
        assert as_lists(message.step) == as_lists(step)
        kinds.append(message.kind)
    assert kinds == [MessageKind.STEP] * 2 + [MessageKind.REPEATED_STEP] + [MessageKind.STEP] * 2


def test_a_decode_of_64_sequences_takes_less_than_a_kilobyte():
    """Also if the block tables of all of them grow at once, and in every other step others decode."""
    scheduler = cases.new_scheduler(num_blocks=2000, max_num_seqs=128, budget=4096, num_in_flight=2)
    cases.added(scheduler, *(cases.new_request(str(i), 8, 60) for i in range(128)))
    planner, writer = new_planner(), MessageWriter(cases.BLOCK_SIZE, 2)
    sizes, most_grown, in_flight = list[int](), 0, list[Schedule]()
    for _ in range(60):
        schedule = cases.scheduled(scheduler)
        if schedule.is_empty:
            cases.updated(scheduler, in_flight.pop(0))
            continue
        part = planner.plan(schedule).computed
        in_flight.append(schedule)
        data = writer.step(part)
        if data[0] == MessageKind.REPEATED_STEP:
            assert len(part.seats) == 64
            sizes.append(len(data))
            most_grown = max(most_grown, len(part.changes))
        if len(in_flight) == 2:
            cases.updated(scheduler, in_flight.pop(0))
    assert most_grown == 64
    assert max(sizes) < 1024
    assert len(sizes) > 20


def test_a_message_that_is_lost_or_doubled_is_refused():
    scheduler = cases.new_scheduler()
    cases.added(scheduler, cases.new_request("a", 3, 9))
    part = new_planner().plan(cases.scheduled(scheduler)).computed
    writer, reader = MessageWriter(cases.BLOCK_SIZE, 1), MessageReader(cases.BLOCK_SIZE, 1, 1)
    first, second, third = (writer.step(part) for _ in range(3))
    reader.read(first)
    with pytest.raises(RankError, match="message 3 of the driver came where message 2 was due"):
        reader.read(third)
    reader = MessageReader(cases.BLOCK_SIZE, 1, 1)
    reader.read(first)
    with pytest.raises(RankError, match="message 1"):
        reader.read(first)
    assert second != third


def test_a_decode_that_moves_blocks_is_told_as_a_whole():
    scheduler = cases.new_scheduler()
    cases.added(scheduler, cases.new_request("a", 3, 9))
    planner, writer, reader = new_planner(), MessageWriter(8, 1), MessageReader(8, 1, 1)
    moves = [], [], [], [(1, 2)]
    for swap_out, kind in zip(moves, (1, 1, 2, 1), strict=True):
        schedule = cases.scheduled(scheduler)
        part = replace(planner.plan(schedule).computed, swap_out=swap_out)
        message = reader.read(writer.step(part))
        assert message.kind == kind
        assert as_lists(message.step) == as_lists(part)
        cases.updated(scheduler, schedule)


def test_kinds_of_messages_are_told_apart():
    assert len(MessageKind) == len(MessageKind.__members__)  # two with one number would be one
