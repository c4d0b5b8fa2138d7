"""SequenceBlocks: the blocks of one sequence, in order."""

from __future__ import annotations

from array import array

from .pool import BlockId
from .prefix_chain import PrefixChain

NEVER = 2**62


class SequenceBlocks:
    """The block tables of one sequence, one for each layer group. Made by `BlockManager.open`.

    capacity: number of tokens that fit without another call of `grow`.
    register_at: number of tokens at which a decode should call `register` next.
    num_drafted: number of leading tokens for which the blocks also hold the draft model's K and V, including
        guesses behind the sequence's own tokens.

    Where sequences have states (see `Snapshots`):

    num_matched: number of leading tokens whose blocks were cached at the last lookup.
    is_due: whether the step that is being scheduled stores a snapshot with which this sequence could begin.
    last_place: number of tokens up to which the prompt still stores snapshots; 0 if all are stored.
    rolling: the slot of its rolling state, and the number of tokens that the state covers.
    """

    __slots__ = (
        "capacity",
        "chain",
        "host",
        "host_state",
        "is_due",
        "last",
        "last_place",
        "num_drafted",
        "num_dropped",
        "num_matched",
        "num_registered",
        "register_at",
        "rolling",
        "tables",
    )

    def __init__(self, num_groups: int, chain: PrefixChain | None) -> None:
        self.chain = chain
        # While it is swapped out, for each group: the number of dropped blocks, the host blocks of the rest.
        self.host: list[tuple[int, array[int]]] | None = None
        self.host_state: int | None = None  # the slot in host memory with its state, if it has one
        self.num_matched = 0
        self.is_due = False
        self.last_place = 0
        self.rolling: tuple[int, int] | None = None
        self.clear(num_groups)

    def clear(self, num_groups: int) -> None:
        """Reset to the state of a sequence without blocks."""
        self.tables = [array("i") for _ in range(num_groups)]
        self.num_dropped = [0] * num_groups  # leading blocks that left the window
        self.num_registered = 0  # leading blocks that are in the prefix cache
        self.last: list[tuple[BlockId, int]] = [(-1, 0)] * num_groups  # the last of them, and its serial
        self.capacity = 0
        self.register_at = NEVER
        self.num_drafted = 0

    @property
    def num_blocks(self) -> int:
        """The number of blocks that the sequence holds."""
        return sum(map(len, self.tables)) - sum(self.num_dropped)

    def live(self, group: int) -> array[int]:
        """Return the blocks that the sequence holds for one group, in order."""
        return self.tables[group][self.num_dropped[group] :]
