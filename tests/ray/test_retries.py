"""Rows of Ray Data whose actors end, without a cluster: which are errors, and how often actors end."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("ray", reason="engines on Ray need ray: pip install 'paged[ray]'")
pyarrow = pytest.importorskip("pyarrow")

from paged.ray import data  # noqa: E402

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


class Life(data._Generator):
    """An actor from its start to its end."""

    def __init__(self, handle: Handle, actor: str, poison: set[int], rng: random.Random) -> None:
        self._ledger = handle
        self._actor = actor
        self._room = data._Room(4)
        self._id_column, self._input_column = "id", "prompt"
        self._poison = poison
        self._rng = rng
        self.running: set[int] = set()
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def _row(self, row_id: int, given: int) -> Any:
        assert row_id == given
        self.running.add(row_id)
        for _ in range(self._rng.randrange(3)):
            await asyncio.sleep(0)
        if row_id in self._poison:
            if not self.end.done():
                self.end.set_result(None)
            await asyncio.get_running_loop().create_future()
        self.running.discard(row_id)
        return data.Result(str(row_id), [row_id], "stop")


async def run(rng: random.Random, num_batches: int, poison: set[int], num_kills: int) -> tuple[Any, Any, int]:
    """Compute all rows on two actors, of which others kill some. Return the rows' errors, how often each one
    was alone in an actor that was killed, and the number of ends.
    """
    handle = Handle(data._Ledger())
    waiting = [[*range(i, i + ROWS_OF_BATCH)] for i in range(0, num_batches * ROWS_OF_BATCH, ROWS_OF_BATCH)]
    errors: dict[int, str | None] = {}
    alone: Counter[int] = Counter()
    num_ends = 0

    async def compute(life: Life, ids: list[int]) -> None:
        found = await life(pyarrow.table({"id": ids, "prompt": ids}))
        errors.update(zip(ids, found.column("error").to_pylist(), strict=True))

    async def act(actor: str, batches: list[list[int]]) -> None:
        nonlocal num_ends, num_kills
        while any(ids[0] not in errors for ids in batches):
            await handle.start.remote(actor)
            life = Life(handle, actor, poison, rng)
            tasks = [asyncio.create_task(compute(life, ids)) for ids in batches if ids[0] not in errors]
            everything = asyncio.gather(*tasks)
            while not (everything.done() or life.end.done()):
                await asyncio.sleep(0)
                if num_kills and not everything.done() and rng.random() < 0.05:
                    num_kills -= 1
                    if len(life.running) == 1:
                        alone.update(life.running)
                    break
            everything.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            num_ends += any(ids[0] not in errors for ids in batches)

    await asyncio.wait_for(asyncio.gather(act("a", waiting[::2]), act("b", waiting[1::2])), 60)
    return errors, alone, num_ends


@pytest.mark.parametrize("seed", range(8))
def test_only_rows_that_end_two_actors_alone_are_errors(seed):
    rng = random.Random(seed)
    num_batches = rng.randrange(2, 12)
    num_rows = num_batches * ROWS_OF_BATCH
    poison = set(rng.sample(range(num_rows), rng.choice([0, 1, 2, min(8, num_rows // 2)])))
    num_kills = rng.choice([0, 6])
    errors, alone, num_ends = asyncio.run(run(rng, num_batches, poison, num_kills))
    assert sorted(errors) == [*range(num_rows)]
    found = {row for row, error in errors.items() if error is not None}
    assert poison <= found
    assert all(alone[row] for row in found - poison)
    # Both actors may end twice before rows are alone, and then twice with each.
    assert num_ends <= 4 + 2 * len(poison) + num_kills
    assert all("computed this row and nothing else" in errors[row] for row in found)
