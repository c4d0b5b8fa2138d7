"""`paged bench`: throughput of many requests, latency of a batch, and `serve`, with random prompts."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..options.sampling_params import SamplingParams
from ..protocol.jobs import check_writable
from . import common
from .bench_serve import serve
from .common import CliError, FailedError
from .headings import CommandGroup, GroupedCommand
from .options import with_options

if TYPE_CHECKING:
    from ..engine.engine import LLMEngine

PERCENTAGES = (10, 25, 50, 75, 90, 99)
# The prompts of an iteration come again in the next: with the cache only the first one would compute them.
_LATENCY_DEFAULTS = {"enable_prefix_caching": "off"}

InputLen = Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")]
OutputLen = Annotated[int, typer.Option(min=1, help="Tokens of an output; EOS does not end it.")]
PrefixLen = Annotated[int, typer.Option(min=0, help="Tokens before these that all prompts share.")]
N = Annotated[int, typer.Option("--n", min=1, help="Outputs of a prompt.")]
NumPrompts = Annotated[int, typer.Option(min=1, help="Number of prompts.")]
NumWarmups = Annotated[int, typer.Option(min=0, help="Prompts to complete before the clock starts.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Number of prompts.")]
NumItersWarmup = Annotated[int, typer.Option(min=0, help="Iterations before the clock starts.")]
NumIters = Annotated[int, typer.Option(min=1, help="Iterations to measure.")]
NoText = Annotated[bool, typer.Option("--disable-detokenize", help="Make no text. [default: off]")]
OutputJson = Annotated[
    Path | None, typer.Option(help="Write the last line to this file too. [default: none]")
]

bench = typer.Typer(cls=CommandGroup)


@bench.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    """Measure throughput or latency, here or of a server."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@bench.command(cls=GroupedCommand)
@with_options(common.ENGINE)
def throughput(
    model: common.ModelArgument = None,
    model_option: common.ModelOption = None,
    input_len: InputLen = 1024,
    output_len: OutputLen = 128,
    prefix_len: PrefixLen = 0,
    n: N = 1,
    num_prompts: NumPrompts = 1000,
    num_warmups: NumWarmups = 0,
    disable_detokenize: NoText = False,
    output_json: OutputJson = None,
    **options: Any,
) -> int:
    """Complete many prompts at once and report requests and tokens per second."""
    engine_options = _engine_options(model, model_option, options, output_json)
    params = _params(output_len, n, disable_detokenize)
    engine = _start(engine_options, prefix_len + input_len, output_len)
    # The prompts for warming up come first, so that none of them is measured.
    prompts = _prompts(engine, num_warmups + num_prompts, input_len, prefix_len)
    if num_warmups:
        engine.generate(prompt_token_ids=prompts[:num_warmups], sampling_params=params, use_tqdm=False)
    measured = prompts[num_warmups:]
    elapsed, num_output_tokens = _timed(engine, measured, params, show_progress=True)
    num_prompt_tokens = sum(map(len, measured))
    result = {
        "model_id": engine_options["model"],
        "elapsed_time": elapsed,
        "num_requests": num_prompts,
        "total_num_tokens": num_prompt_tokens + num_output_tokens,
        "requests_per_second": num_prompts / elapsed,
        "tokens_per_second": (num_prompt_tokens + num_output_tokens) / elapsed,
    }
    print(
        f"Throughput: {num_prompts / elapsed:,.2f} requests/s, {result['tokens_per_second']:,.2f} tokens/s "
        f"with prompts, {num_output_tokens / elapsed:,.2f} output tokens/s"
    )
    print(
        f"{num_prompts:,} requests in {elapsed:,.2f} s: {num_prompt_tokens:,} prompt tokens, "
        f"{num_output_tokens:,} output tokens"
    )
    return _report(result, output_json)


@bench.command(cls=GroupedCommand)
@with_options(common.ENGINE, defaults=_LATENCY_DEFAULTS)
def latency(
    model: common.ModelArgument = None,
    model_option: common.ModelOption = None,
    input_len: InputLen = 32,
    output_len: OutputLen = 128,
    batch_size: BatchSize = 8,
    n: N = 1,
    num_iters_warmup: NumItersWarmup = 10,
    num_iters: NumIters = 30,
    disable_detokenize: NoText = False,
    output_json: OutputJson = None,
    **options: Any,
) -> int:
    """Complete one batch of prompts repeatedly, and show how long it takes."""
    from tqdm import tqdm

    engine_options = {
        "enable_prefix_caching": False,
        **_engine_options(model, model_option, options, output_json),
    }
    params = _params(output_len, n, disable_detokenize)
    engine = _start(engine_options, input_len, output_len)
    prompts = _prompts(engine, batch_size, input_len)
    latencies = [
        _timed(engine, prompts, params)[0]
        for _ in tqdm(range(num_iters_warmup + num_iters), desc="Completing", unit="batch")
    ][num_iters_warmup:]
    from ..simulate.statistics import percentile

    ordered = sorted(latencies)
    result = {
        "model_id": engine_options["model"],
        "avg_latency": sum(latencies) / num_iters,
        "latencies": latencies,
        "percentiles": {str(p): percentile(ordered, p) for p in PERCENTAGES},
    }
    mean = sum(latencies) / num_iters
    print(f"Latency of {batch_size} x {n} outputs of {output_len} tokens: {mean:.4f} s on average")
    for p in PERCENTAGES:
        print(f"{p}% percentile: {percentile(ordered, p):.4f} s")
    return _report(result, output_json)


bench.command(cls=GroupedCommand)(serve)


def _engine_options(
    model: str | None, model_option: str | None, options: Mapping[str, Any], output_json: Path | None
) -> dict[str, Any]:
    """Return the validated arguments of LLMEngine."""
    if output_json is not None:
        check_writable(output_json)
    return common.driver_options(common.one_model(model, model_option), options)


def _params(output_len: int, n: int, disable_detokenize: bool) -> SamplingParams:
    return SamplingParams(
        n=n, temperature=1.0, max_tokens=output_len, ignore_eos=True, detokenize=not disable_detokenize
    )


def _start(engine_options: Mapping[str, Any], num_prompt_tokens: int, output_len: int) -> LLMEngine:
    """Start an engine. Raises CliError if requests of this length have no room in its context."""
    engine = common.start(engine_options)
    # The last token is only sampled: it takes no place in the context.
    if num_prompt_tokens + output_len - 1 > engine.max_model_len:
        raise CliError(
            f"{num_prompt_tokens} prompt tokens and {output_len} output tokens are more than max_model_len "
            f"{engine.max_model_len}; lower --input-len or --output-len"
        )
    return engine


def _prompts(engine: LLMEngine, number: int, input_len: int, prefix_len: int = 0) -> list[list[int]]:
    """Return prompts of random token ids, the same for the same seed."""
    rng = random.Random(engine.config.seed)
    vocabulary = range(engine.model_config.vocab_size)
    prefix = rng.choices(vocabulary, k=prefix_len)
    return [prefix + rng.choices(vocabulary, k=input_len) for _ in range(number)]


def _timed(
    engine: LLMEngine, prompts: list[list[int]], params: SamplingParams, *, show_progress: bool = False
) -> tuple[float, int]:
    """Complete the prompts. Return the seconds and the number of output tokens.

    Raises FailedError if an output is not as long as it should be, which no figure would show.
    """
    started = time.perf_counter()
    outputs = engine.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=show_progress)
    elapsed = time.perf_counter() - started
    samples = [sample for output in outputs for sample in output.outputs]
    for sample in samples:
        if len(sample.token_ids) != params.max_tokens:
            raise FailedError(f"a request ended early: {sample.stop_reason or sample.finish_reason}")
    return elapsed, sum(len(sample.token_ids) for sample in samples)


def _report(result: Mapping[str, Any], output_json: Path | None) -> int:
    """Print the result as a last line of JSON, and write it to the file."""
    text = json.dumps(result)
    print(text)
    sys.stdout.flush()
    if output_json is not None:
        output_json.write_text(text + "\n", encoding="utf-8")
    return 0
