"""What do LoRA adapters cost? Engines without slots, with idle slots and with adapters, in turns.

    python -m benchmarks.lora                             # TinyLlama's shape, rank 16 on all linear layers
    python -m benchmarks.lora --model demo --rounds 9
    python -m benchmarks.lora --rank 64 --requests 1 16 64
    python -m benchmarks.lora --model qwen3-moe-0.4b --targets q_proj k_proj v_proj o_proj experts

`speed` is the median of paired times: those of an engine without enable_lora over those of the other one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.common import checkpoint, parse_args, print_json, print_table
from paged import LLMEngine, LoRARequest, SamplingParams

PROMPT_TOKENS = 512
SHORT_PROMPT = 8
NUM_ADAPTERS = 8


def main() -> None:
    """Time decodes of each number of requests, and a prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="tinyllama-1.1b", help="a shape, demo or a directory")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", nargs="+", help="lora_target_modules; default: all but experts")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    args = parse_args(parser, model="demo", requests=[2], max_tokens=4, rounds=1)
    options: dict[str, Any] = {
        "dtype": args.dtype,
        "skip_tokenizer_init": True,
        "num_blocks": 1 + max(args.requests) * -(-(PROMPT_TOKENS + args.max_tokens) // 16),
        "enable_prefix_caching": False,
    }
    path = checkpoint(args.model)
    base = LLMEngine(path, **options)
    slots: dict[str, Any] = {"max_loras": NUM_ADAPTERS, "max_lora_rank": args.rank}
    slots["lora_target_modules"] = args.targets
    engine = LLMEngine(path, **options, enable_lora=True, **slots)
    print(engine.describe())
    with tempfile.TemporaryDirectory() as folder:
        adapters = [write_adapter(engine, Path(folder) / str(i), args.rank, i) for i in range(NUM_ADAPTERS)]
        rows = [
            row(base, engine, adapters[:num_adapters], num_requests, SHORT_PROMPT, args)
            for num_requests in args.requests
            for num_adapters in dict.fromkeys((0, 1, min(num_requests, NUM_ADAPTERS)))
        ]
        rows += [row(base, engine, adapters[:num], 1, PROMPT_TOKENS, args) for num in (0, 1)]
        rows.append(load_times(engine, adapters, args.rounds))
    print(file=sys.stderr)
    print_table(rows)
    print_json({"benchmark": "lora", "rows": rows, **vars(args)})


def write_adapter(engine: LLMEngine, directory: Path, rank: int, seed: int) -> LoRARequest:
    """Write an adapter of all layers that have slots, with random weights."""
    directory.mkdir()
    lora = engine.runner.lora
    assert lora is not None, "the engine has slots"
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (num_rows, num_columns) in lora.shapes.items():
        stored = engine.model_config.tensor_names.in_checkpoint(f"{name}.weight").removesuffix(".weight")
        for part, shape in (("A", (rank, num_columns)), ("B", (num_rows, rank))):
            values = torch.randn(shape, generator=generator) / 64
            tensors[f"base_model.model.{stored}.lora_{part}.weight"] = values
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(f"adapter {seed}", seed + 1, str(directory))


def row(
    base: LLMEngine,
    engine: LLMEngine,
    adapters: list[LoRARequest],
    num_requests: int,
    num_tokens: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Compare the times of steps, those of prompts where these are long."""
    is_prompt = num_tokens == PROMPT_TOKENS
    max_tokens = 1 if is_prompt else args.max_tokens
    pairs = []
    for i in range(args.rounds + 1):
        print(f"\r{num_requests} requests, {len(adapters)} adapters: round {i} ", end="", file=sys.stderr)
        times = [
            seconds(each, own, num_requests, num_tokens, max_tokens)
            for each, own in ((base, []), (engine, adapters))
        ]
        pairs.append(times)
    pairs = pairs[min(1, args.rounds) :]
    return {
        "steps": "prompt" if is_prompt else "decode",
        "requests": num_requests,
        "adapters": len(adapters),
        "speed": round(statistics.median(one / other for one, other in pairs), 3),
        "ms": round(1e3 * statistics.median(other for _, other in pairs), 2),
    }


def seconds(
    engine: LLMEngine, adapters: list[LoRARequest], num_requests: int, num_tokens: int, max_tokens: int
) -> float:
    """Return the seconds of a step: of the decodes, or of the prompt if nothing is decoded."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    for i in range(num_requests):
        own = adapters[i % len(adapters)] if adapters else None
        prompt = {"prompt_token_ids": [1 + (i + j) % 99 for j in range(num_tokens)]}
        engine.add_request(str(i), prompt, params, lora_request=own)
    num_steps = 0
    started = time.perf_counter()
    while engine.has_unfinished_requests():
        engine.step()
        num_steps += 1
        if num_steps == 1 and max_tokens > 1:  # the prompts, which are one step
            started = time.perf_counter()
    return (time.perf_counter() - started) / max(1, num_steps - (max_tokens > 1))


def load_times(engine: LLMEngine, adapters: list[LoRARequest], rounds: int) -> dict[str, Any]:
    """Return how long an adapter takes from host memory into a slot."""
    lora = engine.runner.lora
    assert lora is not None, "the engine has slots"
    for each in adapters:
        engine.add_lora(each)
    adapter = next(iter(engine.runner.adapters.values()))
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        lora.set(0, adapter.parts)
        times.append(time.perf_counter() - started)
    return {
        "steps": f"load of {adapter.num_bytes / 1e6:.0f} MB",
        "requests": 0,
        "adapters": 1,
        "speed": 0.0,
        "ms": round(1e3 * statistics.median(times), 2),
    }


if __name__ == "__main__":
    main()
