"""`paged generate`: complete one prompt, streaming its text, or a file of prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.errors import FileError
from ..options.sampling_params import SamplingParams
from ..protocol.jobs import outcome_of, read_jobs
from ..protocol.result_file import NO_RESULTS, ResultFile, earlier_results
from ..protocol.run_options import RunOptions
from . import common
from .common import CliError
from .options import with_options
from .prompt_file import DEFAULT_COMPLETION_TOKENS, PromptFile

if TYPE_CHECKING:
    from ..blocks.manager import BlockManager
    from ..engine.engine import LLMEngine
    from ..options.lora_request import LoRARequest
    from ..requests.request import RequestOutput

PROMPTS_HELP = """Complete all prompts of this file: one per line or, if it ends in .jsonl or .ndjson, one
object per line with prompt or prompt_token_ids, and optionally id, which its result has too, tenant, and
sampling parameters by their API names. Blank lines are skipped. [default: none]"""
# What help shows where the defaults are not those of the API.
_DEFAULTS = {"max_tokens": f"from generation_config.json, else {DEFAULT_COMPLETION_TOKENS}"}
OVERWRITE_HELP = "Replace the results that the file of --output has. [default: off]"
RESUME_HELP = """Go on where an interrupted run with the same options stopped: keep the results that the file
of --output has. Other options are refused. [default: off]"""
LIVE_HELP = "Show requests, blocks and tokens as they change, with --prompts and --output. [default: off]"
_OUTPUT_HELP = "Write the results of --prompts to this file as JSON lines. [default: stdout]"


@dataclass(frozen=True, slots=True)
class Shown:
    """What a prompt is about.

    image: an image that the prompt is about: a file. Images stand where the prompt has the model's
        placeholder, else at its beginning; None has none.
    """

    image: Sequence[str] | None = None


@with_options((Shown, ("image",)), common.SAMPLING, common.ENGINE, common.ADAPTER, defaults=_DEFAULTS)
def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to complete. [default: stdin]")] = None,
    prompts: Annotated[Path | None, typer.Option(help=PROMPTS_HELP)] = None,
    output: Annotated[Path | None, typer.Option(help=_OUTPUT_HELP)] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help=OVERWRITE_HELP)] = False,
    resume: Annotated[bool, typer.Option("--resume", help=RESUME_HELP)] = False,
    live: Annotated[bool, typer.Option("--live", help=LIVE_HELP)] = False,
    model: common.ModelOption = None,
    json_schema: common.JsonSchema = None,
    json_object: common.JsonObject = False,
    regex: common.Regex = None,
    choice: common.Choice = None,
    grammar: common.Grammar = None,
    **options: Any,
) -> int:
    """Complete a prompt and stream the text, or complete all prompts of a file."""
    structured: dict[str, Any] = {"json_schema": json_schema, "json_object": json_object}
    structured |= {"regex": regex, "choice": choice, "grammar": grammar}
    images = options.pop("image")
    lora_request = common.take_adapter(options)
    engine_options = common.driver_options(model, options)
    sampling = {**common.named(model).sampling, **common.sampling_options(options | structured)}
    if prompts is None:
        if live:
            raise CliError("--live shows many requests at once: it needs --prompts and --output")
        if output is not None:
            raise CliError("--output takes the results of --prompts; the text of one prompt goes to stdout")
        if overwrite or resume:
            raise CliError("--overwrite and --resume are about the results of --prompts, which is not given")
        _check_shows_text(SamplingParams(**{"max_tokens": DEFAULT_COMPLETION_TOKENS, **sampling}))
        text = _read_stdin() if prompt is None else prompt
        engine = common.start(engine_options)
        params = engine.params_of(sampling, DEFAULT_COMPLETION_TOKENS)
        return _stream(engine, text, params, images or [], lora_request)
    if prompt is not None:
        raise CliError("give either a prompt or --prompts, not both")
    if images:
        raise CliError("--image goes with one prompt, not with --prompts")
    if live and output is None:
        raise CliError("--live takes the terminal: give --output for the results")
    if overwrite and resume:
        raise CliError("--overwrite begins again and --resume goes on; give one of them")
    if (overwrite or resume) and (output is None or _is_stream(output)):
        where = "stdout" if output is None else output
        raise CliError(
            f"--overwrite and --resume need results in a file; {where} is none, name one as --output"
        )
    jobs = read_jobs(prompts, sampling)
    if output is None or _is_stream(output):
        with nullcontext(sys.stdout) if output is None else output.open("w", encoding="utf-8") as lines:
            file = PromptFile(jobs, lambda result: print(json.dumps(result), file=lines, flush=True))
            file.lora_request = lora_request
            return file.complete(engine_options, live=live, hidden=output is None and sys.stdout.isatty())
    with ResultFile(output, prompts) as results:
        if results.size and not (overwrite or resume):
            raise FileError(f"{output} has results already; --resume goes on, --overwrite begins again")
        earlier = earlier_results(results, jobs) if resume else NO_RESULTS
        run_options = RunOptions(
            output, engine_options, {**sampling, "lora": lora_request and lora_request.lora_path}, prompts
        )
        has_known_options = run_options.check() if earlier.size else True
        if not has_known_options:
            common.complain(common.UNKNOWN_OPTIONS.format(output))

        def begin() -> None:
            results.truncate(earlier.size)
            if not earlier.size or not has_known_options:
                run_options.keep()

        file = PromptFile(jobs, results.write, earlier, begin)
        file.lora_request = lora_request
        return file.complete(engine_options, live=live)


def _is_stream(output: Path) -> bool:
    return output.is_fifo() or output.is_char_device()


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


def _stream(
    engine: LLMEngine,
    prompt: str,
    params: SamplingParams,
    images: Sequence[str],
    lora_request: LoRARequest | None,
) -> int:
    """Print the prompt and stream its completion, then print a line of figures to stderr."""
    given = _with_images(engine, prompt, images) if images else prompt
    engine.add_request("0", given, params, lora_request=lora_request)
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


def _with_images(engine: LLMEngine, prompt: str, images: Sequence[str]) -> dict[str, Any]:
    """Return a prompt with images. If the prompt has no place for them, they come first."""
    from ..text.images import is_file_url, is_remote

    known = engine.text.images
    if known is not None:
        prompt = known.with_places(prompt, len(images))
    given = [image if is_remote(image) or is_file_url(image) else Path(image) for image in images]
    return {"prompt": prompt, "multi_modal_data": {"image": given}}


def _figures(blocks: BlockManager, output: RequestOutput) -> str:
    num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
    # The KV of the last token is never needed.
    longest = max(len(completion.token_ids) for completion in output.outputs)
    num_blocks = blocks.most_blocks(len(output.prompt_token_ids) + longest - 1)
    started = output.metrics.arrival_time
    first = output.metrics.first_token_time or started
    last = output.metrics.finished_time or started
    samples = " by a sample" if len(output.outputs) > 1 else ""
    return (
        f"time to first token {1000 * (first - started):,.0f} ms; "
        f"{num_tokens:,} tokens, {num_tokens / (last - started):,.0f} tokens/s; "
        f"{num_blocks:,} of {blocks.pool.num_blocks:,} blocks used{samples}"
    )
