"""Messages of the driver to the other ranks: steps, and blocks or states to read or to write.

A message begins with what it is and its number. A decode of the seats of one of the last decodes is told as
their new tokens and the entries by which block tables have grown.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

from ..base.errors import RankError
from ..blocks.pool import BlockId
from ..runner.plan import IN_SEAT, ComputedPart, SeatChange
from ..runner.plan_bytes import from_bytes, to_bytes

_HEADER = struct.Struct("<Ii")  # the kind, and the number


class MessageKind(IntEnum):
    """The type of a message from the driver."""

    STEP = 1
    REPEATED_STEP = 2
    READ_BLOCKS = 3
    WRITE_BLOCK = 4
    END = 5
    READ_STATES = 6
    WRITE_STATE = 7
    LOAD_ADAPTER = 8


_OF_BLOCKS = (
    *(MessageKind.READ_BLOCKS, MessageKind.WRITE_BLOCK),
    *(MessageKind.READ_STATES, MessageKind.WRITE_STATE),
)


@dataclass(frozen=True, slots=True)
class Message:
    """A message that was read from the driver.

    step: the step to compute, if the message is a step.
    blocks: the blocks to read, or the block to write; or slots of snapshots.
    adapter: a slot, and the ranks of the matrices that come for it, by their names in the decoder.
    """

    kind: MessageKind
    number: int
    step: ComputedPart | None = None
    blocks: Sequence[BlockId] = ()
    adapter: tuple[int, Mapping[str, int]] | None = None


class _Decodes:
    """The last decodes of different seats, which writer and reader remember alike."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.parts: list[ComputedPart] = []

    def remember(self, part: ComputedPart) -> None:
        """Remember a step, if it only decodes, in place of an older one of the same seats."""
        if part.is_decode and part.seats:
            self.parts = [each for each in self.parts if each.seats != part.seats][1 - self._most :]
            self.parts.append(part)


class MessageWriter:
    """Encodes the messages of a driver, in order.

    num_in_flight: maximum number of steps in flight.
    """

    def __init__(self, block_size: int, num_in_flight: int) -> None:
        self._block_size = block_size
        self._decodes = _Decodes(2 * num_in_flight)
        self.number = 0  # of the last message

    def step(self, part: ComputedPart) -> bytes:
        """Encode a step to compute."""
        again = self._repeated(part)
        self._decodes.remember(part)
        if again is None:
            return self._written(MessageKind.STEP, to_bytes(part))
        return self._written(MessageKind.REPEATED_STEP, again.tobytes())

    def read_blocks(self, blocks: Sequence[BlockId]) -> bytes:
        """Encode an order to send the rank's part of these blocks."""
        return self._written(MessageKind.READ_BLOCKS, array("i", blocks).tobytes())

    def write_block(self, block: BlockId) -> bytes:
        """Encode the command to receive the contents of a block and write them into `block`."""
        return self._written(MessageKind.WRITE_BLOCK, array("i", [block]).tobytes())

    def read_states(self, slots: Sequence[int]) -> bytes:
        """Encode the command to send this rank's part of the states in these slots of snapshots."""
        return self._written(MessageKind.READ_STATES, array("i", slots).tobytes())

    def write_state(self, slot: int) -> bytes:
        """Make each rank write the state that it is sent next into a slot of a snapshot."""
        return self._written(MessageKind.WRITE_STATE, array("i", [slot]).tobytes())

    def load_adapter(self, slot: int, ranks: Mapping[str, int]) -> bytes:
        """Encode an order to receive an adapter's matrices, with these ranks, and copy them to a slot."""
        return self._written(MessageKind.LOAD_ADAPTER, json.dumps([slot, dict(ranks)]).encode())

    def end(self) -> bytes:
        """Encode an order to end."""
        return self._written(MessageKind.END, b"")

    def _written(self, kind: MessageKind, content: bytes) -> bytes:
        self.number += 1
        return _HEADER.pack(kind, self.number) + content

    def _repeated(self, part: ComputedPart) -> array[int] | None:
        """Return what has changed since an earlier decode of these seats; None if there is more to tell."""
        moves = part.swap_out or part.swap_in or part.copies or part.state_moves or part.settled
        if (
            moves
            or part.images
            or part.grid_positions
            or part.towers
            or len(part.last_tokens) != len(part.seats)
            or not part.repeats(part.seats)
        ):
            return None
        parts = self._decodes.parts
        at = next((at for at, each in enumerate(parts) if each.seats == part.seats), None)
        if at is None:
            return None
        last = parts[at]
        longer = part.rope_lens[0] - last.rope_lens[0] if part.rope_lens else 0
        rows = [change.row for change in part.changes]
        again = _again(last, longer, part.last_tokens, rows, part.entries, self._block_size)
        if (part.starts, part.rope_lens, part.changes) != (again.starts, again.rope_lens, again.changes):
            return None
        if [*part.adapters] != [*again.adapters] or part.rope_offsets != again.rope_offsets:
            return None
        numbers = array("i", [at, longer, len(rows), *rows])
        for sent in (*part.entries, part.last_tokens):
            numbers += sent
        return numbers


class MessageReader:
    """Decodes the messages of a `MessageWriter`, in the same order.

    num_groups: the number of layer groups of the model.
    """

    def __init__(self, block_size: int, num_in_flight: int, num_groups: int) -> None:
        self._block_size = block_size
        self._num_groups = num_groups
        self._decodes = _Decodes(2 * num_in_flight)
        self._number = 0

    def read(self, data: bytes) -> Message:
        """Decode a message. Raises RankError unless it is the next one in order."""
        code, number = _HEADER.unpack_from(data)
        self._number += 1
        if number != self._number:
            raise RankError(f"message {number} of the driver came where message {self._number} was due")
        kind = MessageKind(code)
        content = data[_HEADER.size :]
        if kind in _OF_BLOCKS:
            return Message(kind, number, blocks=array("i", content).tolist())
        if kind is MessageKind.END:
            return Message(kind, number)
        if kind is MessageKind.LOAD_ADAPTER:
            slot, ranks = json.loads(content)
            return Message(kind, number, adapter=(slot, ranks))
        part = from_bytes(content) if kind is MessageKind.STEP else self._repeated(content)
        self._decodes.remember(part)
        return Message(kind, number, part)

    def _repeated(self, content: bytes) -> ComputedPart:
        numbers = array("i", content)
        at, longer, num_changes = numbers[:3]
        # The rows, the entries of each layer group, and behind them the tokens.
        ends = [3 + num_changes * i for i in range(2 + self._num_groups)]
        rows, *entries = (numbers[start:end] for start, end in pairwise(ends))
        last = self._decodes.parts[at]
        return _again(last, longer, numbers[ends[-1] :], rows.tolist(), entries, self._block_size)


def _again(
    last: ComputedPart,
    longer: int,
    last_tokens: array[int],
    rows: Sequence[int],
    entries: list[array[int]],
    block_size: int,
) -> ComputedPart:
    """Return the step that decodes the seats of a step once more.

    longer: by how much lengths for rope have grown.
    rows: those whose block tables have an entry more, in each layer group one of `entries`.
    """
    starts = [start + 1 for start in last.starts]
    changes = [
        SeatChange(row, last.seats[row], IN_SEAT, IN_SEAT, starts[row] // block_size, 1) for row in rows
    ]
    return ComputedPart(
        num_decodes=last.num_decodes,
        seats=last.seats,
        starts=starts,
        counts=last.counts,
        rope_lens=[length + longer for length in last.rope_lens],
        changes=changes,
        entries=entries,
        sampled=last.sampled,
        sampled_seats=last.sampled_seats,
        last_tokens=last_tokens,
        adapters=last.adapters,
        rope_offsets=last.rope_offsets,
    )
