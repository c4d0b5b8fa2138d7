"""Section engine: 64 streams over HTTP beside `generate`, and the first token beside AsyncLLMEngine's."""

from __future__ import annotations

import random
import statistics
from typing import Any

from benchmarks.server.cores import Cores, pin
from benchmarks.server.load import Load, LoadProcess
from benchmarks.server.offline import OfflineProcess
from benchmarks.server.served import completion, paged_serve, streamed_tokens

NUM_BLOCKS = 1024


def measure(
    model: str, cores: Cores, *, rounds: int, num_streams: int, max_tokens: int, num_first: int
) -> dict[str, Any]:
    """Return the ratios over rounds in which the server and the engine alone take turns.

    num_streams: at once, of max_tokens each. num_first: requests whose first token is timed.
    """
    rng = random.Random(0)

    def new_prompts(count: int, length: int) -> list[list[int]]:
        return [[rng.randrange(3, 200) for _ in range(length)] for _ in range(count)]

    options = {"model": model, "num_blocks": NUM_BLOCKS, "max_num_seqs": num_streams}
    flags = ["--num-blocks", NUM_BLOCKS, "--max-num-seqs", num_streams]
    with (
        OfflineProcess(options, cores.engine) as offline,
        paged_serve(model, *flags, cores=cores.engine) as server,
        LoadProcess(cores.beside_engine()) as client,
    ):
        if cores.front_end is not None:
            pin(server.pid, (cores.front_end,))
        prompts = new_prompts(num_streams, 16)
        _, expected = offline.generate(prompts, max_tokens)
        found = streamed_tokens(server.port, model, prompts, max_tokens)
        assert found == expected, "the server gives other tokens than generate"
        seconds: dict[str, list[float]] = {"offline": [], "http": []}
        cpu: dict[str, list[float]] = {"offline": [], "http": []}
        for number in range(rounds):
            prompts = new_prompts(num_streams, 16)
            bodies = [completion(model, prompt, max_tokens) for prompt in prompts]
            load = Load(server.port, "/v1/completions", bodies, num_streams, num_streams)
            for way in ("offline", "http") if number % 2 else ("http", "offline"):
                alone = way == "offline"
                before = offline.cpu_seconds() if alone else server.cpu_seconds()
                took = offline.generate(prompts, max_tokens)[0] if alone else client.run(load).seconds
                seconds[way].append(took)
                cpu[way].append((offline.cpu_seconds() if alone else server.cpu_seconds()) - before)
        first: dict[str, list[float]] = {"offline": [], "http": []}
        for number, prompt in enumerate(new_prompts(num_first, 8)):
            load = Load(server.port, "/v1/completions", [completion(model, prompt, 2)], 1, 1)
            for way in ("offline", "http") if number % 2 else ("http", "offline"):
                took = offline.first_token_s(prompt) if way == "offline" else client.run(load).first_s[0]
                first[way].append(took)
    num_tokens = num_streams * max_tokens
    later = [http - alone for http, alone in zip(first["http"], first["offline"], strict=True)]
    return {
        "streams": num_streams,
        "tokens/s of generate": num_tokens / statistics.median(seconds["offline"]),
        "tokens/s over HTTP": num_tokens / statistics.median(seconds["http"]),
        "ratio": _ratio(seconds),
        "aim": 0.95,
        "of processor time": _ratio(cpu),
        "first token, ms": statistics.median(first["offline"]) * 1e3,
        "over HTTP, ms later": statistics.median(later) * 1e3,
        "wanted, ms": 5.0,
    }


def _ratio(figures: dict[str, list[float]]) -> float:
    """Return the median ratio of the engine alone to the server in the same round."""
    return statistics.median(a / b for a, b in zip(figures["offline"], figures["http"], strict=True))
