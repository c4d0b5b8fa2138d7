"""`paged generate`: complete one prompt, streaming its text, or a file of prompts."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import PagedError
from ..protocol.jobs import Job, check_writable, outcome_of, read_jobs
from ..sampling_params import SamplingParams
from . import common
from .common import CliError
from .options import with_options

if TYPE_CHECKING:
    from ..blocks.manager import BlockManager
    from ..engine.engine import LLMEngine
    from ..requests.request import RequestOutput

PROMPTS_HELP = """Complete all prompts of this file: one per line or, if it ends in .jsonl, one object per
line with prompt or prompt_token_ids, and optionally sampling parameters by their API names and tenant. Blank
lines are skipped. [default: none]"""
DEFAULT_COMPLETION_TOKENS = 256
# What help shows where the defaults are not those of the API.
_DEFAULTS = {"max_tokens": f"from generation_config.json, else {DEFAULT_COMPLETION_TOKENS}"}
LIVE_HELP = "Show requests, blocks and tokens as they change, with --prompts and --output. [default: off]"
_OUTPUT_HELP = "Write the results of --prompts to this file as JSON lines. [default: stdout]"


@with_options(common.SAMPLING, common.ENGINE, defaults=_DEFAULTS)
def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to complete. [default: stdin]")] = None,
    prompts: Annotated[Path | None, typer.Option(help=PROMPTS_HELP)] = None,
    output: Annotated[Path | None, typer.Option(help=_OUTPUT_HELP)] = None,
    live: Annotated[bool, typer.Option("--live", help=LIVE_HELP)] = False,
    model: common.Model = "demo",
    json_schema: common.JsonSchema = None,
    json_object: common.JsonObject = False,
    regex: common.Regex = None,
    choice: common.Choice = None,
    grammar: common.Grammar = None,
    **options: Any,
) -> int:
    """Complete a prompt, streaming the text, or all prompts of a file."""
    structured: dict[str, Any] = {"json_schema": json_schema, "json_object": json_object}
    structured |= {"regex": regex, "choice": choice, "grammar": grammar}
    engine_options = common.engine_options(model, options)
    sampling = common.sampling_options(options | structured)
    if prompts is None:
        if live:
            raise CliError("--live shows many requests at once: it needs --prompts and --output")
        if output is not None:
            raise CliError("--output takes the results of --prompts; the text of one prompt goes to stdout")
        _check_shows_text(SamplingParams(**{"max_tokens": DEFAULT_COMPLETION_TOKENS, **sampling}))
        text = _read_stdin() if prompt is None else prompt
        engine = common.start(engine_options)
        return _stream(engine, text, engine.params_of(sampling, DEFAULT_COMPLETION_TOKENS))
    if prompt is not None:
        raise CliError("give either a prompt or --prompts, not both")
    if live and output is None:
        raise CliError("--live takes the terminal: give --output for the results")
    jobs = read_jobs(prompts, sampling)
    if output is not None:
        check_writable(output, prompts)
    if jobs:
        return _complete(common.start(engine_options), jobs, output, live=live)
    if output is not None:
        output.write_bytes(b"")
    return 0


def _check_shows_text(params: SamplingParams) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise CliError(f"{flag} has no place in the text of one prompt; give --prompts for JSON lines")
    if not params.detokenize:
        raise CliError("--no-detokenize leaves nothing to show of one prompt; give --prompts for JSON lines")


def _read_stdin() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise CliError("no prompt: give it as an argument, on stdin, or in a file with --prompts")
    # The final newline is not part of the prompt.
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise CliError("no prompt: stdin is empty; give it as an argument, or a file with --prompts")
    return text


def _stream(engine: LLMEngine, prompt: str, params: SamplingParams) -> int:
    """Print the prompt and stream its completion, then print a line of figures to stderr."""
    engine.add_request("0", prompt, params)
    print(prompt, end="", flush=True)
    shown = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if params.num_samples == 1:
                text = output.outputs[0].text
                print(text[shown:], end="", flush=True)
                shown = len(text)
    if params.n > 1:  # several samples cannot be streamed at once
        print(
            *(f"\n--- sample {i + 1} of {params.n}\n{c.text}" for i, c in enumerate(output.outputs)), end=""
        )
    elif params.num_samples > 1:  # the best sample is known only now
        print(output.outputs[0].text, end="")
    print(flush=True)
    if "error" in (outcome := outcome_of(output)):
        common.complain(outcome["error"])
        return common.EXIT_FAILED
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
    """Write a line for each job, in order, as soon as it and all jobs before it are done."""
    from tqdm import tqdm

    from .live_view import LiveView

    # On a terminal the lines themselves, or the live view, show the progress.
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
        common.complain(f"{num_failed} of {len(jobs)} prompts failed; the error in their lines says why")
    return common.EXIT_FAILED if num_failed else 0


def _outcomes(
    engine: LLMEngine, jobs: list[Job], after_step: Callable[[], None]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield index and outcome of each job as it finishes. A refused job has an error as its outcome."""
    pending = deque(enumerate(jobs))
    most_waiting = engine.config.max_waiting or len(jobs)
    while pending or engine.has_unfinished_requests():
        while pending and engine.scheduler.num_waiting < most_waiting:
            index, job = pending.popleft()
            try:
                params = engine.params_of(job.sampling, DEFAULT_COMPLETION_TOKENS)
                engine.add_request(str(index), job.prompt, params, tenant=job.tenant)
            except PagedError as error:
                yield index, {"error": str(error)}
        for output in engine.step():
            if output.finished:
                yield int(output.request_id), outcome_of(output)
        after_step()
