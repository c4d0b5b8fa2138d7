"""The parts of one request are begun a few at a time."""

from __future__ import annotations

import asyncio

from paged.engine.async_base import PARTS_OF_TURN, paced


def test_other_work_runs_between_the_parts_of_a_request():
    async def run() -> list[int]:
        begun, seen = list[int](), list[int]()

        async def other() -> None:
            while len(begun) < 100:
                seen.append(len(begun))
                await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        async for part in paced(range(100)):
            begun.append(part)
        await beside
        assert begun == [*range(100)]
        return seen

    seen = asyncio.run(run())
    gaps = [after - before for before, after in zip([0, *seen], [*seen, 100], strict=True)]
    assert max(gaps) <= PARTS_OF_TURN
