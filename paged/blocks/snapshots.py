"""Snapshots: which states of sequences are kept behind which cached blocks, for models with states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from .pool import BlockPool
from .sequence import NEVER, SequenceBlocks

Slot = int  # a place of a state in all layers; those of snapshots follow those of seats


class Snapshots:
    """The cached recurrent states with which a prefix hit may begin, each belonging to a full block of the
    prefix cache.

    A snapshot is the state after all tokens up to the end of its block. It is found by the block's serial in
    the first layer group. A snapshot is dropped when its block leaves the prefix cache, or when it is the
    least recently used and room is needed. In addition, a running request may have one rolling state, which
    it replaces whenever it begins a block. When the request ends, its rolling state becomes a snapshot.

    Slots are reused at once, because the moves of states are made in order. The exception is a state that the
    step being scheduled will store: nothing reads or replaces it before the next step.

    num_kept: maximum number of snapshots. num_rolling: maximum number of requests with a rolling state.
    interval: a prompt stores a snapshot at each multiple of this many tokens.
    num_made: number of snapshots made so far.
    """

    def __init__(self, num_kept: int, num_rolling: int, block_size: int, interval: int) -> None:
        assert interval % block_size == 0, "a snapshot is at the end of a block"
        self.num_kept = num_kept
        self.num_slots = num_kept + num_rolling
        self.interval = interval
        self.num_made = 0
        self._block_size = block_size
        self._free: list[Slot] = [*range(self.num_slots - 1, -1, -1)]
        self._slots: dict[int, Slot] = {}  # by serial, the least recently used first
        self._pins = Counter[int]()  # by serial
        self._unwritten: set[Slot] = set()  # those that the step being scheduled leaves behind
        self._parked: list[Slot] = []  # unwritten ones whose block is gone

    def __len__(self) -> int:
        return len(self._slots)

    # Where

    def place_after(self, seq: SequenceBlocks, num_computed: int) -> int:
        """Return the number of tokens after which a prompt stores its next snapshot; NEVER if none follows.

        A prompt stores snapshots at every multiple of the interval, at the end of its last full block before
        its last token, and where its cached blocks end, if no snapshot is there.
        """
        last = seq.last_place
        if num_computed >= last:
            return NEVER
        place = min(last, num_computed - num_computed % self.interval + self.interval)
        return min(place, seq.num_matched) if seq.num_matched > num_computed else place

    def most_new(self, seq: SequenceBlocks, num_computed: int) -> int:
        """Return the maximum size of a prompt's next chunk, which must end where a snapshot is due."""
        return self.place_after(seq, num_computed) - num_computed

    def serial_at(self, pool: BlockPool, seq: SequenceBlocks, num_tokens: int) -> int:
        """Return the serial of a sequence's last registered block in the first layer group.

        Return 0 if the block is no longer cached, or if it does not end after exactly num_tokens tokens.
        """
        is_there = 0 < num_tokens == seq.num_registered * self._block_size
        return seq.last[0][1] if is_there and pool.is_known(seq.last[0]) else 0

    def find_serial(self, pool: BlockPool, seq: SequenceBlocks, num_tokens: int) -> int:
        """Do what `serial_at` does, for any registered block of the sequence and not only its last one."""
        if (serial := self.serial_at(pool, seq, num_tokens)) or seq.chain is None:
            return serial
        blocks = pool.match(seq.chain, num_tokens // self._block_size)
        return pool.serial(blocks[-1]) if len(blocks) * self._block_size == num_tokens > 0 else 0

    def longest(self, serials: Iterable[int]) -> tuple[int, int]:
        """Return how many leading blocks of a prefix end with a snapshot: now, and after the scheduled step.

        serials: the serials of the prefix's blocks in the first layer group.
        """
        slots = self._slots
        now = later = 0
        for number, serial in enumerate(serials, 1):
            slot = slots.get(serial)
            if slot is not None:
                later = number
                if slot not in self._unwritten:
                    now = number
        return now, later

    # Slots

    def find(self, serial: int) -> Slot:
        """Return the slot of the snapshot behind a block, and mark the snapshot as used now."""
        slot = self._slots.pop(serial)
        assert slot not in self._unwritten, "a state is read before it is there"
        self._slots[serial] = slot
        return slot

    def has(self, serial: int) -> bool:
        """Return whether there is a snapshot behind the block with this serial, or will be after the step."""
        return serial in self._slots

    def take(self) -> Slot | None:
        """Take a slot for a rolling state; None if no slot is free at the moment."""
        return self._free.pop() if self._free else None

    def release(self, slot: Slot) -> None:
        """Give back the slot of a rolling state."""
        self._free.append(slot)

    def new(self, serial: int, *, after_step: bool = False) -> Slot | None:
        """Take a slot for a new snapshot behind a block; None if the block has one or no slot is free.

        after_step: whether the step that is being scheduled writes the state, instead of reading it.
        """
        if self.has(serial):
            self._use(serial)
            return None
        if not self._make_room() or (slot := self.take()) is None:
            return None
        self._add(serial, slot)
        if after_step:
            self._unwritten.add(slot)
        return slot

    def keep(self, serial: int, slot: Slot) -> None:
        """Turn a rolling state into the snapshot behind a block, unless it has one or no slot is free."""
        if self.has(serial):
            self._use(serial)
        elif self._make_room():
            self._add(serial, slot)
            return
        self.release(slot)

    def drop(self, serial: int) -> None:
        """Drop the snapshot behind a block that leaves the prefix cache, if there is one."""
        slot = self._slots.pop(serial, None)
        self._pins.pop(serial, None)
        if slot is not None:
            (self._parked if slot in self._unwritten else self._free).append(slot)

    def launch(self) -> None:
        """Record that a step was scheduled, so that the next step may read the states that it stores."""
        self._unwritten.clear()
        self._free += self._parked
        self._parked.clear()

    # Pins

    def pin(self, serial: int) -> None:
        """Protect a snapshot from being replaced by others."""
        self._pins[serial] += 1

    def unpin(self, serial: int) -> None:
        """Allow a snapshot to be replaced again, unless it was pinned several times."""
        self._pins -= Counter([serial])

    # For files

    @property
    def num_spare(self) -> int:
        """The number of snapshots that can be added without replacing any."""
        return self.num_kept - len(self._slots)

    def items(self) -> Iterator[tuple[int, Slot]]:
        """Yield the serial of the block and the slot of each snapshot, the least recently used first."""
        yield from self._slots.items()

    def _add(self, serial: int, slot: Slot) -> None:
        self._slots[serial] = slot
        self.num_made += 1

    def _use(self, serial: int) -> None:
        self._slots[serial] = self._slots.pop(serial)

    def _make_room(self) -> bool:
        """Drop the least recently used snapshot if there are as many as may be. Return whether one fits."""
        if len(self._slots) < self.num_kept:
            return True
        replaceable = (
            serial
            for serial, slot in self._slots.items()
            if serial not in self._pins and slot not in self._unwritten
        )
        oldest = next(replaceable, None)
        if oldest is None:
            return False
        self.drop(oldest)
        return True

    def check(self, pool: BlockPool, sequences: Iterable[SequenceBlocks]) -> None:
        """Assert that every slot is free, or has one state, and that each snapshot is behind a cached block.

        sequences: all sequences that may have a rolling state.
        """
        rolling = [seq.rolling[0] for seq in sequences if seq.rolling is not None]
        held = [*self._slots.values(), *rolling, *self._parked, *self._free]
        assert sorted(held) == [*range(self.num_slots)], "a slot is lost, or has two states"
        assert len(self._slots) <= self.num_kept, "more snapshots than there may be"
        assert self._unwritten <= {*self._slots.values(), *self._parked}, "an unwritten state is lost"
        indexed = {pool.serial(block) for block, _ in pool.known_blocks()}
        assert self._slots.keys() <= indexed, "a snapshot has outlived its block"
        assert self._pins.keys() <= self._slots.keys(), "a pinned snapshot is gone"
