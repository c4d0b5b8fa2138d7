"""StateMoves: where the states of running requests go, for models whose layers keep some."""

from __future__ import annotations

from typing import NamedTuple

from ..blocks.manager import BlockManager, Copy
from ..requests.request import Request
from .schedule import Schedule


class SettledSeat(NamedTuple):
    """A seat whose state sees the rest of its last run of drafts before states are moved.

    num_unapplied: how many tokens, the last ones before num_computed.
    """

    seat: int
    num_unapplied: int
    num_computed: int


class StateMoves:
    """The moves of recurrent states that a step makes, in order, before it computes.

    The state of a running request lies in the slot of its seat; the state of a swapped-out request lies in
    host memory, in slots numbered after the seats. A request that computes its first token begins with a
    state of zeros, whatever its slot holds.

    A run of drafts leaves the state of its request as it was. The run's right tokens are unapplied until the
    next step with the request, or until its state is moved.

    unapplied: how many such tokens each request has.
    """

    def __init__(self, block_manager: BlockManager, num_seats: int) -> None:
        self._manager = block_manager
        self._num_seats = num_seats
        self._moves: list[Copy] = []  # of this step, and those that must wait until it has ended
        self._later: list[Copy] = []
        self.unapplied: dict[Request, int] = {}
        self._settled: list[SettledSeat] = []

    def end_run(self, request: Request, num_right: int) -> None:
        """Record how many tokens of a run were right, the one before its drafts included."""
        if num_right:
            self.unapplied[request] = num_right

    def leave(self, request: Request) -> None:
        """Forget what is unapplied of a request that gives its seat up."""
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
        """Move the state of a request to host memory, as its blocks are swapped out."""
        slot = request.blocks.host_state
        assert slot is not None, "blocks were swapped out without a state"
        self._settle(request)
        self._moves.append((request.seat, self._num_seats + slot))

    def swap_in(self, request: Request) -> None:
        """Move the state of a request back from host memory, if it is there. The request has taken a seat."""
        if request.blocks.host_state is not None:
            slot = self._manager.take_host_state(request.blocks)
            self._moves.append((self._num_seats + slot, request.seat))

    def take(self, schedule: Schedule) -> None:
        """Put the moves into a step that will be launched."""
        schedule.state_moves = self._moves
        self._moves = self._later
        self._later = []
        schedule.settled = [*self._settled]
        self._settled = []
        if self.unapplied:
            unapplied = [self.unapplied.pop(request, 0) for request in schedule.requests]
            schedule.unapplied = unapplied if any(unapplied) else []

    def clear(self) -> None:
        """Forget the moves, because all requests will be recomputed."""
        self._moves = []
        self._later = []
        self._settled = []
