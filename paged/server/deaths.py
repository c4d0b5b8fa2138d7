"""Death: the end of an engine process. Suspicion: whether a request may be what ended its processes."""

from __future__ import annotations

import time

LEAST_DEATHS = 2  # of processes, after which a request that all of them had may be the cause
MOST_DEATHS_ALONE = 2  # of a request; what ends a process once may be something else
TIMES_SURVIVED = 2  # as long as before the last death a request has to run alone, to be no cause


class Death:
    """The end of an engine process.

    is_explained: whether a request was found to be the cause.
    is_pending: whether the process computed a single request that may yet be found to be the cause.
    """

    def __init__(self) -> None:
        self.at = time.monotonic()
        self.is_explained = False
        self.is_pending = False

    @property
    def counts(self) -> bool:
        """Whether the death counts towards the limit of restarts."""
        return not (self.is_explained or self.is_pending)


class Suspicion:
    """How far a request is suspected of killing the processes that computed it.

    num_deaths: how many processes died while they had the request.
    num_deaths_alone: how many of these processes computed nothing else; reset when the request outlives its
        earlier time.
    is_alone: whether the request's process computes nothing else, because the request may kill processes.
    survived_s: the seconds for which the process that died last had computed the request.
    """

    def __init__(self) -> None:
        self.num_deaths = 0
        self.num_deaths_alone = 0
        self.is_alone = False
        self.survived_s = 0.0
        self._survived_steps = 0
        self._deaths: list[Death] = []
        self._deaths_alone: list[Death] = []
        self._is_cleared = False
        # Of its newest process.
        self._begun: tuple[int, float] | None = None  # the step and the time with which it began
        self._has_token = False

    @property
    def is_there(self) -> bool:
        """Whether the request may have killed processes, and must therefore be computed alone."""
        return not self._is_cleared and len(self._deaths) >= LEAST_DEATHS

    @property
    def time_alone_s(self) -> float:
        """Minimum number of seconds for which the request has to be computed alone."""
        return TIMES_SURVIVED * self.survived_s

    @property
    def is_proven(self) -> bool:
        """Whether the request counts as the cause: enough processes died computing it alone."""
        return self.num_deaths_alone >= MOST_DEATHS_ALONE

    def on_send(self) -> None:
        """Record that the request is sent to another process."""
        self._begun = None
        self._has_token = False

    def on_begun(self, step: int) -> None:
        """Record that the process will compute the request from the next step on."""
        if self._begun is None:
            self._begun = step, time.monotonic()

    def on_token(self) -> None:
        """Record that the process has generated a token of the request."""
        self._has_token = True

    def on_death(self, death: Death, step: int, lived_until: float) -> None:
        """Record the death of the request's process.

        step: how many steps the process is known to have ended.
        lived_until: the latest time at which the process computed something.
        """
        self._deaths.append(death)
        self._is_cleared = False
        self.num_deaths += 1
        if self.is_alone:
            self.num_deaths_alone += 1
            self._deaths_alone.append(death)
            death.is_pending = True
        self._survived_steps = 0
        self.survived_s = 0.0
        if self._begun is not None:
            began_with, began_at = self._begun
            self._survived_steps = max(0, step - began_with) + 1  # the one that was computed
            self.survived_s = max(0.0, lived_until - began_at)

    def has_outlived(self, step: int) -> bool:
        """Return whether the request has run for twice as many steps and twice as long as before the last
        death.

        Time counts besides steps, because steps are shorter when the request runs alone, and the last step
        before a death is known only roughly. A token is required too, since the request may not have begun
        before the last death.

        step: how many steps the process has ended so far.
        """
        if self._begun is None or not self._has_token:
            return False
        began_with, began_at = self._begun
        is_long = time.monotonic() - began_at >= self.time_alone_s
        return is_long and step - began_with >= TIMES_SURVIVED * self._survived_steps

    def clear(self) -> None:
        """Allow other requests in this one's process until the next death: it has outlived its last death."""
        self._is_cleared = True
        self.end()
        self.acquit()

    def acquit(self) -> None:
        """Forget deaths that another request was found to have caused."""
        self._deaths = [death for death in self._deaths if not death.is_explained]

    def end(self) -> None:
        """End the suspicion: let unexplained deaths of processes that computed it alone count as restarts."""
        for death in self._deaths_alone:
            death.is_pending = False
        self._deaths_alone = []
        self.num_deaths_alone = 0

    def explain(self) -> None:
        """Mark the deaths of all processes of this request as explained."""
        for death in self._deaths:
            death.is_explained = True
