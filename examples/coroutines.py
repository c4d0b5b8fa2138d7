"""Serve coroutines: requests of any task join the batch at its next step, and leave it when cancelled."""

import asyncio

from paged import AsyncLLMEngine, RequestOutputKind, SamplingParams

PARAMS = SamplingParams(max_tokens=64, seed=1, output_kind=RequestOutputKind.DELTA)


async def complete(engine: AsyncLLMEngine, prompt: str) -> str:
    text = ""
    async for output in engine.generate(prompt, PARAMS):
        text += output.outputs[0].text
    return text


async def main() -> None:
    async with AsyncLLMEngine("demo") as engine:
        # Two tasks at once, in the same steps.
        print(await asyncio.gather(complete(engine, "def add("), complete(engine, "import ")))

        # A task that is cancelled gives its blocks back.
        params = SamplingParams(max_tokens=2000, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        stream = engine.generate("while True:", params)
        async for output in stream:
            print("first token:", repr(output.outputs[0].text))
            break
        await stream.aclose()
        stats = await engine.stats()
        print(stats.num_running, "requests run,", stats.num_used_blocks, "blocks are used")


asyncio.run(main())
