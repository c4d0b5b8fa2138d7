"""Deterministic simulation: the real scheduler and block manager with a made-up model, clock and users.

    python -m tests.simulation                         # 2 million steps
    python -m tests.simulation --steps 100_000_000
    python -m tests.simulation --seed 1234             # one world again, the one that failed

A world is a seed: it fixes every size, option, arrival, abort, fork and pin. The made-up model runs each step
from its plan, in some worlds from the plan's bytes, and keeps of each seat what it was told. It writes into
each slot a hash of the token and of the slot before, which it reads through the block table; the next token
is a hash of all slots that it sees. So a block that is lost, shared wrongly, reused early or not copied
changes what is read, and everything that is read is compared with the content of an endless memory. After
each step every invariant is checked.

In some worlds layers keep states, which a seat has: a hash of the tokens that it has seen. It is compared
whenever a step begins with it, and so are the snapshots by which prompts begin behind cached blocks. A run of
drafts leaves a state as it was, and its tokens are kept by their places.

In some worlds requests have adapters, of which a step has few. The device copies them into slots when a step
is launched, and a row must find its own in the slot that the step names. An adapter is part of the namespace,
so what is read tells whether a block was shared between two.

In some worlds prompts have images, which a tower sees layer by layer beside the tokens of others. In place of
a placeholder, a slot takes a hash of its image, so what is read tells whether a row has got the embedding of
its own image, and whether a block was shared between two images. The tower must take no more of a step than
the tokens beside it leave, compute nothing twice, and hold nothing that no request waits for.

Some worlds have several ranks: the others have the driver's messages alone, compute them later, and then hold
what the first one holds. In some of one rank, steps in flight have the same requests: the device draws tokens
from what it reads when a step is launched, long before the scheduler knows them.
"""

from __future__ import annotations

import argparse
import copy
import gc
import hashlib
import marshal
import math
import operator
import random
import sys
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, NamedTuple

from paged.base.errors import QueueFullError
from paged.blocks.manager import BlockManager
from paged.blocks.pool import BlockPool
from paged.blocks.prefix_chain import sha256_block
from paged.blocks.snapshots import Snapshots
from paged.drafting.drafter import Draft
from paged.drafting.lengths import DraftLengths
from paged.options.sampling_params import SamplingParams
from paged.ranks.messages import MessageReader, MessageWriter
from paged.requests.request import (
    LONG,
    NO_ADAPTER,
    NO_MASK,
    SLOW_READER,
    PromptImage,
    Request,
    RequestInputs,
    RequestStatus,
)
from paged.runner.plan import IN_SEAT, ComputedPart, Planner
from paged.runner.plan_bytes import from_bytes, to_bytes
from paged.scheduler.adapters import place_of
from paged.scheduler.drafts import Drafts, verified
from paged.scheduler.policies import POLICIES, new_policy
from paged.scheduler.schedule import Schedule, StepOutput
from paged.scheduler.scheduler import Scheduler
from paged.scheduler.waiting import Need, Room
from tests.support.simulated_towers import (
    MARKER,
    last_keys_of,
    random_tower,
    seen_tokens,
    vision_of,
    with_images,
)

STEPS = 2_000_000
NO_PARAMS = SamplingParams()
UNGUESSED_PARAMS = SamplingParams(num_speculative_tokens=0)
WAITING_PARAMS = SamplingParams(dry_multiplier=1.0)
STOP = 0
HOLDS = 2**40  # makes another seed of the same world, so that the other choices stay what they were
RUNS = 2**41
DRAFTS = 2**42
RANKS = 2**43
PARTS = 2**44
AHEAD = 2**45
STATES = 2**46
FORKS = 2**47
ADAPTERS = 2**48
IMAGES = 2**49
UNWRITTEN = b"\xff"
MOST_DRAFTS = 9
MOST_PLACES = 2 * (1 + MOST_DRAFTS)  # of a seat's tokens of runs: as many as the engine has


def weak_hash(parent: bytes, tokens: bytes) -> bytes:
    """Four different keys, so that nearly everything collides."""
    return bytes([hashlib.sha256(parent + tokens).digest()[0] & 0x30] * 32)


class Read(NamedTuple):
    """What a step reads: a request up to a token, behind those that are known drafts, or pending tokens."""

    request: Request
    end: int
    drafts: list[int]
    num_known: int
    pending: list[int]


@dataclass
class Truth:
    """What an endless memory would hold for a request: the values of its slots, in its namespace so far."""

    namespace: bytes
    values: array[int]

    @classmethod
    def begin(cls, request: Request) -> Truth:
        """Return the truth of a request of which nothing is computed."""
        return cls(request.namespace, array("I", [zlib.crc32(request.namespace)]))

    def at(self, request: Request, num_tokens: int) -> array[int]:
        """Return the value of the namespace, then those of num_tokens slots."""
        if request.namespace != self.namespace:  # it has grown long: all its values are others
            self.namespace, self.values = request.namespace, Truth.begin(request).values
        for token in seen_tokens(request)[len(self.values) - 1 : num_tokens]:
            self.values.append(slot_value(self.values[-1], token))
        return self.values


def slot_value(before: int, token: int) -> int:
    """Return what the made-up model writes for a token after the slot that holds `before`."""
    return zlib.crc32(token.to_bytes(4, "little"), before)


def state_after(state: int, tokens: Sequence[int]) -> int:
    """Return what a state becomes by tokens: the value of the last one's slot."""
    for token in tokens:
        state = slot_value(state, token)
    return state


class States:
    """The states of a made-up model, by slot: hashes of tokens. Seats come first, then slots of host memory.

    num_places: how many tokens of runs of drafts a seat keeps.
    """

    def __init__(self, num_seats: int, num_host_slots: int, num_places: int) -> None:
        self.slots = [-1] * (num_seats + num_host_slots)
        self.runs = [[-1] * num_places for _ in range(num_seats)]

    def move(self, plan: ComputedPart) -> None:
        """Do what a step does before it computes: end runs of drafts, then move states."""
        for seat, num_unapplied, end in plan.settled:
            self.apply_run(seat, num_unapplied, end)
        for source, target in plan.state_moves:
            self.slots[target] = self.slots[source]

    def apply_run(self, seat: int, num_unapplied: int, end: int) -> None:
        """Show a state the last tokens before `end`, which were of a run."""
        run = self.runs[seat]
        tokens = [run[at % len(run)] for at in range(end - num_unapplied, end)]
        assert -1 not in tokens, "a token is applied that no run has had"
        self.slots[seat] = state_after(self.slots[seat], tokens)

    def before(self, plan: ComputedPart, row: int, begun: int) -> int:
        """Return the state with which a row of a step begins. begun: that of no token."""
        seat = plan.seats[row]
        if plan.unapplied and plan.unapplied[row]:
            assert plan.unapplied[row] <= plan.starts[row], "more is applied than was computed"
            self.apply_run(seat, plan.unapplied[row], plan.starts[row])
        return self.slots[seat] if plan.starts[row] else begun

    def advance(self, plan: ComputedPart, row: int, state: int, tokens: Sequence[int]) -> None:
        """Show a row's state its tokens, or keep them if they are a run. state: as `before` returns it."""
        seat = plan.seats[row]
        self.slots[seat] = state
        if plan.num_decodes <= row < plan.num_decodes + plan.num_drafting:
            run = self.runs[seat]
            for at, token in enumerate(tokens, plan.starts[row]):
                run[at % len(run)] = token
        else:
            self.slots[seat] = state_after(state, tokens)


class WatchedManager(BlockManager):
    """Checks itself only if something has changed since the last check; in two steps of three nothing has."""

    found_sound = b""

    def check(self) -> None:
        """Assert every invariant, unless this state is known to be sound."""
        state = self.state()
        if state != self.found_sound:
            super().check()
            self.found_sound = state

    def state(self) -> bytes:
        """Return everything that the check reads."""
        sequences = [(seq.capacity, seq.num_dropped, seq.tables, seq.rolling) for seq in self._sequences]
        pools = (state_of(vars(self.pool)), state_of(vars(self.host_pool)))
        states = None if self.snapshots is None else [*vars(self.snapshots).values()]
        return marshal.dumps((pools, sequences, self._pins, dict(self._pinned), f"{states}"), 2)


# Without the number of steps, which alone changes nothing.
state_of = operator.itemgetter(
    *sorted(vars(BlockPool(1)).keys() - {"_steps_begun", "_steps_ended", "on_drop"})
)


class WatchedScheduler(Scheduler):
    """Knows for which waiting request others were preempted in this step, and what it was to begin with."""

    favoured: Request | None = None
    num_cached = 0
    users: Sequence[Request] = ()  # of the adapter whose slot it was to have
    seen: Collection[bytes] = ()  # the images that the tower had seen before this step

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        victims_for = self.preemption._victims_for

        def watched(head: Request, need: Need, room: Room, users: Sequence[Request] = ()) -> list[Request]:
            victims = victims_for(head, need, room, users)
            if victims:
                self.favoured, self.num_cached = head, need.num_computed_tokens
                self.users = users
            return victims

        self.preemption._victims_for = watched

    def schedule(self) -> Schedule:
        """Choose the next step."""
        self.favoured = None
        self.users = ()
        active = self.towers._active if self.towers else {}
        self.seen = {sha256 for sha256, each in active.items() if each.is_done}
        return super().schedule()

    def has_lost_blocks(self, request: Request) -> bool:
        """Return whether a waiting request finds fewer cached tokens than it was to begin with, or waits for
        a snapshot that this step leaves behind, or for its images, or whether work on others' images takes
        tokens of the step.
        """
        if request.blocks.is_due or (self.towers and self.towers.num_tokens):
            return True
        images = request.inputs.images
        if any(image.end > self.num_cached and image.sha256 not in self.seen for image in images):
            return True
        return self._queue.need(request).num_computed_tokens < self.num_cached


class Follower:
    """Another rank of the made-up model: it knows what the driver's messages say, and computes them later."""

    def __init__(self, world: World) -> None:
        self.block_size = world.block_size
        self.memory = [bytearray(block) for block in world.memory]
        self.host = [bytearray(block) for block in world.host]
        self.last_tokens = [0] * world.max_num_seqs
        self.tables = [[array("i") for _ in world.windows] for _ in range(world.max_num_seqs)]
        self.states = copy.deepcopy(world.states)
        self.tower = copy.deepcopy(world.tower)
        # Messages, and by row what the values of the slots of a request begin with.
        self.inbox: deque[tuple[bytes, dict[int, int]]] = deque()
        self.num_done = 0
        self._reader = MessageReader(world.block_size, world.depth, len(world.windows))

    def compute(self) -> None:
        """Do what the next message says."""
        message, seeds = self.inbox.popleft()
        plan = self._reader.read(message).step
        assert plan is not None, "a message without a step"
        self.num_done += 1
        move_blocks(plan, self.memory, self.host)
        if self.states is not None:
            self.states.move(plan)
        self.tower.work(plan.towers)
        told = tell_seats(plan, self.last_tokens, self.tables)
        seen = self.tower.see(plan)
        for row, (seat, start, count) in enumerate(zip(plan.seats, plan.starts, plan.counts, strict=True)):
            if row < plan.num_decodes:
                self.last_tokens[seat] = plan.last_tokens[row]
            tokens = embedded(told.get(row) or [self.last_tokens[seat]], sum(plan.counts[:row]), seen)
            assert len(tokens) == count, "a follower has not got the tokens of the step"
            for table in self.tables[seat]:
                self._write(table, start, tokens, seeds.get(row, 0))
            if self.states is not None:
                state = self.states.before(plan, row, seeds.get(row, 0))
                self.states.advance(plan, row, state, tokens)

    def _write(self, table: array[int], start: int, tokens: list[int], value: int) -> None:
        """Write the slots of tokens after the one before. value: what comes before the first one of all."""
        size = self.block_size
        before, at = divmod(start - 1, size)
        if start:
            value = int.from_bytes(self.memory[table[before]][4 * at : 4 * at + 4], "little")
        for position, token in enumerate(tokens, start):
            value = slot_value(value, token)
            block, at = divmod(position, size)
            self.memory[table[block]][4 * at : 4 * at + 4] = value.to_bytes(4, "little")


def embedded(tokens: list[int], first: int, seen: dict[int, int]) -> list[int]:
    """Return a row's tokens with its embeddings, given those of the step. first: the number of the first."""
    found = [seen.get(number, token) for number, token in enumerate(tokens, first)] if seen else tokens
    assert MARKER not in found, "a placeholder has no embedding"
    return found


def move_blocks(plan: ComputedPart, memory: list[bytearray], host: list[bytearray]) -> None:
    """Copy the blocks that a step moves."""
    for pairs, source, target in (
        (plan.swap_out, memory, host),
        (plan.swap_in, host, memory),
        (plan.copies, memory, memory),
    ):
        if not pairs:
            continue
        written = [b for _, b in pairs]
        assert len(set(written)) == len(written), "a block is the target of two copies"
        assert source is not target or not {a for a, _ in pairs} & set(written), "copies race"
        for a, b in pairs:
            target[b][:] = source[a]


def tell_seats(
    plan: ComputedPart, last_tokens: list[int], tables: list[list[array[int]]]
) -> dict[int, list[int]]:
    """Keep what a step tells its seats. Return the tokens that it sends, by row."""
    told = {}
    first_token = first_entry = 0
    for row, seat, num_tokens, last_token, first, num_entries in plan.changes:
        if num_tokens != IN_SEAT:
            last_tokens[seat] = last_token
            told[row] = plan.tokens[first_token : first_token + num_tokens].tolist()
            first_token += num_tokens
        for table, entries in zip(tables[seat], plan.entries, strict=True):
            table[first:] = entries[first_entry : first_entry + num_entries]
        first_entry += num_entries
    return told


class World:
    """One scheduler with its users; everything depends on the seed alone."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.now = 0.0
        self.block_size = rng.choice((1, 2, 4, 4, 8))
        windows: list[int | None] = [None]
        if rng.random() < 0.4:
            windows = [rng.choice((None, 2, 3, 2 * self.block_size, 11)) for _ in range(rng.randint(1, 3))]
        self.windows = windows
        num_blocks = rng.randint(4, 16) * len(windows)
        self.budget = budget = rng.choice((1, 3, 8, 16, 64))
        cap = rng.choice((None, None, 1, 5))
        self.max_chunk = min(budget, cap or budget)
        num_host_blocks, caches = rng.choice((0, 0, 3, 20)), rng.random() < 0.85
        self.collides = rng.random() < 0.3
        stateful = random.Random(seed ^ STATES)
        has_states = stateful.random() < 0.3
        num_host_states = stateful.randint(0, 3) if has_states else None
        self.max_preemptions = rng.choice((1, 2, 8))
        self.max_num_seqs = rng.randint(1, 6)
        self.snapshots: Snapshots | None = None
        if has_states and caches:
            num_snapshots = stateful.choice((0, 1, 1, 2, 3, 8, 30))
            interval = stateful.choice((1, 2, 3, 100)) * self.block_size
            if num_snapshots:
                self.snapshots = Snapshots(num_snapshots, self.max_num_seqs, self.block_size, interval)
        self.manager = WatchedManager(
            num_blocks,
            self.block_size,
            windows=windows,
            max_step_tokens=self.max_chunk,
            num_host_blocks=num_host_blocks,
            num_host_states=num_host_states,
            enable_prefix_caching=self.snapshots is not None if has_states else caches,
            hash_block=weak_hash if self.collides else sha256_block,
            snapshots=self.snapshots,
        )
        # By slot: seats, then those of snapshots, then those of host memory.
        num_slots = 0 if self.snapshots is None else self.snapshots.num_slots
        num_more = num_slots + (num_host_states or 0)
        self.states = States(self.max_num_seqs, num_more, MOST_PLACES) if has_states else None
        self.policy_name = rng.choice(POLICIES)
        self.has_order = self.policy_name in ("fcfs", "priority")  # where no request overtakes another
        self.scheduler = WatchedScheduler(
            self.manager,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=budget,
            policy=new_policy(self.policy_name, self._num_cached),
            long_prefill_token_threshold=cap,
            max_num_partial_prefills=rng.choice((None, 1, 2)),
            watermark=rng.choice((0.0, 0.0, 0.1)),
            max_waiting=rng.choice((None, None, 6)),
            max_preemptions=self.max_preemptions,
            swap_pays=rng.choice((None, lambda _: True, lambda n: n % 2 == 0)),
            held_for_s=random.Random(seed ^ HOLDS).choice((0.0, 2.0, 20.0)),
            clock=lambda: self.now,
        )
        self.depth = rng.choice((1, 1, 1, 2, 3))  # steps in flight at once
        self.aheading = random.Random(seed ^ AHEAD)
        self.runs_ahead = self.aheading.random() < 0.4 and seed % 8 != 3
        self.failure_share = self.aheading.choice((0.0, 0.0, 0.02)) if self.runs_ahead else 0.0
        self.waiting_share = self.aheading.choice((0.0, 0.3, 1.0))  # of requests that wait for their results
        if self.runs_ahead:
            self.depth = self.aheading.choice((2, 2, 3))
            self.scheduler.run_ahead()
        else:
            self.scheduler.num_in_flight = self.depth
        self.drawn: dict[str, list[int]] = {}  # tokens that steps in flight have drawn
        self.arrivals, self.disturbance = rng.choice((0.1, 0.5, 1.5)), rng.choice((0.0, 0.05, 0.2))
        self.memory = [bytearray(UNWRITTEN * 4 * self.block_size) for _ in range(num_blocks)]
        self.host = [
            bytearray(UNWRITTEN * 4 * self.block_size) for _ in range(self.manager.host_pool.num_blocks)
        ]
        self.prefixes = [[rng.randint(1, 3) for _ in range(24)] for _ in range(3)]
        self.live: dict[str, tuple[Request, Truth]] = {}
        self.seated: dict[int, Request] = {}  # whose seats the device has been told of
        self.sends_bytes = seed % 4 == 0  # not always, since it takes a tenth of the time
        ranked = random.Random(seed ^ RANKS)
        num_followers = ranked.choice((1, 2)) if seed % 8 == 3 else 0
        self.showing = random.Random(seed ^ IMAGES)
        self.image_share = self.showing.choice((0.0, 0.0, 0.3, 0.9))  # of prompts
        self.sees_itself = self.showing.random() < 0.4
        self.tower, queue = random_tower(self.showing)
        if self.image_share:
            self.scheduler.towers = queue
        self.planner = Planner(
            self.block_size,
            len(windows),
            vision=vision_of(sees_itself=self.sees_itself) if self.image_share else None,
            with_last_tokens=num_followers > 0,
            with_pending=self.runs_ahead,
        )
        # What the device keeps of each seat: its last token and its block tables.
        self.last_tokens = [0] * self.max_num_seqs
        self.tables = [[array("i") for _ in windows] for _ in range(self.max_num_seqs)]
        # By step: what it reads, the seats whose tokens it draws, those tokens where they are drawn at its
        # launch, and the block tables that it reads by.
        self.in_flight: deque[
            tuple[Schedule, list[Read], list[int], list[int | None], list[list[array[int]]]]
        ] = deque()
        self.writer = MessageWriter(self.block_size, self.depth)
        self.followers = [Follower(self) for _ in range(num_followers)]
        self.haste = ranked.random()  # how likely a follower computes its next step at once
        self.wait_share = 0.2  # of steps whose end waits for the followers
        self.ranked = ranked
        # What arrives of a message, for tests.
        self.deliver: Callable[[bytes], list[bytes]] = lambda message: [message]
        self.pins: list[str] = []
        self.num_requests = self.num_steps = 0
        self.longest = self.manager.longest_fit(40)
        apart = random.Random(~seed)  # so that the other worlds stay what they were
        # The length from which K and V are others, as with longrope; some tokens then complete a stop string.
        self.long_from = apart.randint(2, 40) if apart.random() < 0.3 else None
        self.parting = random.Random(seed ^ PARTS)
        self.part_share = self.parting.choice((0.0, 0.0, 0.3, 0.9))  # of requests that are parts of a call
        self.holding = random.Random(seed ^ HOLDS)
        self.hold_share = self.holding.choice((0.0, 0.0, 0.05, 0.3))
        self.running = random.Random(seed ^ RUNS)
        self.run_share = self.running.choice((0.0, 0.0, 0.1, 0.4))  # of rows that get no token, or several
        self.drafting = random.Random(seed ^ DRAFTS)
        self.right_share = self.drafting.choice((0.0, 0.5, 0.9, 1.0))  # of guessed tokens
        if self.drafting.random() < 0.5:
            most = self.drafting.choice((1, 2, 4, MOST_DRAFTS))
            max_rows = self.drafting.choice((3, budget))
            lengths = None
            if self.drafting.random() < 0.3:
                lengths = DraftLengths(most, lambda rows: 1 + rows / 24, lambda: self.now)
            self.scheduler.drafts = Drafts(self, most, 4, max_rows, lengths)
        self.parting_runs = random.Random(seed ^ FORKS)
        self.fork_share = self.parting_runs.choice((0.0, 0.1, 0.3))  # of steps with a run behind them
        self.adapting = random.Random(seed ^ ADAPTERS)
        self.num_adapters = 0
        self.slots: dict[int, int] = {}  # the adapter that the device has in each slot
        self.passed: tuple[Request | None, int] = None, 0  # the next request for a slot, and who passed it
        # Other ranks are told of no adapters.
        if self.adapting.random() < 0.4 and not self.followers:
            self.num_adapters = self.adapting.choice((2, 3, 8))
            self.adapter_share = self.adapting.choice((0.5, 0.9, 1.0))
            self.num_slots = self.adapting.randint(1, 3)
            self.scheduler.have_adapters(self.num_slots)

    def propose(self, requests: list[Request], limits: list[int]) -> list[Draft]:
        """Guess tokens, right, wrong or partly right: a world is its own drafter."""
        return [self.guess(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def guess(self, request: Request, limit: int) -> Draft:
        """Guess up to so many next tokens of a request."""
        value = self.live[request.request_id][1].at(request, request.num_tokens)[request.num_tokens]
        tokens = list[int]()
        for _ in range(self.drafting.randint(0, limit)):
            is_right = self.drafting.random() < self.right_share
            tokens.append((self.sample(request, value) or 0) if is_right else self.drafting.randint(0, 3))
            value = slot_value(value, tokens[-1])
        return Draft(tokens, self.drafting.random())

    def _num_cached(self, request: Request) -> int:
        return self.manager.num_matched(request.blocks, request.token_ids)

    def run(self, num_steps: int) -> int:
        """Run steps with arrivals, then steps until all requests are done. Return how many steps."""
        while self.num_steps < num_steps:
            for _ in range(int(self.arrivals + self.rng.random())):
                if len(self.live) < 16:
                    self.arrive()
            if self.rng.random() < self.disturbance:
                self.disturb()
            if self.holding.random() < self.hold_share:
                self.hold_or_release()
            if self.states is not None and self.parting_runs.random() < self.fork_share:
                self.fork_behind_a_run()
            if self.aheading.random() < self.failure_share:
                self.fail()
            self.step()
        # Requests that stay held keep no other from its end, and end themselves once they are released.
        requests = [r for r, _ in self.live.values()]
        stuck = {id(r) for leader in requests if leader.held for r in (leader, *leader.siblings)}
        self.finish_all([r for r in requests if id(r) not in stuck])
        for request in requests:
            self.scheduler.release(request, SLOW_READER | NO_MASK)
        self.finish_all(requests)
        while self.in_flight:
            self.finish_step()
        self.wait_for_followers()
        for name in self.pins:
            self.manager.unpin(name)
        self.scheduler.check()
        if self.scheduler.towers is not None:
            self.scheduler.towers.begin_step([])
            self.tower.move(self.scheduler.towers._moves)
            self.tower.check(self.scheduler.towers)
            assert not self.tower.held or self.tower.has_lost, "images are held without a request"
            assert not self.tower.layers, "images are on their way without a request"
        assert not self.manager.pool.num_used, "blocks are held without a request"
        assert self.manager.host_pool.num_free == self.manager.host_pool.num_blocks, "host blocks are lost"
        return self.num_steps

    def finish_all(self, requests: list[Request]) -> None:
        """Run steps until these requests are done."""
        left = [r for r in requests if r.request_id in self.live]
        bound = self.num_steps + sum(map(self.work, left)) + 10 + int(self.scheduler.held_for_s) + self.depth
        while any(r.request_id in self.live for r in left):
            assert self.num_steps < bound, "a request waits for ever"
            self.step()

    def work(self, request: Request) -> int:
        """Return the most steps in which a request can be computed."""
        times = self.max_preemptions + (1 if self.long_from is None else 2)
        of_images = len(request.inputs.images) * (1 + self.tower.costs.num_layers)
        most = (request.inputs.max_total_tokens + of_images) * times
        return int(most * (1 + len(request.siblings)) * self.depth / (1 - self.run_share))

    # Users

    def arrive(self) -> None:
        """Add a request, whose prompt may share a prefix with others."""
        rng, self.num_requests = self.rng, self.num_requests + 1
        prompt_len = rng.randint(1, self.longest)
        prefix = rng.choice(self.prefixes)[: rng.randint(0, prompt_len)]
        prompt = prefix + [rng.randint(1, 3) for _ in range(prompt_len - len(prefix))]
        images = tuple[PromptImage, ...]()
        if self.image_share and self.showing.random() < self.image_share:
            prompt, images = with_images(self.showing, prompt, self.max_chunk)
        max_tokens = rng.randint(1, self.longest - prompt_len + 1)
        samples = rng.choice((1, 1, 1, 2, 3))
        namespace = rng.choice((b"", b"", b"salt"))
        adapter = 0
        if self.num_adapters and self.adapting.random() < self.adapter_share:
            adapter = self.adapting.randint(1, self.num_adapters)
            namespace = b"adapter %d" % adapter + namespace
        requests = [
            self.new_request(
                f"{self.num_requests}-{i}", prompt, prompt_len + max_tokens, namespace, adapter, images
            )
            for i in range(min(samples, self.max_num_seqs))
        ]
        leader = requests[0]
        if not self.manager.fits(leader.inputs.max_total_tokens - 1):
            return  # pins leave too few blocks; an engine would refuse the request
        leader.siblings = requests[1:]
        try:
            self.scheduler.add(leader)
        except QueueFullError:
            assert self.scheduler.num_waiting >= (self.scheduler.max_waiting or 0)
            return
        self.live.update((r.request_id, (r, Truth.begin(r))) for r in requests)

    def new_request(
        self,
        name: str,
        prompt: list[int],
        max_total: int,
        namespace: bytes,
        adapter: int,
        images: tuple[PromptImage, ...],
    ) -> Request:
        """Make a request with a random priority and tenant, and perhaps a deadline."""
        rng = self.rng
        priority, tenant = rng.randint(0, 2), rng.choice("abc")
        if self.long_from is not None and len(prompt) >= self.long_from and not namespace.endswith(LONG):
            namespace += LONG
        inputs = RequestInputs(
            request_id=name,
            prompt_token_ids=prompt,
            max_total_tokens=max_total,
            stop_ids=frozenset([STOP]),
            priority=priority,
            tenant=tenant,
            part_of=self.parting.choice("xyz") if self.parting.random() < self.part_share else "",
            namespace=namespace,
            long_from=self.long_from,
            deadline=self.now + rng.randint(1, 30) if rng.random() < 0.05 else math.inf,
            params=self.new_params(),
            adapter=adapter,
            images=images,
            uncut=tuple((image.start, image.end) for image in images) if self.sees_itself else (),
        )
        return Request(inputs)

    def new_params(self) -> SamplingParams:
        """Return parameters, by which a request may wait for its results where steps in flight share it."""
        if not self.runs_ahead:
            return NO_PARAMS
        if self.aheading.random() < self.waiting_share:
            return WAITING_PARAMS
        # None is guessed for these: else all would wait wherever there is a drafter.
        return UNGUESSED_PARAMS if self.aheading.random() < 0.7 else NO_PARAMS

    def disturb(self) -> None:
        """Abort or fork a request, pin or unpin a prefix, or reset the prefix cache."""
        rng = self.rng
        candidates = [r for r, _ in self.live.values() if r.arrival >= 0]
        match rng.randrange(6):
            case 0 | 1 if candidates:
                victim = rng.choice(candidates)
                self.scheduler.abort(victim)
                for ended in (victim, *victim.siblings):
                    del self.live[ended.request_id]
            case 2 | 3 if candidates:
                self.fork(rng.choice(candidates))
            case 4 if self.pins and rng.random() < 0.5:
                self.manager.unpin(self.pins.pop(rng.randrange(len(self.pins))))
            case 4:
                self.pin()
            case 5 if rng.random() < 0.3:
                self.manager.reset_prefix_cache()
                self.pins.clear()
        self.scheduler.check()

    def fail(self) -> None:
        """Let a step fail: what the steps in flight have written is unknown, and no token of theirs comes."""
        self.scheduler.cancel()
        self.in_flight.clear()
        self.drawn.clear()
        for block in (*self.memory, *self.host):
            block[:] = UNWRITTEN * len(block)
        if self.states is not None:
            self.states.slots = [-1] * len(self.states.slots)
        self.pins.clear()  # with the prefix cache
        self.slots.clear()
        self.tower.lose()
        self.scheduler.check()
        assert not any(r.num_pending for r, _ in self.live.values()), "tokens are pending without a step"

    def hold_or_release(self) -> None:
        """Hold a request or release one; it waits, runs, is in flight, or is a sample yet to run."""
        candidates = [r for r, _ in self.live.values()]
        held = [r for r in candidates if r.held]
        reason = self.holding.choice((SLOW_READER, NO_MASK))
        self.passed = None, 0
        if held and self.holding.random() < 0.6:
            self.scheduler.release(self.holding.choice(held), reason)
        elif candidates:
            self.scheduler.hold(self.holding.choice(candidates), reason)
        self.scheduler.check()

    def fork(self, parent: Request) -> None:
        """Fork a request."""
        self.num_requests += 1
        name, max_total = f"{self.num_requests}-f", parent.inputs.max_total_tokens
        inputs = parent.inputs
        child = self.new_request(
            name, inputs.prompt_token_ids, max_total, inputs.namespace, inputs.adapter, inputs.images
        )
        child.token_ids = parent.token_ids.copy()
        if parent.siblings or not self.manager.fits(max_total - 1):
            return
        try:
            self.scheduler.fork(parent, child)
        except QueueFullError:
            return
        self.live[name] = (child, Truth.begin(child))

    def fork_behind_a_run(self) -> None:
        """Fork a request whose last run its state has not seen."""
        running = self.scheduler._running
        assert running.states is not None, "a world with states has moves of them"
        if running.states.unapplied:
            self.fork(self.parting_runs.choice([*running.states.unapplied]))
            self.scheduler.check()

    def pin(self) -> None:
        """Pin a prefix, if all live requests and one that is read ahead still fit beside it."""
        self.num_requests += 1
        name, prefix = str(self.num_requests), self.rng.choice(self.prefixes)
        ahead = self.rng.randint(1, self.longest)
        ahead = ahead if self.manager.fits(ahead - 1) else 1
        if self.scheduler.pin(name, prefix, b"", ahead):
            self.pins.append(name)
            assert self.manager.fits(ahead - 1), "a request read ahead can never fit"

    # Steps

    def step(self) -> None:
        """Launch a step, and end the oldest if `depth` steps are in flight."""
        self.num_steps += 1
        self.now += 1.0
        for request in self.scheduler.expire():
            assert request.inputs.deadline <= self.now
            for ended in (request, *request.siblings):
                del self.live[ended.request_id]
        late = [r for r, _ in self.live.values() if r.inputs.deadline <= self.now]
        assert all(r.arrival < 0 for r in late), "too late"
        self.before = self.holders()
        # Kept so that the new blocks of a request that has grown long do not get the id of its old ones.
        old = [request.blocks for request in self.scheduler.running]
        queued = [*self.scheduler.waiting()]
        unheld = [r for r in queued if not r.held]
        # Parts of a call let later requests go ahead: `Scheduler.check` says that one at a time waits.
        waiting = [r for r in unheld if not r.protected and (r.ran_before or not r.inputs.part_of)]
        waiting = waiting if self.has_order else []
        ready = [
            (r, r.metrics.num_preemptions)
            for r in self.scheduler.running
            if r.ready and not (r.protected or r.held)
        ]
        schedule = self.scheduler.schedule()
        self.scheduler.check()
        if self.num_adapters:
            self.check_passes({*queued}.intersection(schedule.newcomers))
        assert not any(r.held for r in schedule.requests), "a held request computes"
        runs = RequestStatus.RUNNING
        assert all(r.status is runs for r in schedule.requests), "a request of the step was preempted"
        self.check_order(waiting, ready)
        # Requests preempted and admitted again in this step: they begin with blocks that others write in it.
        new = {id(r) for r in schedule.newcomers}  # also one that was above its tenant's share
        self.again = {id(r.blocks) for r, n in ready if r.metrics.num_preemptions > n or id(r) in new}
        assert len(self.scheduler.running) <= self.max_num_seqs, "too many run"
        if self.have_blocks_of_their_own(schedule):
            spare = self.manager.pool.num_available - self.scheduler._running.num_reserved_blocks()
            assert spare >= 0, "drafts took reserved blocks"
        if not schedule.is_empty:
            self.launch(schedule)
        elif self.live and not self.in_flight:
            # Held requests may keep their seats and blocks for a while.
            kept = [r for r in self.scheduler.running if r.held]
            assert kept or not self.scheduler.has_runnable(), "nothing runs although a request waits"
        if self.in_flight and (schedule.is_empty or len(self.in_flight) >= self.depth):
            self.finish_step()
        del old

    def send(self, part: ComputedPart, requests: list[Request]) -> None:
        """Send a step to the other ranks, which compute it now or later."""
        if not self.followers:
            return
        message = self.writer.step(part)
        seeds = {row: zlib.crc32(request.namespace) for row, request in enumerate(requests)}
        for follower in self.followers:
            follower.inbox.extend((arrived, seeds) for arrived in self.deliver(message))
            while follower.inbox and self.ranked.random() < self.haste:
                follower.compute()

    def wait_for_followers(self) -> None:
        """Have the other ranks compute what was sent. Assert that they hold what this one holds."""
        for follower in self.followers:
            while follower.inbox:
                follower.compute()
            assert follower.num_done == self.writer.number, "a message has not come"
            assert follower.memory == self.memory, "a follower's block holds something else"
            assert follower.host == self.host, "a follower's block on the host holds something else"
            if self.states is not None:
                assert vars(follower.states) == vars(self.states), "a follower's state is another one"

    def have_blocks_of_their_own(self, schedule: Schedule) -> bool:
        """Return whether any drafts of a step got blocks that their requests would not need without them."""
        first = schedule.num_decode_tokens
        rows = range(first, first + len(schedule.drafts))
        needed = (self.manager.blocks_for(schedule.num_computed_tokens[row] + 1) for row in rows)
        held = (len(schedule.requests[row].blocks.tables[0]) for row in rows)
        return any(has > needs for has, needs in zip(held, needed, strict=True))

    def check_order(self, waiting: list[Request], ready: list[tuple[Request, int]]) -> None:
        """Assert that no waiting request was overtaken, and that the highest ranks were preempted first."""
        waiting = [r for r in waiting if not r.held & NO_ADAPTER]  # set aside just now
        if waiting:
            started = [self.place(r) for r in waiting if r.status is RequestStatus.RUNNING]
            left = [self.place(r) for r in waiting if r.status is RequestStatus.WAITING]
            assert not started or not left or max(started) < min(left), "a request was overtaken"
        # A request for which others were preempted runs in the same step, unless blocks of steps in flight
        # come back later, or a running request grows into a block that it was to begin with. If digests
        # collide, a victim's blocks may replace those.
        favoured = self.scheduler.favoured
        if favoured is not None and not self.in_flight and not self.collides:
            has_room = favoured.status is RequestStatus.RUNNING or self.scheduler.has_lost_blocks(favoured)
            assert has_room, "others were preempted in vain"
        if self.policy_name == "fair":  # the shares of tenants decide, too
            return
        # For a request with priority none is preempted that this would protect.
        last_time = self.max_preemptions - 1 if self.policy_name == "priority" else self.max_preemptions
        kept = [self.place(r) for r, n in ready if r.metrics.num_preemptions == n < last_time]
        users = {*self.scheduler.users}  # who gave a slot, whatever their rank
        preempted = [
            self.place(r) for r, before in ready if r.metrics.num_preemptions > before and r not in users
        ]
        assert not kept or not preempted or max(kept) < min(preempted), "the wrong request was preempted"

    def check_passes(self, admitted: set[Request]) -> None:
        """Assert that a request whose adapter has no slot is not passed by too many, nor by weaker ones.

        admitted: those that have left the queue.
        """
        adapters = self.scheduler._running.adapters
        assert adapters is not None, "a world with adapters has slots"
        first = adapters.next_request()
        before, num = self.passed
        if first is None or first is not before:
            self.passed = first, 0
            return
        passing = [
            request
            for request in admitted
            if request.inputs.adapter not in (0, first.inputs.adapter) and place_of(request) > place_of(first)
        ]
        self.passed = first, num + len(passing)
        assert num + len(passing) <= self.max_num_seqs, "too many pass a request without a slot"
        weaker = [request for request in passing if request.rank[0] > first.rank[0]]
        assert not weaker, "requests of lower priority keep a slot from a request"

    def place(self, request: Request) -> tuple[float, int]:
        """Return the rank that a request should have."""
        return (request.inputs.priority if self.policy_name == "priority" else 0.0, request.arrival)

    def holders(self) -> dict[int, set[int]]:
        """Return which sequences hold each shared block."""
        pool, held = self.manager.pool, dict[int, set[int]]()
        references = pool.references()
        if len(set(references)) == len(references):
            return held
        for request in self.scheduler.running:
            for group in range(len(self.windows)):
                for block in request.blocks.live(group):
                    if pool.refcount(block) > 1:
                        held.setdefault(block, set()).add(id(request.blocks))
        return held

    def launch(self, schedule: Schedule) -> None:
        """Copy blocks and write new slots. They are read as late as possible, when the step ends."""
        made = self.planner.plan(schedule)
        self.send(made.computed, schedule.requests)
        plan = from_bytes(to_bytes(made.computed)) if self.sends_bytes else made.computed
        if self.num_adapters:
            self.load_adapters(made.computed, schedule.requests)
        self.work_on_images(plan)
        seen = self.tower.see(plan)
        assert (plan.last_keys is not None) is bool(seen and self.sees_itself), "an image sees itself or not"
        first = 0
        assert sum(plan.counts) == schedule.num_tokens <= self.budget
        assert len(set(map(id, schedule.requests))) == len(schedule.requests), "a request is twice in a step"
        move_blocks(plan, self.memory, self.host)
        ends = {}
        self.written: set[tuple[int, int]] = set()
        self.now_held = self.holders()
        if self.states is not None:
            self.states.move(plan)
        told = tell_seats(plan, self.last_tokens, self.tables)
        rows = zip(schedule.requests, plan.seats, plan.starts, plan.counts, strict=True)
        for row, (request, seat, start, n) in enumerate(rows):
            assert 0 < n <= self.max_chunk
            tokens = embedded(told.get(row) or [self.last_tokens[seat]], first, seen)
            if plan.last_keys is not None:
                assert plan.last_keys[first : first + n] == last_keys_of(request, start, n), (
                    "not a whole image"
                )
            first += n
            assert len(tokens) == n, "the device has not got the tokens of the step"
            ends[seat] = start + n
            for table in self.tables[seat]:
                self.write(request, table, start, tokens)
            if self.states is not None:
                self.advance(self.states, plan, row, request, tokens)
        self.check_snapshots()
        # Requests without a sampled token read their slots too, up to the last token of this step.
        sampled = {*plan.sampled_seats}
        others = {seat: row for row, seat in enumerate(plan.seats) if seat not in sampled}
        self.check_seats(schedule)
        rows_with_drafts = zip(schedule.requests[plan.num_decodes :], schedule.drafts, strict=False)
        drafts_of = dict(rows_with_drafts)
        drawn = [self.seated[seat] for seat in plan.sampled_seats]
        reads = [
            self.read_of(request, end, drafts_of.get(request, []))
            for request, end in zip(drawn, plan.positions(), strict=True)
        ]
        reads += [self.read_of(schedule.requests[row], ends[seat]) for seat, row in others.items()]
        tables = [[table[:] for table in self.tables[seat]] for seat in (*plan.sampled_seats, *others)]
        tokens = self.draw(reads, plan.sampled_seats, tables) if self.runs_ahead else []
        self.in_flight.append((schedule, reads, plan.sampled_seats, tokens, tables))

    def work_on_images(self, plan: ComputedPart) -> None:
        """Let the tower work. Assert that it takes no more than the step's tokens leave, or one layer."""
        cost = self.tower.work(plan.towers)
        num_layers = sum(each.num_layers for each in plan.towers.work) if plan.towers is not None else 0
        assert num_layers < 2 or sum(plan.counts) + cost <= self.budget + 1, "images take too much of a step"
        if self.scheduler.towers is not None and not self.scheduler.towers._moves:
            self.tower.check(self.scheduler.towers)

    def load_adapters(self, plan: ComputedPart, requests: list[Request]) -> None:
        """Copy adapters into slots. Assert that each row then finds its own, and that all have room."""
        for adapter, slot in plan.adapter_loads:
            assert 0 <= slot < self.num_slots, "there is no such slot"
            self.slots[slot] = adapter
        needed = [request.inputs.adapter for request in requests]
        found = [self.slots[slot] if slot >= 0 else 0 for slot in plan.adapters or [-1] * len(needed)]
        assert found == needed, "a row has the adapter of another"
        running = {request.inputs.adapter for request in self.scheduler.running} - {0}
        assert len(running) <= self.num_slots, "more adapters run than there are slots"

    def read_of(self, request: Request, end: int, drafts: list[int] | None = None) -> Read:
        """Return what a step reads of a request, of whose tokens some may be pending."""
        num_known = request.num_tokens
        pending = self.drawn.get(request.request_id, [])[: max(0, end - num_known)] if not drafts else []
        return Read(request, end, drafts or [], num_known, pending)

    def draw(self, reads: list[Read], seats: list[int], tables: list[list[array[int]]]) -> list[int | None]:
        """Draw the tokens of a step as a device does at its end, from what its blocks hold then."""
        tokens = list[int | None]()
        for read, seat, own_tables in zip(reads, seats, tables, strict=False):
            block, at = divmod(read.end - 1, self.block_size)
            value = int.from_bytes(self.memory[own_tables[0][block]][4 * at : 4 * at + 4], "little")
            tokens.append(self.sample(read.request, value))
            self.last_tokens[seat] = tokens[-1] or 0
            self.drawn.setdefault(read.request.request_id, []).append(tokens[-1] or 0)
        return tokens

    def advance(
        self, states: States, plan: ComputedPart, row: int, request: Request, tokens: list[int]
    ) -> None:
        """Assert that a row's state has seen the tokens before these, and show it these."""
        start = plan.starts[row]
        begun = zlib.crc32(request.namespace)
        expected = begun
        if start:
            num_known = min(start, request.num_tokens)
            known = self.live[request.request_id][1].at(request, num_known)[num_known]
            pending = self.drawn.get(request.request_id, [])
            expected = state_after(known, pending[: start - num_known])
        state = states.before(plan, row, begun)
        assert state == expected, "a state has seen other tokens"
        states.advance(plan, row, state, tokens)

    def check_snapshots(self) -> None:
        """Assert that each snapshot has seen the tokens up to the end of its block, and no other."""
        moves = self.scheduler._running.states
        if self.snapshots is None or moves is None:
            return
        pending = {to for _, to in moves._moves}  # moved at the beginning of the next step
        block_of = {serial: block for block, serial in enumerate(self.manager.pool._serials)}
        for serial, slot in self.snapshots.items():
            at = self.max_num_seqs + slot
            value = int.from_bytes(self.memory[block_of[serial]][-4:], "little")
            assert at in pending or self.states.slots[at] == value, "a snapshot has seen other tokens"

    def check_seats(self, schedule: Schedule) -> None:
        """Assert that the device knows whose seats a step has, and no step in flight has those it takes."""
        for request in schedule.newcomers:
            self.seated[request.seat] = request
            for other, *_ in self.in_flight:
                seats = zip(
                    other.sampled_seats + other.seats, other.sampled_requests + other.requests, strict=True
                )
                assert all(r is request for seat, r in seats if seat == request.seat), "a seat is in flight"
        for request, seat in zip(
            schedule.requests + schedule.sampled_requests,
            schedule.seats + schedule.sampled_seats,
            strict=True,
        ):
            assert self.seated[seat] is request, "the device was not told who has a seat"

    def write(self, request: Request, table: array[int], start: int, tokens: list[int]) -> None:
        size, refcount = self.block_size, self.manager.pool.refcount
        if start == 0:
            value = zlib.crc32(request.namespace)
        else:
            at = (start - 1) % size * 4
            value = int.from_bytes(self.memory[table[(start - 1) // size]][at : at + 4], "little")
        for position, token in enumerate(tokens, start):
            block, at = table[position // size], position % size * 4
            if refcount(block) > 1:
                # Others may have joined for this step: they read it in the same step, after it is written.
                both = self.before.get(block, set()) & self.now_held[block]
                assert both - self.again <= {id(request.blocks)}, (
                    f"block {block} is written while another sequence holds it"
                )
            assert (block, at) not in self.written, "a slot is written twice in a step"
            self.written.add((block, at))
            value = slot_value(value, token)
            self.memory[block][at : at + 4] = value.to_bytes(4, "little")

    def finish_step(self) -> None:
        """Read what the oldest step in flight reads, and give its tokens to the scheduler."""
        schedule, reads, drawn_seats, drawn, tables = self.in_flight.popleft()
        if self.ranked.random() < self.wait_share:
            self.wait_for_followers()
        truths = []
        for (request, end, drafts, num_known, pending), own_tables in zip(reads, tables, strict=True):
            known = self.live.get(request.request_id)
            truth = known[1] if known else Truth.begin(request)
            values = truth.at(request, end)
            if pending:  # all but those of an output that has ended are known by now
                own = request.token_ids[num_known:end]
                assert own == pending[: len(own)], "a request has other tokens than its steps have drawn"
                values = values[: num_known + 1]
                for token in pending:
                    values.append(slot_value(values[-1], token))
            if drafts:
                values = values[: request.num_tokens + 1]
                for token in drafts[: end - request.num_tokens]:
                    values.append(slot_value(values[-1], token))
            for window, table in zip(self.windows, own_tables, strict=True):
                self.read(table, window, end, values)
            truths.append(values[end])
        tokens: list[int | None] = [self.sample(r.request, v) for r, v in zip(reads, truths, strict=True)]
        tokens = tokens[: len(drawn_seats)]
        if self.runs_ahead:
            assert tokens == drawn, "a step has drawn from what is not its own"
            for read in reads[: len(tokens)]:
                self.drawn[read.request.request_id].pop(0)
        else:
            for seat, token in zip(drawn_seats, tokens, strict=True):
                self.last_tokens[seat] = token or 0
        runs = {}
        for row, (read, value) in enumerate(zip(reads[: len(tokens)], truths, strict=False)):
            can_run = not read.drafts and (
                not self.runs_ahead or read.request.inputs.params is WAITING_PARAMS
            )
            if tokens[row] is not None and can_run and self.running.random() < self.run_share:
                runs[row] = self.run_of(read.request, value)
                tokens[row] = None
        output = StepOutput(tokens, runs=runs)
        if schedule.drafts:
            output = verified(schedule, output)
        advanced = self.scheduler.update(schedule, output.tokens, output.errors, output.runs)
        first = schedule.num_decode_tokens
        for request in schedule.requests[first : first + len(schedule.drafts)]:
            if request.finish_reason is None and request.ready:
                most = self.manager.blocks_for(request.num_computed_tokens)
                assert all(len(table) <= most for table in request.blocks.tables), "blocks of drafts are kept"
        if self.long_from is not None:
            for request in advanced:
                if request.finish_reason is None and request.num_tokens % 7 == self.long_from % 7:
                    self.stop(request)
            self.scheduler.release_finished()
        self.scheduler.check()
        for request in advanced:
            assert request.metrics.num_preemptions <= self.max_preemptions, "preempted too often"
            assert request.num_tokens <= request.inputs.max_total_tokens, "a request has too many tokens"
            assert STOP not in request.output_token_ids[:-1], "tokens follow the one that ended a request"
            if request.status is RequestStatus.FINISHED:
                del self.live[request.request_id]

    def run_of(self, request: Request, value: int) -> list[int]:
        """Return the next tokens after a slot with this value: none, or as many as steps would have given."""
        run = list[int]()
        for _ in range(self.running.choice((0, 0, 1, 2, 3))):
            token = self.sample(request, value)
            if token is None:
                break
            run.append(token)
            value = slot_value(value, token)
        return run

    def stop(self, request: Request) -> None:
        """Finish some requests whose newest token completes a stop string."""
        if zlib.crc32(request.request_id.encode(), request.num_tokens) % 5 == 0:
            request.finish("stop", self.now, "text")

    def read(self, table: array[int], window: int | None, end: int, values: array[int]) -> None:
        """Assert that all slots that the last token sees hold what an endless memory would."""
        size = self.block_size
        first = 0 if window is None else max(0, end - window)
        block = first // size
        data = b"".join(self.memory[b] for b in table[block : -(-end // size)])
        seen = data[4 * (first - block * size) : 4 * (end - block * size)]
        assert seen == values[first + 1 : end + 1].tobytes(), "a slot holds another value"

    def sample(self, request: Request, value: int) -> int | None:
        """Return the next token, a fixed function of the prefix and the request; None for an error."""
        chosen = zlib.crc32(request.request_id.encode(), value)
        if chosen % 211 == 0:
            return None
        return STOP if chosen % 23 == 0 else 1 + chosen % 3


def run_world(seed: int, num_steps: int = 300) -> int:
    """Run one world; an error names its seed. Return the number of steps."""
    try:
        return World(seed).run(num_steps)
    except Exception as error:
        raise AssertionError(f"world {seed} (python -m tests.simulation --seed {seed}): {error!r}") from error


def _run_range(seeds: tuple[int, int]) -> int:
    gc.set_threshold(100_000)  # a world leaves few cycles, and looking for them takes a tenth of the time
    return sum(map(run_world, range(*seeds)))


def worlds(first_seed: int, num_steps: int, processes: int) -> Iterator[int]:
    """Run worlds until num_steps are done. Yield how many are done so far."""
    chunk, done = 10, 0
    with get_context("spawn").Pool(processes) as pool:
        starts = iter(range(first_seed, sys.maxsize, chunk))
        ranges = ((start, start + chunk) for start in starts)
        while done < num_steps:
            # A world has some 450 steps. One large batch, as processes are idle between two batches.
            batch = [next(ranges) for _ in range(-(-(num_steps - done) // (450 * chunk)))]
            for steps in pool.imap_unordered(_run_range, batch):
                done += steps
                yield done


def main() -> None:
    """Run many worlds, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, help="run this world only")
    args = parser.parse_args()
    if args.seed is not None:
        print(f"world {args.seed}: {World(args.seed).run(300)} steps, every invariant held")
        return
    started = time.perf_counter()
    for done in worlds(args.first_seed, args.steps, args.processes):
        if sys.stderr.isatty():
            print(f"\r{done:,} steps, {time.perf_counter() - started:,.0f} s\r", end="", file=sys.stderr)
    print(f"{done:,} steps, every invariant held, {time.perf_counter() - started:,.0f} s")


if __name__ == "__main__":
    main()
