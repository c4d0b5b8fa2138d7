"""The command line: `paged generate`, for one prompt or a file of them, `paged warmup`, `paged simulate`.

Everything that can be wrong with the arguments is looked at before torch is imported and the model loaded.
Every error is one line on stderr; only generated text and results go to stdout.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import __version__
from .config import EngineConfig
from .errors import PagedError
from .jobs import Job, check_writable, read_jobs
from .options import option
from .sampling_params import SamplingParams
from .simulate.command import WEIGHTS_HELP, simulate
from .simulate.workload import read_shares

if TYPE_CHECKING:
    from .block_manager import BlockManager
    from .engine import LLMEngine
    from .request import RequestOutput

EXIT_FAILED, EXIT_USAGE = 1, 2
# Older versions of Typer take their exceptions from click, newer ones bring copies of their own.
PARSER_ERROR: type[Any] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class CliError(PagedError):
    """The command line, or a file that it names, is wrong."""


def main() -> None:
    """Run the command line, and leave with its exit code."""
    # Ctrl-C ends it at once and quietly, also in the middle of an import: nothing here needs cleaning up.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # What the terminal cannot show is escaped, not fatal.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        sys.exit(app(prog_name="paged", standalone_mode=False))
    except PARSER_ERROR as error:
        message = f"{error.format_message()} (see paged {_command()} --help)"
    except (PagedError, UnicodeDecodeError) as error:  # the latter from stdin
        message = str(error)
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    _complain(message)
    sys.exit(EXIT_USAGE)


def _command() -> str:
    names = [command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands]
    return next((name for name in sys.argv[1:2] if name in names), "generate")


def _complain(message: str) -> None:
    print("paged:", " ".join(message.split()), file=sys.stderr)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """A paged-attention runtime for large language models."""
    if version:
        print(f"paged {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


_sampling, _engine = partial(option, SamplingParams), partial(option, EngineConfig)

PROMPTS_HELP = """Complete all prompts of this file: one per line or, if it ends in .jsonl, one object per
line with prompt or prompt_token_ids, any sampling option by its API name, and perhaps priority, tenant,
timeout_s or cache_salt. Blank lines are skipped."""
LIVE_HELP = "Show requests, blocks and tokens as they change, with --prompts and --output."
OUTPUT_HELP = "Write the results of --prompts to this file instead of stdout, as JSON lines."


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to complete; without it, stdin.")] = None,
    prompts: Annotated[Path | None, typer.Option(help=PROMPTS_HELP)] = None,
    output: Annotated[Path | None, typer.Option(help=OUTPUT_HELP)] = None,
    live: Annotated[bool, typer.Option("--live", help=LIVE_HELP)] = False,
    model: Annotated[str, _engine("model")] = "demo",
    n: Annotated[int | None, _sampling("n")] = None,
    temperature: Annotated[float | None, _sampling("temperature")] = None,
    top_p: Annotated[float | None, _sampling("top_p")] = None,
    top_k: Annotated[int | None, _sampling("top_k")] = None,
    min_p: Annotated[float | None, _sampling("min_p")] = None,
    seed: Annotated[int | None, _sampling("seed")] = None,
    max_tokens: Annotated[int | None, _sampling("max_tokens")] = None,
    min_tokens: Annotated[int | None, _sampling("min_tokens")] = None,
    stop: Annotated[list[str] | None, _sampling("stop")] = None,
    stop_token_ids: Annotated[list[int] | None, _sampling("stop_token_ids")] = None,
    ignore_eos: Annotated[bool | None, _sampling("ignore_eos")] = None,
    tokenizer: Annotated[str | None, _engine("tokenizer")] = None,
    dtype: Annotated[str | None, _engine("dtype")] = None,
    device: Annotated[str | None, _engine("device")] = None,
    block_size: Annotated[int | None, _engine("block_size")] = None,
    max_model_len: Annotated[int | None, _engine("max_model_len")] = None,
    max_num_seqs: Annotated[int | None, _engine("max_num_seqs")] = None,
    max_num_batched_tokens: Annotated[int | None, _engine("max_num_batched_tokens")] = None,
    num_blocks: Annotated[int | None, _engine("num_blocks")] = None,
    gpu_memory_utilization: Annotated[float | None, _engine("gpu_memory_utilization")] = None,
    cpu_memory_utilization: Annotated[float | None, _engine("cpu_memory_utilization")] = None,
    enable_prefix_caching: Annotated[bool | None, _engine("enable_prefix_caching")] = None,
    scheduling_policy: Annotated[str | None, _engine("scheduling_policy")] = None,
    tenant_weights: Annotated[list[str] | None, typer.Option(help=WEIGHTS_HELP)] = None,
    long_prefill_token_threshold: Annotated[int | None, _engine("long_prefill_token_threshold")] = None,
    max_num_partial_prefills: Annotated[int | None, _engine("max_num_partial_prefills")] = None,
    max_waiting: Annotated[int | None, _engine("max_waiting")] = None,
    watermark: Annotated[float | None, _engine("watermark")] = None,
    preemption_mode: Annotated[str | None, _engine("preemption_mode")] = None,
    max_preemptions: Annotated[int | None, _engine("max_preemptions")] = None,
    swap_space: Annotated[float | None, _engine("swap_space")] = None,
    attention_backend: Annotated[str | None, _engine("attention_backend")] = None,
) -> int:
    """Complete a prompt, streaming the text, or all prompts of a file."""
    given = {name: value for name, value in locals().items() if value not in (None, [], ())}
    sampling = {field.name: given[field.name] for field in fields(SamplingParams) if field.name in given}
    options = {field.name: given[field.name] for field in fields(EngineConfig) if field.name in given}
    options.pop("seed", None)  # --seed is the one of SamplingParams
    if "tenant_weights" in options:
        options["tenant_weights"] = read_shares("tenant_weights", options["tenant_weights"])
    EngineConfig.from_kwargs(**options)
    params = SamplingParams(**sampling)
    if prompts is None:
        if live:
            raise CliError("--live shows many requests at once: it goes with --prompts and --output")
        if output is not None:
            raise CliError("--output takes the results of --prompts; the text of one prompt goes to stdout")
        text = _read_stdin() if prompt is None else prompt
        return _stream(_start(options), text, params)
    if prompt is not None:
        raise CliError("give either a prompt or --prompts, not both")
    if live and output is None:
        raise CliError("--live takes the terminal: give --output for the results")
    jobs = read_jobs(prompts, sampling)
    if output is not None:
        check_writable(output, prompts)
    if jobs:
        return _complete(_start(options), jobs, output, live=live)
    if output is not None:
        output.write_bytes(b"")
    return 0


@app.command()
def warmup(
    model: Annotated[str, typer.Argument(help="As in generate.")] = "demo",
    dtype: Annotated[str | None, _engine("dtype")] = None,
    device: Annotated[str | None, _engine("device")] = None,
    block_size: Annotated[int | None, _engine("block_size")] = None,
    max_model_len: Annotated[int | None, _engine("max_model_len")] = None,
    attention_backend: Annotated[str | None, _engine("attention_backend")] = None,
) -> int:
    """Compile the kernels a model needs, so that engines start at once; Triton keeps them on disk."""
    given = {name: value for name, value in locals().items() if value is not None}
    EngineConfig.from_kwargs(**given)
    num_kernels = _start(given | {"skip_tokenizer_init": True}).num_kernels
    print(f"{num_kernels} kernels ready" if num_kernels else "nothing to compile: no Triton kernels run here")
    return 0


app.command()(simulate)


def _read_stdin() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise CliError("no prompt: give it as an argument, on stdin, or in a file with --prompts")
    # The newline that ends the last line of a text is not meant as part of a prompt.
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise CliError("no prompt: stdin is empty; give it as an argument, or a file with --prompts")
    return text


def _start(options: dict[str, Any]) -> LLMEngine:
    from .engine import LLMEngine

    engine = LLMEngine(**options)
    print(engine.describe(), file=sys.stderr)
    return engine


def _stream(engine: LLMEngine, prompt: str, params: SamplingParams) -> int:
    """Write the prompt and the text that follows it, as it comes; then a line of figures."""
    engine.add_request("0", prompt, params)
    print(prompt, end="", flush=True)
    shown = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if params.n == 1:
                text = output.outputs[0].text
                print(text[shown:], end="", flush=True)
                shown = len(text)
    if params.n > 1:  # side by side they cannot be shown as they grow
        print(*(f"\n--- sample {c.index + 1} of {params.n}\n{c.text}" for c in output.outputs), end="")
    print(flush=True)
    if "error" in (outcome := _outcome(output)):
        _complain(outcome["error"])
        return EXIT_FAILED
    print(_figures(engine.block_manager, output), file=sys.stderr)
    return 0


def _figures(blocks: BlockManager, output: RequestOutput) -> str:
    num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
    # The KV of the last token is never needed.
    longest = max(len(completion.token_ids) for completion in output.outputs)
    num_blocks = blocks.most_blocks(len(output.prompt_token_ids) + longest - 1)
    started = output.metrics.arrival_time
    first, last = output.metrics.first_token_time or started, output.metrics.finished_time or started
    samples = " by a sample" if len(output.outputs) > 1 else ""
    return (
        f"time to first token {1000 * (first - started):,.0f} ms; "
        f"{num_tokens:,} tokens, {num_tokens / (last - started):,.0f} tokens/s; "
        f"{num_blocks:,} of {blocks.pool.num_blocks:,} blocks used{samples}"
    )


def _complete(engine: LLMEngine, jobs: list[Job], output: Path | None, *, live: bool) -> int:
    """Write a line for every job, in their order, as soon as it and those before it are done."""
    from tqdm import tqdm

    from .live_view import LiveView

    # On a terminal the lines themselves, or the live view, show how far it is.
    hidden = live or (output is None and sys.stdout.isatty())
    started, num_tokens, num_written, num_failed = time.perf_counter(), 0, 0, 0
    done: dict[int, dict[str, Any]] = {}
    with (
        nullcontext(sys.stdout) if output is None else output.open("w", encoding="utf-8") as lines,
        LiveView(engine.stats, len(jobs)) if live else nullcontext() as view,
        tqdm(total=len(jobs), desc="Generating", unit="prompt", disable=hidden) as bar,
    ):
        for index, outcome in _outcomes(engine, jobs, view.update if view is not None else lambda: None):
            if view is not None:
                view.num_done += 1
            done[index] = {"index": index, **jobs[index].prompt, **outcome}
            num_failed += "error" in outcome
            num_tokens += sum(
                len(sample.get("token_ids", ())) for sample in outcome.get("outputs", [outcome])
            )
            rate = num_tokens / (time.perf_counter() - started)
            bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
            bar.update()
            while num_written in done:
                print(json.dumps(done.pop(num_written)), file=lines, flush=True)
                num_written += 1
    if num_failed:
        _complain(f"{num_failed} of {len(jobs)} prompts failed; the error in their lines says why")
    return EXIT_FAILED if num_failed else 0


def _outcomes(
    engine: LLMEngine, jobs: list[Job], after_step: Callable[[], None]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Index and outcome of every job, as they finish. One that is refused stops none of the others."""
    pending = deque(enumerate(jobs))
    most_waiting = engine.config.max_waiting or len(jobs)
    while pending or engine.has_unfinished_requests():
        while pending and engine.scheduler.num_waiting < most_waiting:
            index, job = pending.popleft()
            try:
                engine.add_request(str(index), job.prompt, job.params, tenant=job.tenant)
            except PagedError as error:
                yield index, {"error": str(error)}
        for output in engine.step():
            if output.finished:
                yield int(output.request_id), _outcome(output)
        after_step()


def _outcome(output: RequestOutput) -> dict[str, Any]:
    """One sample's fields or, of several, a list of theirs."""
    for completion in output.outputs:
        if completion.finish_reason == "error":
            return {"error": str(completion.stop_reason)}
    samples = [
        {
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        for completion in output.outputs
    ]
    return samples[0] if len(samples) == 1 else {"outputs": samples}
