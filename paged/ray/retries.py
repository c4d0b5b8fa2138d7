"""How a job of Ray Data finds the rows that end its actors: RetryLedger counts, BatchRoom isolates."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

# After so many ends of actors a batch runs alone; after as many more with a row alone, the row is an error.
MOST_ENDS = 2


class RowResult(NamedTuple):
    """The result columns of a row."""

    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    error: str | None = None


class RetryLedger:
    """Counts, for each batch and row, how many actors ended while computing it. Runs as an actor itself."""

    def __init__(self) -> None:
        self._begun = defaultdict[str, set[str]](set)  # by each actor, since it started
        self._ends: Counter[str] = Counter()  # of actors, with each batch and row
        self._ends_in_a_row: Counter[str] = Counter()  # of each actor, since it was last done with something
        self._results: dict[str, RowResult] = {}  # of rows that were computed alone, whose batch is not done

    def start(self, actor: str) -> int:
        """Record that an actor starts. Return how many times in a row it has ended without a result."""
        if actor in self._begun:
            self._ends.update(self._begun[actor])
            self._ends_in_a_row[actor] += 1
        self._begun[actor] = set()
        return self._ends_in_a_row[actor]

    def known(self, work: str) -> tuple[int, RowResult | None]:
        """Return how many actors ended during a batch or row, and the row's result if there is one."""
        return self._ends[work], self._results.get(work)

    def begin(self, actor: str, works: Sequence[str]) -> None:
        """Record that an actor begins a batch or row. `works` are all names of the batch or row."""
        self._begun[actor].update(works)

    def keep(self, actor: str, row: str, result: RowResult) -> None:
        """Store the result of a row computed alone, in case the actor ends before its batch is complete."""
        self._results[row] = result
        self._note_done(actor, row)

    def done(self, actor: str, works: Sequence[str], rows: Sequence[str]) -> None:
        """Record that an actor has finished a batch, and drop the stored results of its rows.

        works: all names of the batch.
        """
        for row in rows:
            self._results.pop(row, None)
        for work in works:
            self._note_done(actor, work)

    def _note_done(self, actor: str, work: str) -> None:
        self._begun[actor].discard(work)
        del self._ends_in_a_row[actor]
        if self._ends[work] < MOST_ENDS:  # what ends actors would end others if it was computed again
            del self._ends[work]


class BatchRoom:
    """Admits batches to an actor's engine in order of arrival: several at once, or one alone."""

    def __init__(self, num_places: int) -> None:
        self._door = asyncio.Lock()
        self._num_places = num_places
        self._places = asyncio.Semaphore(num_places)

    @asynccontextmanager
    async def place(self, *, alone: bool) -> AsyncIterator[None]:
        """Wait for a place; with `alone`, wait until all others have left and keep others out."""
        num = self._num_places if alone else 1
        async with self._door:
            for _ in range(num):
                await self._places.acquire()
        try:
            yield
        finally:
            for _ in range(num):
                self._places.release()
