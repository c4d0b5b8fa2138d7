"""The parts of one request are begun a few at a time, in the event loop and in the engine."""

from __future__ import annotations

import asyncio

from paged import SamplingParams
from paged.engine import loop as loop_module
from paged.engine.async_base import PARTS_OF_TURN, cooperatively
from paged.engine.loop import EngineLoop
from tests.support.checkpoints import checkpoint, new_engine


def test_other_work_runs_between_the_parts_of_a_request():
    async def run() -> list[int]:
        begun, seen = list[int](), list[int]()

        async def other() -> None:
            while len(begun) < 100:
                seen.append(len(begun))
                await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        async for part in cooperatively(range(100)):
            begun.append(part)
        await beside
        assert begun == [*range(100)]
        return seen

    seen = asyncio.run(run())
    gaps = [after - before for before, after in zip([0, *seen], [*seen, 100], strict=True)]
    assert max(gaps) <= PARTS_OF_TURN


def test_steps_run_between_the_calls_of_a_request(monkeypatch):
    """A thousand prompts that are added at once hold the others for CALLS_S at a time."""
    monkeypatch.setattr(loop_module, "CALLS_S", 0.0)
    engine = new_engine(checkpoint("llama"))
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=60, ignore_eos=True))
    loop = EngineLoop(engine, 0.0, lambda: None)
    calls = [loop.submit(lambda engine: engine.scheduler.counters.num_steps) for _ in range(20)]
    loop.stop()
    loop.run()
    assert [call.result() for call in calls] == [*range(20)]
