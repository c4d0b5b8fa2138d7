"""Rows of Ray Data whose actors end, without a cluster: which are errors, and how often actors end."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("ray", reason="engines on Ray need ray: pip install 'paged[ray]'")
pyarrow = pytest.importorskip("pyarrow")

from paged.ray import data, retries  # noqa: E402

ROWS_OF_BATCH = 4


class Handle:
    """A ledger, as an actor sees it."""

    def __init__(self, ledger: Any) -> None:
        self._ledger = ledger

    def __getattr__(self, name: str) -> Any:
        return Method(getattr(self._ledger, name))


class Method:
    def __init__(self, function: Any) -> None:
        self._function = function

    def remote(self, *args: Any) -> asyncio.Future[Any]:
        answer = asyncio.get_running_loop().create_future()
        answer.set_result(self._function(*args))
        return answer


@dataclass
class Outcome:
    """What has become of a job.

    errors: of rows.
    alone: how often each row was alone in an actor that others killed.
    num_ends: of actors.
    """

    errors: dict[int, str | None] = field(default_factory=dict)
    alone: Counter[int] = field(default_factory=Counter)
    num_ends: int = 0


class Life(data._Generator):
    """An actor from its start to its end."""

    def __init__(self, handle: Handle, actor: str, poison: set[int], rng: random.Random) -> None:
        self._ledger = handle
        self._actor = actor
        self._room = retries.BatchRoom(4)
        self._id_column, self._input_column = "id", "prompt"
        self._poison = poison
        self._rng = rng
        self.running: set[int] = set()
        self.num_done = 0
        self.most_rows: int | None = None  # after which it ends
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def _row(self, row_id: int, given: int) -> Any:
        assert row_id == given
        self.running.add(row_id)
        for _ in range(self._rng.randrange(3)):
            await asyncio.sleep(0)
        if row_id in self._poison or self.num_done == self.most_rows:
            if not self.end.done():
                self.end.set_result(None)
            await asyncio.get_running_loop().create_future()
        self.running.discard(row_id)
        self.num_done += 1
        return retries.RowResult(str(row_id), [row_id], "stop")


async def run(rng: random.Random, blocks: list[list[int]], poison: set[int], num_kills: int) -> Outcome:
    """Compute blocks of two batches on two actors, of which others kill some."""
    handle = Handle(retries.RetryLedger())
    found = Outcome()
    num_left = num_kills

    async def compute(life: Life, block: list[int]) -> None:
        halves = block[:ROWS_OF_BATCH], block[ROWS_OF_BATCH:]
        tables = await asyncio.gather(*(life(pyarrow.table({"id": ids, "prompt": ids})) for ids in halves))
        for ids, table in zip(halves, tables, strict=True):
            found.errors.update(zip(ids, table.column("error").to_pylist(), strict=True))

    async def act(actor: str, own: list[list[int]]) -> None:
        nonlocal num_left
        while left := [block for block in own if block[0] not in found.errors]:
            await handle.start.remote(actor)
            life = Life(handle, actor, poison, rng)
            tasks = [asyncio.create_task(compute(life, block)) for block in left]
            everything = asyncio.gather(*tasks)
            while not (everything.done() or life.end.done()):
                await asyncio.sleep(0)
                if num_left and not everything.done() and rng.random() < 0.05:
                    num_left -= 1
                    if len(life.running) == 1:
                        found.alone.update(life.running)
                    break
            found.num_ends += not everything.done()
            everything.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    await asyncio.wait_for(asyncio.gather(act("a", blocks[::2]), act("b", blocks[1::2])), 60)
    return found


@pytest.mark.parametrize("seed", range(12))
def test_only_rows_that_end_two_actors_alone_are_errors(seed):
    rng = random.Random(seed)
    num_rows = 2 * ROWS_OF_BATCH * rng.randrange(1, 7)
    ids = [*range(num_rows)]
    blocks = [ids[i : i + 2 * ROWS_OF_BATCH] for i in range(0, num_rows, 2 * ROWS_OF_BATCH)]
    poison = set(rng.sample(ids, rng.choice([0, 1, 2, min(8, num_rows // 2)])))
    num_kills = rng.choice([0, 6])
    found = asyncio.run(run(rng, blocks, poison, num_kills))
    assert sorted(found.errors) == ids
    wrong = {row for row, error in found.errors.items() if error is not None}
    assert poison <= wrong
    assert all(found.alone[row] for row in wrong - poison)
    # Both actors may end twice before batches are alone, then once with each, and twice with each row.
    num_batches = len({row // ROWS_OF_BATCH for row in poison})
    assert found.num_ends <= 4 + num_batches + 2 * len(poison) + num_kills
    assert all("computed this row and nothing else" in found.errors[row] for row in wrong)


def test_rows_that_are_done_alone_are_kept():
    """An actor that ends after each row comes to the end of a batch."""
    handle = Handle(retries.RetryLedger())
    ids = [*range(ROWS_OF_BATCH)]

    async def main() -> int:
        for num_ends in range(50):
            await handle.start.remote("a")
            life = Life(handle, "a", set(), random.Random(0))
            life.most_rows = 1
            batch = asyncio.create_task(life(pyarrow.table({"id": ids, "prompt": ids})))
            await asyncio.wait([batch, life.end], return_when=asyncio.FIRST_COMPLETED)
            if batch.done():
                return num_ends
            batch.cancel()
            await asyncio.gather(batch, return_exceptions=True)
        return 50

    assert asyncio.run(main()) <= retries.MOST_ENDS + 1 + ROWS_OF_BATCH
