"""`paged plan`: what an engine takes of a device and how fast it should be, before a weight is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import EngineConfig
from ..simulate.cost import DATA_SHEETS
from ..simulate.report import table
from . import common
from .headings import MODEL
from .options import with_options

if TYPE_CHECKING:
    from ..simulate.plan import Plan

# The fields of EngineConfig that a plan depends on.
PLANNED = [
    *("revision", "dtype", "quantization", "kv_cache_dtype", "attention_backend", "num_threads"),
    *("block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_blocks"),
    *("gpu_memory_utilization", "cpu_memory_utilization", "long_prefill_token_threshold", "deterministic"),
]
DEVICE_HELP = f"""auto, cpu, cuda or cuda:N of this machine, which is measured for about a second, or the data
sheet of {', '.join(DATA_SHEETS)}. [default: auto]"""
JSON_HELP = "Print JSON, in bytes and seconds. [default: off]"


@with_options((EngineConfig, PLANNED))
def plan(
    model: common.ModelArgument = None,
    model_option: common.ModelOption = None,
    device: Annotated[str, typer.Option(help=DEVICE_HELP, show_default=False, rich_help_panel=MODEL)] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
    **options: Any,
) -> int:
    """Predict memory and speed of an engine from a model's config and headers. Exit with 1 if it cannot fit."""
    given = common.engine_options(common.one_model(model, model_option), options, PLANNED)
    config = EngineConfig(**given, device=device)

    from ..simulate.plan import make_plan

    made = make_plan(config)
    print(json.dumps(made.to_json()) if as_json else "\n".join(_report(made)))
    return 0 if made.footprint.fits else common.EXIT_FAILED


def _report(made: Plan) -> Iterator[str]:
    """Yield the lines of a plan."""
    figures = made.to_json()
    footprint = made.footprint
    sizes = footprint.sizes
    files = figures["file_bytes"] / 1e9
    yield f"{made.model.architecture} in {made.format}, {files:,.3g} GB of weights in files"
    yield f"{made.place.name}: {_size(figures['free_bytes'])} of memory free; activations in {sizes.dtype}"
    yield ""
    rows = [["memory", "MiB", ""]]
    rows += [[f"weights: {part}", _mib(n), ""] for part, n in figures["weights_bytes"].items()]
    rows.append(["activations", _mib(figures["activations_bytes"]), f"of a step of {sizes.max_num_batched_tokens:,} tokens"])
    if figures["states_bytes"]:
        rows.append(["states", _mib(figures["states_bytes"]), f"of {sizes.config.max_num_seqs:,} sequences"])
    rows.append(["rope tables", _mib(figures["rope_bytes"]), ""])
    rows.append(
        [
            "KV cache",
            _mib(figures["kv_bytes"]),
            f"{footprint.num_blocks:,} blocks of {sizes.block_size} tokens in {sizes.kv_dtype}, "
            f"{sizes.kv_bytes_per_token / 1024:,.4g} KiB per token",
        ]
    )
    rows.append(["together", _mib(figures["total_bytes"]), ""])
    yield from table(rows)
    yield ""
    yield from table(
        [["tokens of a sequence", "fit at once"]]
        + [[f"{length:,}", f"{count:,}"] for length, count in made.sequences.items()]
    )
    yield ""
    kind = "measured" if figures["is_measured"] else "by its data sheet"
    yield (
        f"predicted at {made.usual_length:,} tokens, from {figures['bytes_per_s'] / 1e9:,.4g} GB/s and "
        f"{figures['flops_per_s'] / 1e12:,.3g} TFLOP/s ({kind})"
    )
    yield from table(
        [["", "tokens/s"]]
        + [
            [f"decode of {count:,} sequence{'s' * (count > 1)}", f"{speed:,.4g}"]
            for count, speed in made.decode_speeds.items()
        ]
        + [["prompt", f"{made.prompt_speed:,.4g}"]]
    )
    if not footprint.fits:
        yield ""
        most = f"the longest has {footprint.longest:,}" if footprint.longest else "none fits"
        yield f"does not fit: a request of {sizes.max_model_len:,} tokens; {most}"
        yield f"would fit: {', or '.join(made.would_fit) or 'with no option; take a smaller model or another device'}"


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f}"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"
