"""GrammarWaits: holds requests whose next mask is not computed yet, so that they delay no other request."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, wait
from typing import TYPE_CHECKING

from ..requests.request import Request
from ..scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from ..grammars.grammar_jobs import MaskJob

# A step that computes nothing waits for masks this long. What else comes up is seen after it.
ALL_HELD_S = 0.01


class GrammarWaits:
    """Starts the mask of each request as soon as its newest token is known, and holds requests with late
    masks.

    A worker thread computes the masks of fast grammars during the next forward pass. `settle` waits for a
    mask, at most SLOW_S, only if the scheduler needs it: for a request that does not run yet, or that ends
    with its grammar. It does not wait for a slow grammar. The request is held until a step finds its mask
    computed.

    Requests passed to `begin` must be in the scheduler.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        # Requests whose masks were not computed when they were begun, and whether a step must wait for them.
        self._begun: dict[Request, bool] = {}

    def begin(self, requests: Iterable[Request], *, are_running: bool = False) -> None:
        """Start the next mask of each unfinished request that has a grammar.

        are_running: whether a step has just given each request a token.
        """
        wanted = [r for r in requests if r.sampling.grammar is not None and r.finish_reason is None]
        if wanted:
            from ..sampling.structured_outputs import begin_masks

            begin_masks(wanted)
            self._begun |= {request: not (are_running and request.stop_ids) for request in wanted}

    def settle(self) -> list[Request]:
        """Hold and release requests before a step. Return the requests that end because their grammar is
        complete.
        """
        if not self._begun:
            return []
        self._wait_for_awaited()
        return self._release_computed()

    def wait(self) -> None:
        """Wait until one of the pending masks is computed, at most ALL_HELD_S."""
        if jobs := self._jobs(self._begun):
            wait([job.done for job in jobs], ALL_HELD_S, FIRST_COMPLETED)

    def forget(self, requests: Iterable[Request]) -> None:
        """Drop the masks of requests that have ended or were refused."""
        for request in requests:
            self._begun.pop(request, None)

    def __bool__(self) -> bool:
        return bool(self._begun)

    def _jobs(self, requests: Iterable[Request]) -> list[MaskJob]:
        from ..sampling.structured_outputs import pending_mask

        jobs = (pending_mask(request) for request in requests if request.finish_reason is None)
        return [*dict.fromkeys(job for job in jobs if job is not None)]

    def _wait_for_awaited(self) -> None:
        jobs = self._jobs(request for request, is_awaited in self._begun.items() if is_awaited)
        if fast := [job for job in jobs if not job.is_slow]:
            from ..grammars.grammar_jobs import wait_for

            wait_for(fast)

    def _release_computed(self) -> list[Request]:
        """Release the requests whose masks are computed, and hold requests of slow grammars.

        Return the requests that end.
        """
        from ..sampling.structured_outputs import pending_mask

        ended = []
        for request in [*self._begun]:
            if request.finish_reason is None and (job := pending_mask(request)) is not None:
                if job.is_slow:
                    self._scheduler.hold(request)
                continue
            del self._begun[request]
            if request.finish_reason is not None:
                continue
            self._scheduler.release(request)
            # A sample that has not arrived ends with the one whose prompt it shares.
            if request.arrival >= 0 and request.is_complete:
                self._scheduler.complete(request)
                ended.append(request)
        return ended
