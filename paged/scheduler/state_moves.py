"""StateMoves: where the states of running requests go, for models whose layers keep some."""

from __future__ import annotations

from typing import NamedTuple

from ..blocks.manager import BlockManager, Copy
from ..requests.request import NO_SEAT, Request
from .schedule import Schedule

# A request whose end is known keeps its state at one block in so many, until it ends.
SELDOM = 4


class SettledSeat(NamedTuple):
    """A seat whose unapplied tokens are applied to its state before states are moved.

    num_unapplied: how many tokens before num_computed are unapplied.
    """

    seat: int
    num_unapplied: int
    num_computed: int


class StateMoves:
    """The moves of recurrent states that a step makes, in order, before it computes.

    The state of a running request lies in the slot of its seat. The slots of snapshots follow the seats, and
    those in host memory, for swapped-out requests, follow the snapshots. A request that computes its first
    token begins with a state of zeros, whatever its slot holds.

    A run of drafts leaves the state of its request as it was. The run's right tokens are unapplied until the
    next step with the request, or until its state is moved.

    unapplied: how many such tokens each request has.
    """

    def __init__(self, block_manager: BlockManager, num_seats: int) -> None:
        self._manager = block_manager
        self._pool = block_manager.pool
        self._snapshots = block_manager.snapshots
        self._num_seats = num_seats
        self._num_slots = num_seats + (0 if self._snapshots is None else self._snapshots.num_slots)
        self._moves: list[Copy] = []  # of this step, and those that must wait until it has ended
        self._later: list[Copy] = []
        self.unapplied: dict[Request, int] = {}
        self._settled: list[SettledSeat] = []

    def end_run(self, request: Request, num_right: int) -> None:
        """Record how many tokens of a run are final. The token before the run's drafts counts too."""
        if num_right:
            self.unapplied[request] = num_right

    def forget(self, request: Request) -> None:
        """Forget the unapplied tokens of a request that releases its seat."""
        self.unapplied.pop(request, None)

    def _settle(self, request: Request) -> None:
        """Apply the rest of the request's last run before states are moved."""
        if num_unapplied := self.unapplied.pop(request, 0):
            self._settled.append(SettledSeat(request.seat, num_unapplied, request.num_computed_tokens))

    def copy(self, request: Request, child: Request, *, after_step: bool) -> None:
        """Copy the state of a request to its child.

        after_step: whether to copy the state after the step that is being scheduled, not the state before it.
        """
        self._settle(request)
        (self._later if after_step else self._moves).append((request.seat, child.seat))

    def swap_out(self, request: Request) -> None:
        """Copy the state of a request to host memory, because its blocks are swapped out."""
        slot = request.blocks.host_state
        assert slot is not None, "blocks were swapped out without a state"
        self._settle(request)
        self._moves.append((request.seat, self._num_slots + slot))

    def begin(self, request: Request) -> None:
        """Load the state of a request that took a seat, if a snapshot or the host memory has it."""
        seq = request.blocks
        if seq.host_state is not None:
            slot = self._manager.take_host_state(seq)
            self._moves.append((self._num_slots + slot, request.seat))
        elif request.num_computed_tokens and self._snapshots is not None:
            snapshots = self._snapshots
            slot = snapshots.find(snapshots.serial_at(self._pool, seq, request.num_computed_tokens))
            self._moves.append((self._num_seats + slot, request.seat))

    # Snapshots

    def leave(self, request: Request, end: int) -> None:
        """Store a snapshot at the end of a prompt's chunk, whose blocks are registered, if one is due."""
        seq = request.blocks
        if self._snapshots is None or self._snapshots.place_after(seq, request.num_computed_tokens) != end:
            return
        serial = self._snapshots.serial_at(self._pool, seq, end)
        slot = self._snapshots.new(serial, after_step=True) if serial else None
        if slot is not None:
            self._later.append((request.seat, self._num_seats + slot))

    def roll(self, request: Request, num_tokens: int) -> None:
        """Replace the rolling state of a decoding request if its next step begins a block.

        num_tokens: how many tokens precede that step. The newest ones may be pending: steps in flight compute
            them before the state is copied, and their block is registered later.
        """
        seq = request.blocks
        snapshots = self._snapshots
        if snapshots is None or num_tokens % self._manager.block_size or num_tokens < max(1, seq.last_place):
            return
        if not self._is_worth_it(request, num_tokens // self._manager.block_size):
            return
        if snapshots.has(snapshots.serial_at(self._pool, seq, num_tokens)):
            return
        slot = snapshots.take() if seq.rolling is None else seq.rolling[0]
        if slot is not None:
            seq.rolling = (slot, num_tokens)
            self._settle(request)
            self._moves.append((request.seat, self._num_seats + slot))

    def keep(self, request: Request) -> None:
        """Store a snapshot behind the last registered block of a request that ends or is preempted.

        The request still has its seat and its blocks. If a step in flight computes it, because its end was
        not known ahead, its state sees a token too many: only the rolling state becomes a snapshot.
        """
        seq = request.blocks
        snapshots = self._snapshots
        if snapshots is None:
            return
        rolling = seq.rolling
        seq.rolling = None
        newest = 0
        if self._is_up_to_date(request):
            newest = snapshots.serial_at(self._pool, seq, request.num_computed_tokens)
        if rolling is not None:
            serial = 0 if newest else snapshots.find_serial(self._pool, seq, rolling[1])
            if serial:
                snapshots.keep(serial, rolling[0])
            else:
                snapshots.release(rolling[0])
        slot = snapshots.new(newest) if newest else None
        if slot is not None:
            self._settle(request)
            self._moves.append((request.seat, self._num_seats + slot))

    def _is_worth_it(self, request: Request, num_blocks: int) -> bool:
        """Return whether a request may well end before it begins the next block.

        Copying a state takes as long as a step with it. Where nothing but its length ends a request, its last
        block is known, and the others only matter if it is aborted or preempted: a few of them do.
        """
        if request.stop_ids or request.inputs.params.stop or request.sampling.grammar is not None:
            return True
        last = (request.inputs.max_total_tokens - 1) // self._manager.block_size
        return num_blocks == last or num_blocks % SELDOM == 0

    @staticmethod
    def _is_up_to_date(request: Request) -> bool:
        """Return whether the state in a request's seat can be copied to a snapshot of its computed tokens.

        It sees no more; what it has not seen, of the last run of drafts, is applied before it is moved.
        """
        return request.seat != NO_SEAT and not request.num_pending

    # Steps

    def take(self, schedule: Schedule) -> None:
        """Write the moves into a schedule whose step will be launched."""
        schedule.state_moves = self._moves
        self._moves = self._later
        self._later = []
        schedule.settled = [*self._settled]
        self._settled = []
        if self.unapplied:
            unapplied = [self.unapplied.pop(request, 0) for request in schedule.requests]
            schedule.unapplied = unapplied if any(unapplied) else []
        if self._snapshots is not None:
            self._snapshots.launch()

    def clear(self) -> None:
        """Drop all moves, because all requests will be recomputed."""
        self._moves = []
        self._later = []
        self._settled = []
        if self._snapshots is not None:
            self._snapshots.launch()
