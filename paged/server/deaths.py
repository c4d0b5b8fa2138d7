"""Death: the end of an engine process. Suspicion: whether a request may be what ended its processes."""

from __future__ import annotations

import time

LEAST_DEATHS = 2  # of processes, after which a request that all of them had may be the cause
MOST_DEATHS_ALONE = 2  # of a request; what ends a process once may be something else
TIMES_SURVIVED = 2  # as long as before the last death a request has to run alone, to be no cause


class Death:
    """The end of an engine process.

    is_explained: whether a request was found to be the cause.
    is_pending: whether the process had a single request, which may be found to be the cause.
    """

    def __init__(self) -> None:
        self.at = time.monotonic()
        self.is_explained = False
        self.is_pending = False

    @property
    def counts(self) -> bool:
        """Whether the death counts as a restart."""
        return not (self.is_explained or self.is_pending)


class Suspicion:
    """The part of a request in the deaths of the processes that computed it.

    num_deaths: how many processes died while they had it.
    num_deaths_alone: how many of these computed nothing else, since the request last outlived its earlier
        time.
    is_alone: whether its process computes nothing else, because it may have killed others.
    survived_s: how long the process that died last had computed it.
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
        """Whether the request may have killed its processes, and must therefore run alone."""
        return not self._is_cleared and len(self._deaths) >= LEAST_DEATHS

    @property
    def time_alone_s(self) -> float:
        """The least number of seconds that it has to run alone."""
        return TIMES_SURVIVED * self.survived_s

    @property
    def is_proven(self) -> bool:
        """Whether enough processes died while computing only this request, so that it counts as
        their cause.
        """
        return self.num_deaths_alone >= MOST_DEATHS_ALONE

    def on_send(self) -> None:
        """Record that another process gets the request."""
        self._begun = None
        self._has_token = False

    def on_begun(self, step: int) -> None:
        """Record that its process computes it from the next step on."""
        if self._begun is None:
            self._begun = step, time.monotonic()

    def on_token(self) -> None:
        """Record that its process has generated a token of it."""
        self._has_token = True

    def on_death(self, death: Death, step: int, lived_until: float) -> None:
        """Record the death of its process.

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
        """Return whether it has run for twice as many steps, and twice as long, as before the last death.

        A cause that depends on time strikes after more steps when the request runs alone. The last step
        before a death is known only roughly. A token is required, too: before the last death the request may
        never have begun.

        step: how many steps its process has ended so far.
        """
        if self._begun is None or not self._has_token:
            return False
        began_with, began_at = self._begun
        is_long = time.monotonic() - began_at >= self.time_alone_s
        return is_long and step - began_with >= TIMES_SURVIVED * self._survived_steps

    def clear(self) -> None:
        """Let the request run beside others until the next death, as it has outlived its earlier time."""
        self._is_cleared = True
        self.end()
        self.acquit()

    def acquit(self) -> None:
        """Forget deaths that another request was found to have caused."""
        self._deaths = [death for death in self._deaths if not death.is_explained]

    def end(self) -> None:
        """Count the deaths of processes that had it alone, unless they are explained."""
        for death in self._deaths_alone:
            death.is_pending = False
        self._deaths_alone = []
        self.num_deaths_alone = 0

    def explain(self) -> None:
        """Blame this request for the deaths of all its processes."""
        for death in self._deaths:
            death.is_explained = True
