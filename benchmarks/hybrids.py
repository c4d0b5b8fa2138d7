"""What do layers with states cost, and what does their prefix cache save, on a CPU?

    python -m benchmarks.hybrids                # about 20 minutes on two idle cores, 8 GB of memory
    python -m benchmarks.hybrids --short        # fewer rounds and prompts
    python -m benchmarks.hybrids --sections steps,shared

- steps: decodes of 1 and 16 requests behind 512 tokens, and prompts of 512, in turns with a Qwen3 that reads
  as many bytes of weights a step. A ratio is the median over the rounds of those within one: below 1 the
  hybrid is quicker.
- states: the time of the kernels of states in such steps, and the bytes of states that they read and write a
  second, beside those of a copy in memory.
- shared: prompts that share their beginning, one after another, until their first token; an engine without
  snapshots computes some of them in turns.
- apart: requests that share nothing, all at once: tokens a second with snapshots over those without.
- others: what an engine of a model without states does: to be compared with another version of the code.

Answers are compared: with and without snapshots they are the same.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import SHAPES, TINY, checkpoint, parse_args, print_json, print_table, ragged_workload
from benchmarks.timing import device_name
from paged import LLMEngine, RequestOutput, SamplingParams
from paged.kernels.checks import TrustedContents

SECTIONS = ("steps", "states", "shared", "apart", "others")
_LAYERS = [*(3 * ["linear_attention"]), "full_attention"]
# Qwen3.5-0.8B, and a Qwen3 of as many layers whose matrices have as many weights.
SHAPES["qwen3.5-0.8b"] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "layer_types": 6 * _LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "vocab_size": 248320,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}
SHAPES["qwen3-of-equal-bytes"] = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 4704,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 248320,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}
SHAPES["qwen3.5-tiny"] = {
    **SHAPES["qwen3.5-0.8b"],
    **TINY,
    "num_hidden_layers": 4,
    "layer_types": _LAYERS,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
SHAPES["qwen3-tiny"] = {
    **SHAPES["qwen3-of-equal-bytes"],
    **TINY,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
}
# What another version of the code should do alike, with a model without states.
OTHERS = """
import sys
lines = 0
def on_call(frame, event, arg):
    global lines
    name = frame.f_code.co_filename
    if not any(part in name for part in ("/scheduler/", "/blocks/", "/runner/")):
        return None
    lines += event == "line"
    return on_call
from paged import LLMEngine, SamplingParams
engine = LLMEngine("demo", num_blocks=64, max_num_seqs=4, max_num_batched_tokens=32, skip_tokenizer_init=True)
prompts = [[i, *range(3, 40)] for i in range(6)]
sys.settrace(on_call)
engine.generate(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), use_tqdm=False)
sys.settrace(None)
own = (name for name in sys.modules if name.startswith("paged."))
loaded = [name for name in own if "snapshots" in name or "state_" in name]
print(engine.stats().num_steps, lines, engine.runner.kv_cache.num_bytes, loaded)
"""


def tell(text: str) -> None:
    """Show what is done now."""
    print(f"# {text}", file=sys.stderr, flush=True)


def prompts_of(num: int, length: int, vocab_size: int, rng: random.Random) -> list[list[int]]:
    """Draw prompts of one length, which share nothing."""
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for _ in range(num)]


def greedy(max_tokens: int) -> SamplingParams:
    """Return parameters for so many tokens."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def seconds(run: Callable[[], object]) -> float:
    """Return how long a call takes."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def timed(engine: LLMEngine, prompt: list[int]) -> tuple[list[RequestOutput], float]:
    """Return the first token of a prompt, and after how many seconds it is there."""
    started = time.perf_counter()
    results = engine.generate([prompt], greedy(1), use_tqdm=False)
    return results, time.perf_counter() - started


def ratio(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the median of the first over the second."""
    return statistics.median(a / b for a, b in zip(first, second, strict=True))


class Benchmark:
    """The engines and sizes of a run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rng = random.Random(0)
        self.options: dict[str, Any] = {
            "dtype": args.dtype,
            "device": "cpu",
            "num_threads": args.threads,
            "skip_tokenizer_init": True,
            "max_model_len": max(4096, 2 * args.prompt),
            "max_num_seqs": 32,
            "cpu_memory_utilization": 0.25,
            "weights_cache": False,
        }

    def engine(self, name: str, **options: Any) -> LLMEngine:
        """Make an engine."""
        tell(f"loading {name} {options or ''}")
        return LLMEngine(checkpoint(name), **{**self.options, **options})

    # Steps

    def steps(self) -> Iterator[dict[str, Any]]:
        """Compare decodes and a prompt with a model of equal bytes."""
        args = self.args
        engines = [self.engine(args.model), self.engine(args.native)]
        sizes = [bytes_of_step(engine) for engine in engines]
        for batch in args.batches:
            times = self._in_turns(engines, lambda engine, batch=batch: self._decode(engine, batch))
            yield row(f"decode {batch} after {args.context}", times, sizes, "≤ 1.1 / 1.6 at 1 / 16")
        times = self._in_turns(engines, self._first_token)
        yield row(f"prompt of {args.prompt}", times, sizes, "≤ 1.35")

    def _in_turns(self, engines: list[LLMEngine], run: Callable[[LLMEngine], float]) -> list[list[float]]:
        times: list[list[float]] = [[] for _ in engines]
        for number in range(self.args.rounds + 1):
            tell(f"round {number} of {self.args.rounds}")
            for engine, own in zip(engines, times, strict=True):
                took = run(engine)
                if number:  # the first one is not counted
                    own.append(took)
        return times

    def _decode(self, engine: LLMEngine, batch: int) -> float:
        """Return the seconds of a decode step."""
        args = self.args
        vocab_size = engine.model_config.vocab_size
        for i, prompt in enumerate(prompts_of(batch, args.context, vocab_size, self.rng)):
            engine.add_request(str(i), prompt, greedy(args.decodes + 2 * batch + 2))
        while any(not output.outputs[0].token_ids for output in engine.unfinished()):
            engine.step()
        took = seconds(lambda: [engine.step() for _ in range(args.decodes)])
        assert len(engine.unfinished()) == batch, "a request has ended within what is measured"
        engine.abort_request([str(i) for i in range(batch)])
        while engine.has_unfinished_requests():
            engine.step()
        return took / args.decodes

    def _first_token(self, engine: LLMEngine) -> float:
        """Return the seconds of a prompt alone until its first token."""
        (prompt,) = prompts_of(1, self.args.prompt, engine.model_config.vocab_size, self.rng)
        return seconds(lambda: engine.generate([prompt], greedy(1), use_tqdm=False))

    # States

    def states(self) -> Iterator[dict[str, Any]]:
        """Time the kernels of states alone, for the layers of the model."""
        engine = self.engine(self.args.model)
        copied = copy_rate()
        for batch in self.args.batches:
            step = statistics.median(self._decode(engine, batch) for _ in range(self.args.rounds))
            took, moved = self._kernels(engine, batch)
            yield {
                "what": f"states of {batch}",
                "ms": took * 1e3,
                "of a step": took / step,
                "GB/s": moved / took / 1e9,
                "copy GB/s": copied / 1e9,
                "aim": "reported",
            }

    def _kernels(self, engine: LLMEngine, batch: int) -> tuple[float, int]:
        """Return the seconds that states take of a decode, and the bytes that they read and write."""
        runner = engine.runner
        states = runner.kv_cache.states
        assert states is not None, "the model has states"
        kernels = runner.model.kernels
        specs = engine.model_config.states
        seats = torch.arange(batch, dtype=torch.int32)
        lens = torch.full((batch,), 513, dtype=torch.int32)
        bounds = torch.arange(batch + 1, dtype=torch.int32)
        for tensor in states.tensors.values():
            tensor[:, :batch] = 0
        inputs = {}
        for layer, spec in specs.items():
            qkv = torch.randn(batch, spec.columns).to(runner.dtype)
            gates = torch.randn(batch, 2 * spec.num_heads).to(runner.dtype)
            weight = torch.randn(spec.width, spec.columns)
            inputs[layer] = qkv, gates, weight, -torch.rand(spec.num_heads), torch.zeros(spec.num_heads)

        def run() -> None:
            for layer, (qkv, gates, weight, rates, bias) in inputs.items():
                own = states.layer(layer)
                x = kernels.short_conv(qkv, weight, None, own.last_inputs, seats, lens, bounds, gated=False)
                assert own.matrices is not None, "the benchmark is for the delta rule"
                kernels.gated_delta(x, gates, rates, bias, own.matrices, seats, lens, bounds)

        with TrustedContents():
            run()
            took = statistics.median(seconds(run) for _ in range(20))
        return took, 2 * batch * engine.runner.sizes.state_bytes

    # Prefixes

    def shared(self) -> Iterator[dict[str, Any]]:
        """Compute prompts that share their beginning until their first tokens, one after another."""
        args = self.args
        with_snapshots = self.engine(args.model)
        without = self.engine(args.model, state_snapshots=0)
        vocab_size = with_snapshots.model_config.vocab_size
        (prefix,) = prompts_of(1, args.shared, vocab_size, self.rng)
        own = prompts_of(args.prompts, args.whole - args.shared, vocab_size, self.rng)
        times, computed, cached = [], [], []
        every = max(1, args.prompts // args.compared)
        for number, rest in enumerate(own):
            tell(f"prompt {number + 1} of {args.prompts}")
            prompt = prefix + rest
            results, took = timed(with_snapshots, prompt)
            cached.append(results[0].num_cached_tokens)
            if number >= 2:
                times.append(took)
            if number % every == 0:
                alone, took = timed(without, prompt)
                computed.append(took)
                assert alone[0].outputs[0].token_ids == results[0].outputs[0].token_ids, "other tokens"
        block_size = with_snapshots.block_manager.block_size
        wanted = args.shared // block_size * block_size
        assert cached[:2] == [0, 0], f"hits: {cached}"
        assert min(cached[2:]) >= wanted, f"hits: {cached}"
        yield {
            "what": f"{args.prompts} prompts, {args.shared} of {args.whole} tokens shared",
            "ms": statistics.median(times) * 1e3,
            "ms without": statistics.median(computed) * 1e3,
            "ratio": statistics.median(times) / statistics.median(computed),
            "cut": with_snapshots.stats().num_cut_tokens,
            "aim": "≤ 0.45, hits from the third on",
        }

    def apart(self) -> Iterator[dict[str, Any]]:
        """Compare requests that share nothing, with and without snapshots."""
        args = self.args
        engines = [self.engine(args.model), self.engine(args.model, state_snapshots=0)]
        rates: list[list[float]] = [[], []]
        for number in range(args.rounds + 1):
            tell(f"round {number} of {args.rounds}")
            load = ragged_workload(
                args.requests, engines[0].model_config.vocab_size, scale=args.scale, seed=100 + number
            )
            params = [greedy(n) for n in load.max_tokens]
            tokens = []
            order = (0, 1) if number % 2 else (1, 0)
            for i in order:
                started = time.perf_counter()
                results = engines[i].generate(load.prompts, params, use_tqdm=False)
                took = time.perf_counter() - started
                tokens.append([result.outputs[0].token_ids for result in results])
                if number:
                    rates[i].append(load.num_output_tokens / took)
            assert tokens[0] == tokens[1], "snapshots have changed tokens"
        yield {
            "what": f"{args.requests} requests that share nothing",
            "tokens/s": statistics.median(rates[0]),
            "without": statistics.median(rates[1]),
            "ratio": ratio(rates[0], rates[1]),
            "snapshots": engines[0].stats().num_snapshots,
            "aim": "≥ 0.99",
        }

    def others(self) -> Iterator[dict[str, Any]]:
        """Count what a model without states does."""
        tell("an engine of the demo, traced")
        done = subprocess.run(
            [sys.executable, "-c", OTHERS],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[1],
        )
        steps, lines, num_bytes, loaded = done.stdout.splitlines()[-1].split(maxsplit=3)
        assert loaded == "[]", f"it has loaded {loaded}"
        yield {
            "what": "a model without states",
            "steps": int(steps),
            "lines": int(lines),
            "KV bytes": int(num_bytes),
            "aim": "as before",
        }


def bytes_of_step(engine: LLMEngine) -> int:
    """Return the bytes of weights that a decode reads, the tied table once."""
    num_params = engine.model_config.num_params
    return num_params * torch.finfo(engine.runner.dtype).bits // 8


def row(what: str, times: list[list[float]], sizes: list[int], aim: str) -> dict[str, Any]:
    """Return the figures of two engines in turns."""
    return {
        "what": what,
        "ms": statistics.median(times[0]) * 1e3,
        "native ms": statistics.median(times[1]) * 1e3,
        "ratio": ratio(times[0], times[1]),
        "bytes": sizes[0] / sizes[1],
        "aim": aim,
    }


def copy_rate() -> float:
    """Return the bytes a second that a copy in memory reads and writes."""
    source = torch.ones(2**26)
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(seconds(lambda: target.copy_(source)) for _ in range(5))


def main() -> None:
    """Run the sections, and print their tables and a line of JSON."""
    parser = argparse.ArgumentParser("python -m benchmarks.hybrids", description=__doc__)
    parser.formatter_class = argparse.RawTextHelpFormatter
    parser.add_argument("--sections", default=",".join(SECTIONS), help="by commas")
    parser.add_argument("--model", default="qwen3.5-0.8b")
    parser.add_argument("--native", default="qwen3-of-equal-bytes")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--short", action="store_true", help="fewer rounds and prompts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--decodes", type=int, default=32, help="steps that are measured")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=64, help="of the section shared")
    parser.add_argument(
        "--compared", type=int, default=8, help="of these that are computed without snapshots"
    )
    parser.add_argument("--shared", type=int, default=1500)
    parser.add_argument("--whole", type=int, default=2200)
    parser.add_argument("--requests", type=int, default=16, help="of the section apart")
    parser.add_argument("--scale", type=float, default=1.0, help="of their lengths")
    if "--short" in sys.argv:
        parser.set_defaults(rounds=2, prompts=5, compared=2, requests=6, decodes=8, scale=0.3)
    tiny = {"rounds": 1, "batches": [1, 2], "context": 20, "decodes": 3, "prompt": 30, "prompts": 4}
    tiny |= {"compared": 2, "shared": 50, "whole": 80, "requests": 3, "scale": 0.1, "dtype": "float32"}
    args = parse_args(parser, model="qwen3.5-tiny", native="qwen3-tiny", **tiny)
    if wrong := {*args.sections.split(",")} - {*SECTIONS}:
        parser.error(f"there are no sections {', '.join(sorted(wrong))}; there are {', '.join(SECTIONS)}")
    benchmark = Benchmark(args)
    found: dict[str, list[dict[str, Any]]] = {}
    for section in args.sections.split(","):
        found[section] = [*getattr(benchmark, section)()]
        print(f"\n{section}")
        print_table(found[section])
    print_json(
        {"benchmark": "hybrids", "device": device_name(torch.device("cpu")), "model": args.model, **found}
    )


if __name__ == "__main__":
    main()
