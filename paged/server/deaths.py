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
        """Whether it counts as a restart."""
        return not (self.is_explained or self.is_pending)


class Suspicion:
    """What a request has to do with the ends of the processes that had it.

    num_deaths: how many processes ended while they had it.
    num_deaths_alone: how many of these had nothing else, since it last outlived what it had survived.
    is_alone: whether its process computes nothing else, as it may have ended others.
    survived_s: how long the last process that ended had computed it before.
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
        """Whether it may be what ended the processes that had it, and has to run alone."""
        return not self._is_cleared and len(self._deaths) >= LEAST_DEATHS

    @property
    def time_alone_s(self) -> float:
        """How long it has to run alone, at least."""
        return TIMES_SURVIVED * self.survived_s

    @property
    def is_proven(self) -> bool:
        """Whether it is taken for what ended them: as many ended that had nothing else."""
        return self.num_deaths_alone >= MOST_DEATHS_ALONE

    def on_send(self) -> None:
        """Record that another process gets it."""
        self._begun = None
        self._has_token = False

    def on_begun(self, step: int) -> None:
        """Record that its process computes it from the step after so many on."""
        if self._begun is None:
            self._begun = step, time.monotonic()

    def on_token(self) -> None:
        """Record that its process has made a token of it."""
        self._has_token = True

    def on_death(self, death: Death, step: int, lived_until: float) -> None:
        """Record the end of its process.

        step: the number of steps that the process is known to have ended.
        lived_until: when the process computed something last, at most.
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
        """Return whether it has run for twice as many steps, and as long, as it did before the last death.

        What ends a process after a time does so after more steps where it runs alone, and which step was the
        last is known only roughly. There must be a token, too: it may never have begun before the last death.

        step: the number of steps of its process so far.
        """
        if self._begun is None or not self._has_token:
            return False
        began_with, began_at = self._begun
        is_long = time.monotonic() - began_at >= self.time_alone_s
        return is_long and step - began_with >= TIMES_SURVIVED * self._survived_steps

    def clear(self) -> None:
        """Let it run beside others until the next death, as it has outlived what it had survived."""
        self._is_cleared = True
        self.end()
        self.acquit()

    def acquit(self) -> None:
        """Forget the ends of processes for which another request was found to be the cause."""
        self._deaths = [death for death in self._deaths if not death.is_explained]

    def end(self) -> None:
        """Let the ends of processes that had it alone count, unless they are explained."""
        for death in self._deaths_alone:
            death.is_pending = False
        self._deaths_alone = []
        self.num_deaths_alone = 0

    def explain(self) -> None:
        """Take it for what ended all of its processes."""
        for death in self._deaths:
            death.is_explained = True
