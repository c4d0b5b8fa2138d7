"""Print new text as it comes."""

import asyncio

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


async def stream(engine: AsyncLLM, prompt: str, request_id: str) -> None:
    params = SamplingParams(
        max_tokens=12, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA
    )
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=params):
        for completion in output.outputs:
            print(completion.text, end="", flush=True)
        if output.finished:
            break


async def main():
    engine_args = AsyncEngineArgs(model="meta-llama/Llama-3.2-1B-Instruct", enforce_eager=True)
    engine = AsyncLLM.from_engine_args(engine_args)
    assert engine.model_config.max_model_len >= 128
    try:
        for i, prompt in enumerate(["def a():", "import "]):
            await stream(engine, prompt, f"stream-{i}")
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
