"""StateMoves: where the states of running requests go, for models whose layers keep some."""

from __future__ import annotations

from ..blocks.manager import BlockManager, Copy
from ..requests.request import Request
from .schedule import Schedule


class StateMoves:
    """The moves of recurrent states that a step makes, in order, before it computes.

    The state of a running request lies in the slot of its seat; the state of a swapped-out request lies in
    host memory, in slots numbered after the seats. A request that computes its first token begins with a
    state of zeros, whatever its slot holds.
    """

    def __init__(self, block_manager: BlockManager, num_seats: int) -> None:
        self._manager = block_manager
        self._num_seats = num_seats
        self._moves: list[Copy] = []  # of this step, and those that must wait until it has ended
        self._later: list[Copy] = []

    def copy(self, request: Request, child: Request, *, after_step: bool) -> None:
        """Copy the state of a request to its child.

        after_step: whether to copy the state after the step that is being scheduled, not the state before it.
        """
        (self._later if after_step else self._moves).append((request.seat, child.seat))

    def swap_out(self, request: Request) -> None:
        """Move the state of a request to host memory, as its blocks are swapped out."""
        slot = request.blocks.host_state
        assert slot is not None, "blocks were swapped out without a state"
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

    def clear(self) -> None:
        """Forget the moves, because all requests will be recomputed."""
        self._moves = []
        self._later = []
