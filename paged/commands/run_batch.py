"""`paged run-batch`: answer a file in OpenAI's batch format, continuing an earlier run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ..base.errors import ConfigError
from ..options.lora_request import LoRARequest, lora_modules_of
from ..protocol.run_options import RunOptions
from ..server.options import ServeOptions
from . import common
from .options import with_options

if TYPE_CHECKING:
    from ..checkpoints.library.models_file import ModelEntry
    from ..engine.async_base import AsyncEngine
    from ..protocol.batch_file import BatchOutput

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
# Of the engine processes that take the place of the engine in this process.
PROCESSES = (ServeOptions, ["replicas", "ray", "router", "max_restarts", "step_timeout"])
ADAPTERS = (ServeOptions, ["lora_modules"])
_DEFAULTS = {"replicas": "none: the engine runs in the command's own process"}


@with_options(common.ENGINE, PARSERS, PROCESSES, ADAPTERS, defaults=_DEFAULTS)
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
    from ..protocol.batch_file import BatchOutput, count_lines, is_done

    engine_options = common.driver_options(model, options)
    processes = _processes(options)
    entry = common.named(model)
    template = common.template_text(entry.template if chat_template is None else chat_template)
    parsers = common.given(options, PARSERS[1])
    modules = ServeOptions(**common.given(options, ADAPTERS[1])).lora_modules
    if modules and not engine_options.get("enable_lora"):
        raise ConfigError("lora_modules needs enable_lora: give --enable-lora, too")
    total = count_lines(input_file)
    # Not served_model_name: it decides which lines are refused, and --retry-failed answers these.
    run_options = RunOptions(
        output_file,
        engine_options,
        {**entry.sampling, "chat_template": template, "lora_modules": [*modules] or None, **parsers},
        input_file,
    )
    with BatchOutput(output_file, input_file, run_options, retry_failed=retry_failed) as output:
        if not output.has_known_options:
            common.complain(common.UNKNOWN_OPTIONS.format(output_file))
        if is_done(input_file, output.done):
            common.complain(f"nothing to do: all {total:,} lines have results")
        else:
            name = served_model_name or model or engine_options["model"]
            adapters = lora_modules_of(modules)
            if name in (each.lora_name for each in adapters):
                raise ConfigError(f"lora_modules has an adapter of the model's own name {name!r}")
            job = _Job(input_file, output, name, total, template, parsers, entry, adapters)
            asyncio.run(_answer(job, engine_options, processes))
        num_failed = output.num_failed
    if num_failed:
        common.complain(
            f"{num_failed} of {total} lines failed; the error in their results says why, --retry-failed runs "
            "them again"
        )
    return common.EXIT_FAILED if num_failed else 0


class _Job(NamedTuple):
    """What a run is to answer.

    model: the model's name in bodies.
    total: the number of lines, those with results included.
    entry: the model as models.toml has it.
    adapters: the LoRA adapters that bodies may name as their model.
    """

    source: Path
    output: BatchOutput
    model: str
    total: int
    template: str | None
    parsers: Mapping[str, Any]
    entry: ModelEntry
    adapters: Sequence[LoRARequest] = ()


async def _answer(job: _Job, options: Mapping[str, Any], processes: Mapping[str, Any]) -> None:
    """Answer the lines that have no result yet, with a progress bar."""
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm

    from ..chat.chat_format import ChatFormat
    from ..protocol.batch_file import BATCH_LIMITS, read_lines
    from .batch_run import BatchRun

    num_done = len(job.output.done)
    async with _started(options, processes) as engine:
        chat_format = ChatFormat.of_model(engine.text, chat_template=job.template, **job.parsers)
        engine.text.set_defaults(job.entry.sampling)
        for adapter in job.adapters:
            await engine.add_lora(adapter)
        limits = replace(
            BATCH_LIMITS, chat_template=job.template, chat_format=chat_format, system=job.entry.system
        )
        bar = tqdm(total=job.total, initial=num_done, desc="Batch", unit="line")
        # Lines about processes that end have their own lines above the bar.
        with logging_redirect_tqdm(), bar:
            num_engines = processes.get("replicas", 1)
            run = BatchRun(
                engine, job.output, job.model, bar.update, num_engines=num_engines, adapters=job.adapters
            )
            await run.answer(read_lines(job.source, job.output.done, limits))
    if run.ignored:
        counts = ", ".join(f"{name} ({count:,} lines)" for name, count in run.ignored.most_common())
        common.complain(f"these fields of bodies had no effect: {counts}")


def _processes(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of engine processes; none without replicas. Raises ConfigError."""
    given = common.given(options, PROCESSES[1])
    if given and "replicas" not in given:
        raise ConfigError(f"{', '.join(given)} goes with replicas, the number of engine processes; give both")
    if given:
        common.require_server("paged run-batch --replicas")
        given["router"] = ServeOptions(**given).router
    return given


@asynccontextmanager
async def _started(
    options: Mapping[str, Any], processes: Mapping[str, Any]
) -> AsyncIterator[AsyncEngine[Any]]:
    """Start the engine, here or in processes of its own, and describe it on stderr."""
    engine: AsyncEngine[Any]
    if processes:
        from ..server.engine_client import EngineClient

        given = dict(processes)
        launcher = common.launcher_of(given.pop("ray", None), options, given["replicas"])
        engine = EngineClient(**options, **given, launcher=launcher)
        print(engine.describe(), file=sys.stderr)
    else:
        from ..engine.async_engine import AsyncLLMEngine

        engine = AsyncLLMEngine.from_engine(common.start(options))
    async with engine:
        yield engine
