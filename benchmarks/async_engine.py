"""What does it cost to read 64 streams from an event loop, compared with generate()?

    python -m benchmarks.async_engine

The same requests run in turns by LLMEngine.generate(), which shows nothing before the end, by stream(), and
by an AsyncLLMEngine with one task for each request that reads every delta. All run on the thread of one
engine, since on a CPU the worker threads of two engines slow each other down. First all must give the same
tokens. A ratio is the median over the rounds; the ratio of processor time (all threads) is more reliable on a
shared machine.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable

from benchmarks.common import checkpoint, parse_args, print_json, print_table
from paged import AsyncLLMEngine, LLMEngine, RequestOutputKind, SamplingParams
from paged.engine.async_engine import STREAM_INTERVAL_S

Tokens = list[list[int]]


def main() -> None:
    """Compare the tokens, then time in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--num-streams", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--stream-interval", type=float, default=STREAM_INTERVAL_S, help="in seconds")
    args = parse_args(parser, num_streams=4, max_tokens=8, rounds=1)
    engine = AsyncLLMEngine(
        str(checkpoint(args.model)),
        stream_interval_s=args.stream_interval,
        max_num_seqs=args.num_streams,
        num_blocks=4096,
    )
    prompts = [[1 + i] * (8 + i % 8) for i in range(args.num_streams)]
    params = SamplingParams(
        temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    ways: dict[str, Callable[[], Tokens]] = {
        "generate": lambda: asyncio.run(engine.call(lambda e: generated(e, prompts, params))),
        "stream": lambda: asyncio.run(engine.call(lambda e: streamed(e, prompts, params))),
        "async": lambda: asyncio.run(read_all(engine, prompts, params)),
    }
    expected = ways["generate"]()
    for name, run in ways.items():
        assert run() == expected, f"{name} gives other tokens"
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(args.rounds):
        # The order changes, so that no way always follows the same one.
        for name in sorted(ways, key=lambda name: hash((name, round_number))):
            wall, cpu = timed(ways[name])
            seconds[name].append(wall)
            cpu_seconds[name].append(cpu)
    ratio, cpu_ratio = ratios(seconds), ratios(cpu_seconds)
    num_tokens = args.num_streams * args.max_tokens
    rows = [
        {
            "way": name,
            "tokens/s": num_tokens / statistics.median(times),
            "ms per step": statistics.median(times) / args.max_tokens * 1e3,
            "of generate": ratio[name],
            "processor time": cpu_ratio[name],
        }
        for name, times in seconds.items()
    ]
    print_table(rows)
    print_json({"benchmark": "async_engine", "ratio": ratio, "cpu_ratio": cpu_ratio, **vars(args)})


def timed(run: Callable[[], Tokens]) -> tuple[float, float]:
    """Run once. Return the wall time and the processor time of all threads, in seconds."""
    started = time.perf_counter()
    started_cpu = time.process_time()
    run()
    return time.perf_counter() - started, time.process_time() - started_cpu


def ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Return the median ratio of each time to that of generate() in the same round."""
    return {
        name: statistics.median(t / g for t, g in zip(times, seconds["generate"], strict=True))
        for name, times in seconds.items()
    }


def generated(engine: LLMEngine, prompts: Tokens, params: SamplingParams) -> Tokens:
    """Return the tokens of all prompts, by generate()."""
    return [list(o.outputs[0].token_ids) for o in engine.generate(prompts, params, use_tqdm=False)]


def streamed(engine: LLMEngine, prompts: Tokens, params: SamplingParams) -> Tokens:
    """Return the same, by stream()."""
    tokens: dict[str, list[int]] = {}
    for output in engine.stream(prompts, params):
        tokens.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
    return [*tokens.values()]


async def read_all(engine: AsyncLLMEngine, prompts: Tokens, params: SamplingParams) -> Tokens:
    """Return the same, by one task for each prompt."""

    async def read(prompt: list[int]) -> list[int]:
        deltas = [o.outputs[0].token_ids async for o in engine.generate(prompt, params)]
        return [token for delta in deltas for token in delta]

    return await asyncio.gather(*map(read, prompts))


if __name__ == "__main__":
    main()
