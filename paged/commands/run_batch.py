"""`paged run-batch`: answer a file in OpenAI's batch format, continuing an earlier run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..protocol.run_options import RunOptions
from ..server.options import ServeOptions
from . import common
from .options import with_options

INPUT_HELP = """JSON lines with custom_id, method, url and body, as OpenAI's batch API takes them; url is
/v1/chat/completions, /v1/completions or /v1/embeddings. The id of a result comes from its custom_id: a
request_id of a body has no effect. Other fields without effect are counted on stderr."""
_OUTPUT_HELP = """File for the results, in the order in which they are done. Lines whose results it has
already are skipped, so that starting an interrupted run again continues it."""
RETRY_HELP = """Answer the lines again whose results are errors; the new results replace them.
[default: off]"""
NAME_HELP = "The model's name in the request bodies. [default: the value of --model]"


# How the model writes tool calls and reasoning.
PARSERS = (ServeOptions, ["enable_auto_tool_choice", "tool_call_parser", "reasoning_parser"])


@with_options(common.ENGINE, PARSERS)
def run_batch(
    input_file: Annotated[Path, typer.Argument(help=INPUT_HELP)],
    output_file: Annotated[Path, typer.Argument(help=_OUTPUT_HELP)],
    model: common.ModelOption = None,
    chat_template: common.ChatTemplate = None,
    served_model_name: Annotated[str | None, typer.Option(help=NAME_HELP)] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help=RETRY_HELP)] = False,
    **options: Any,
) -> int:
    """Answer all requests of a file in OpenAI's batch format."""
    # These import the whole protocol, which other commands do not need.
    from tqdm import tqdm

    from ..protocol.batch_file import BATCH_LIMITS, BatchOutput, count_lines, is_done, read_lines
    from ..protocol.chat_output.chat_format import ChatFormat
    from .batch_run import BatchRun

    engine_options = common.driver_options(model, options)
    template = common.template_text(chat_template)
    parsers = common.given(options, PARSERS[1])
    total = count_lines(input_file)
    # Not served_model_name: it decides which lines are refused, and --retry-failed answers these.
    run_options = RunOptions(output_file, engine_options, {"chat_template": template, **parsers}, input_file)
    with BatchOutput(output_file, input_file, run_options, retry_failed=retry_failed) as output:
        if not output.has_known_options:
            common.complain(common.UNKNOWN_OPTIONS.format(output_file))
        num_done = len(output.done)
        if is_done(input_file, output.done):
            common.complain(f"nothing to do: all {total:,} lines have results")
        else:
            engine = common.start(engine_options)
            chat_format = ChatFormat.of_model(engine.text, chat_template=template, **parsers)
            limits = replace(BATCH_LIMITS, chat_template=template, chat_format=chat_format)
            with tqdm(total=total, initial=num_done, desc="Batch", unit="line") as bar:
                name = served_model_name or engine_options["model"]
                run = BatchRun(engine, output, name, bar.update)
                run.answer(read_lines(input_file, output.done, limits))
            if run.ignored:
                counts = ", ".join(f"{name} ({count:,} lines)" for name, count in run.ignored.most_common())
                common.complain(f"these fields of bodies had no effect: {counts}")
        num_failed = output.num_failed
    if num_failed:
        common.complain(
            f"{num_failed} of {total} lines failed; the error in their results says why, --retry-failed runs "
            "them again"
        )
    return common.EXIT_FAILED if num_failed else 0
