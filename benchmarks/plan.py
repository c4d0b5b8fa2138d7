"""Does `paged plan` predict what the engine does?

    python -m benchmarks.plan qwen3-0.6b                     # a shape of benchmarks.common, or a checkpoint
    python -m benchmarks.plan tinyllama-1.1b --quantization int4

Plans an engine on this machine, starts it, and times decodes of several batches and contexts and a prompt.
The ratio is predicted to measured seconds of a step: of decodes the lower quartile, of prompts the shortest,
since others that use the machine only make steps slower.
"""

from __future__ import annotations

import argparse
import random
import time

from benchmarks.common import checkpoint, parse_args, print_json, print_table
from paged import EngineConfig, LLMEngine, SamplingParams
from paged.simulate.cost import decode_work, prompt_work, window_shares
from paged.simulate.plan import make_plan

BATCHES = (1, 8)
CONTEXTS = (64, 1000)
NUM_STEPS = 24
PROMPT = 1024
MAX_MODEL_LEN = 2048


def main() -> None:
    """Print the table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--quantization")
    parser.add_argument("--dtype", default="auto")
    args = parse_args(parser)
    options = {"quantization": args.quantization, "dtype": args.dtype, "max_model_len": MAX_MODEL_LEN}
    model = checkpoint(args.model)
    started = time.perf_counter()
    plan = make_plan(EngineConfig(model, **options))
    plan_s = time.perf_counter() - started
    engine = LLMEngine(model, **options, enable_prefix_caching=False, skip_tokenizer_init=True)
    decode_s(engine, 1, 16)
    windows = window_shares(plan.model)
    rows = []
    for batch in BATCHES:
        for context in CONTEXTS:
            predicted = plan.cost.seconds(decode_work(batch, context + NUM_STEPS // 2, windows))
            rows.append((f"decode of {batch} at {context}", predicted, decode_s(engine, batch, context)))
    steps = prompt_work(PROMPT, plan.footprint.sizes.max_step_tokens, windows)
    measured = min(prompt_s(engine) for _ in range(3))
    rows.append((f"prompt of {PROMPT}", sum(map(plan.cost.seconds, steps)), measured))
    print(f"{args.model}: planned in {plan_s:.2f} s")
    print_table(
        [
            {"step": name, "predicted ms": 1e3 * p, "measured ms": 1e3 * m, "ratio": p / m}
            for name, p, m in rows
        ]
    )
    print_json({"model": args.model, **options, "ratios": {name: p / m for name, p, m in rows}})


def decode_s(engine: LLMEngine, batch: int, context: int) -> float:
    """Return the lower quartile of the seconds of steps in which all requests decode."""
    _add(engine, batch, context, NUM_STEPS)
    times = []
    while engine.has_unfinished_requests():
        start = time.perf_counter()
        outputs = engine.step()
        seconds = time.perf_counter() - start
        if len(outputs) == batch and all(len(output.outputs[0].token_ids) > 1 for output in outputs):
            times.append(seconds)
    return sorted(times)[len(times) // 4]


def prompt_s(engine: LLMEngine) -> float:
    """Return the seconds that a prompt takes alone."""
    _add(engine, 1, PROMPT, 1)
    start = time.perf_counter()
    while engine.has_unfinished_requests():
        engine.step()
    return time.perf_counter() - start


def _add(engine: LLMEngine, batch: int, num_tokens: int, max_tokens: int) -> None:
    vocab_size = engine.model_config.vocab_size
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for i in range(batch):
        engine.add_request(str(i), [random.randrange(vocab_size) for _ in range(num_tokens)], params)


if __name__ == "__main__":
    main()
