"""LogprobTurns: which log-probabilities a step decodes to text, and which wait for a later step."""

from __future__ import annotations

from collections.abc import Container, Set

from ..requests.request import RequestGroup
from ..scheduler.scheduler import Scheduler
from ..text.outputs import OutputProcessor

# Log-probabilities that a step decodes besides those of its own tokens: 10 ms of Python where others run.
CANDIDATES_OF_STEP = 4096
CANDIDATES_OF_EACH = CANDIDATES_OF_STEP // 8
CANDIDATES_ALONE = 2 * CANDIDATES_OF_STEP  # while nothing runs; requests may come meanwhile


class LogprobTurns:
    """Decodes the log-probabilities of requests in turn, a bounded number of candidates in each step.

    undecoded: the requests with candidates that no step has decoded yet. They are published later.
    num_new: the number of candidates that the newest step has added.
    """

    def __init__(self, scheduler: Scheduler, outputs: OutputProcessor) -> None:
        self._scheduler = scheduler
        self._outputs = outputs
        self._turns: dict[RequestGroup, None] = {}
        self.undecoded: Set[RequestGroup] = frozenset()
        self.num_new = 0
        self._num_left = 0  # how many candidates this step may still decode

    def add(self, group: RequestGroup) -> None:
        """Add a request with log-probabilities."""
        self._turns[group] = None

    def forget(self, group: RequestGroup) -> None:
        """Remove a request that has ended, if it was added."""
        self._turns.pop(group, None)

    def decode(self, finished: Container[RequestGroup]) -> None:
        """Decode about CANDIDATES_OF_STEP candidates, plus as many as the step has added.

        Each request gets an equal share. The rest goes to one request after the other. The requests in
        `finished` come first, because their readers wait. The next step begins with the requests that got
        the least.
        """
        self.undecoded = frozenset()
        if not self._turns:
            return
        # If a step decoded fewer candidates than come, ever more of them would be left.
        spare = CANDIDATES_OF_STEP if self._scheduler.has_runnable() else CANDIDATES_ALONE
        self._num_left = self.num_new + spare
        got = dict.fromkeys(sorted(self._turns, key=lambda group: group not in finished), 0)
        share = max(1, min(CANDIDATES_OF_EACH, self._num_left // len(got)))
        undecoded = [*got]
        for most in (share, CANDIDATES_ALONE):
            undecoded = [group for group in undecoded if self._decode_some(group, most, got)]
        if undecoded:
            self._turns = dict.fromkeys([*sorted(undecoded, key=got.__getitem__), *self._turns])
            self.undecoded = {*undecoded}
        self.num_new = 0

    def _decode_some(self, group: RequestGroup, most: int, got: dict[RequestGroup, int]) -> bool:
        """Decode up to `most` candidates of a request. Return whether some may be left."""
        bound = max(0, min(most, self._num_left))
        num = self._outputs.decode_logprobs(group, bound)
        self._num_left -= num
        got[group] += num
        return num >= bound
