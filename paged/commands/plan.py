"""`paged plan`: what an engine takes of a device and how fast it should be, before a weight is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.errors import ConfigError
from ..options.config import EngineConfig
from ..runner.sizes import GIB
from ..simulate.cost import DATA_SHEETS
from ..simulate.report import table
from . import common
from .headings import MODEL
from .options import with_options

if TYPE_CHECKING:
    from ..checkpoints.library.models_file import ModelEntry
    from ..simulate.plan import EnginePlan

# The fields of EngineConfig that a plan depends on.
PLANNED = [
    *("revision", "dtype", "quantization", "kv_cache_dtype", "attention_backend", "num_threads"),
    *("block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_blocks"),
    *("gpu_memory_utilization", "cpu_memory_utilization", "long_prefill_token_threshold", "deterministic"),
    *("speculative_config", "weights_cache"),
    *("enable_lora", "max_loras", "max_lora_rank", "lora_target_modules"),
]
_DEVICE = f"""auto, cpu, cuda or cuda:N of this machine, which is measured for a second, or the data
sheet of {", ".join(DATA_SHEETS)}. [default: auto]"""
_JSON_HELP = "Print JSON, in bytes and seconds. [default: off]"


@with_options((EngineConfig, PLANNED))
def plan(
    model: common.ModelArgument = None,
    model_option: common.ModelOption = None,
    device: Annotated[
        str | None, typer.Option(help=_DEVICE, show_default=False, rich_help_panel=MODEL)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help=_JSON_HELP)] = False,
    **options: Any,
) -> int:
    """Predict memory and speed of an engine from a model's config and the headers of its weights."""
    name = common.one_model(model, model_option)
    given = common.engine_options(name, {**options, "device": device}, [*PLANNED, "device"])
    _check_ranks(common.named(name))

    from ..simulate.plan import make_plan

    made = make_plan(EngineConfig(**given))
    print(json.dumps(made.to_json()) if as_json else report(made))
    return 0 if made.footprint.fits else common.EXIT_FAILED


def _check_ranks(entry: ModelEntry) -> None:
    """Raise ConfigError for a model that models.toml divides among ranks."""
    for option in ("tensor_parallel_size", "pipeline_parallel_size"):
        if entry.engine.get(option, 1) != 1:
            raise ConfigError(
                f"{option} is {entry.engine[option]} in models.toml, and a plan is of one process: plan "
                f"{entry.checkpoint}, or ask `paged simulate`, which takes ranks"
            )


def report(made: EnginePlan) -> str:
    """Return a plan as text."""
    figures = made.to_json()
    sizes = made.footprint.sizes
    place = f"{figures['device']} with {figures['free_bytes'] / GIB:,.1f} GiB of memory free"
    origin = "as measured" if figures["is_measured"] else "by the data sheet, not measured"
    rates = f"{figures['bytes_per_s'] / 1e9:,.4g} GB/s and {figures['flops_per_s'] / 1e12:,.3g} TFLOP/s"
    fits = [[f"{length:,} tokens", f"{count:,}"] for length, count in made.sequences.items()]
    lengths = made.short_length, made.usual_length
    decodes = zip(*(made.decode_speeds(length).items() for length in lengths), strict=True)
    speeds = [
        *([f"decode of {short[0]:,}", f"{short[1]:,.1f}", f"{usual[1]:,.1f}"] for short, usual in decodes),
        ["prompt", *(f"{made.prompt_speed(length):,.1f}" for length in lengths)],
    ]
    return "\n".join(
        [
            f"{made.model.architecture} in {made.format} ({figures['file_bytes'] / 1e9:,.3g} GB of files), "
            f"activations in {sizes.dtype}, on {place}",
            "",
            *table([["memory", "MiB"], *_memory(made)]),
            *_start(made),
            "",
            *table([["sequences of", "fit at once"], *fits]),
            "",
            *table([["predicted tokens/s", *(f"at {length:,} tokens" for length in lengths)], *speeds]),
            f"from {rates} {origin}",
            *_shortage(made),
        ]
    )


def _start(made: EnginePlan) -> Iterator[str]:
    """Yield what a start does with the weights, with and without cached packed weights."""
    start = made.start
    if start is None:
        return
    read = f"{made.footprint.model.in_files.num_bytes.total() / 1e9:,.3g} GB"
    size = f"{made.footprint.model.num_bytes / 2**20:,.1f} MiB"
    took = "" if start.packing_s is None else f", which took {start.packing_s:,.1f} s"
    yield f"a start packs {read} of files into {size} of its own memory{took};"
    kept = "they are kept" if start.is_kept else "none are kept yet, see paged warmup"
    yield f"with packed weights it maps {size}, which processes share: {kept}"


def _memory(made: EnginePlan) -> Iterator[list[str]]:
    """Yield what takes memory, and how much."""
    footprint = made.footprint
    sizes = footprint.sizes
    per_token = f"{sizes.kv_bytes_per_token / 1024:,.4g} KiB per token in {sizes.kv_dtype}"
    snapshots = f" and {sizes.num_snapshots:,} snapshots" if sizes.num_snapshots else ""
    parts = {
        **{f"weights: {part}": size for part, size in footprint.model.by_part.items()},
        "weights of the draft model": 0 if footprint.draft is None else footprint.draft.num_bytes,
        f"activations of {sizes.max_num_batched_tokens:,} tokens": footprint.activation_bytes,
        "CUDA graphs": footprint.graph_bytes,
        f"states of {sizes.config.num_seats:,} sequences{snapshots}": footprint.state_bytes,
        "rope tables": footprint.rope_bytes,
        f"KV cache: {footprint.num_blocks:,} blocks of {sizes.block_size}, {per_token}": footprint.kv_bytes,
        "all together": footprint.num_bytes,
    }
    for name, size in parts.items():
        if size:  # a CPU keeps no states but those of layers
            yield [name, f"{size / 2**20:,.1f}"]


def _shortage(made: EnginePlan) -> Iterator[str]:
    footprint = made.footprint
    if not footprint.fits:
        longest = f"the longest has {footprint.longest:,}" if footprint.longest else "none fits"
        yield f"does not fit: a sequence of {footprint.sizes.max_model_len:,} tokens; {longest}"
        yield f"would fit: {' or '.join(made.would_fit) or 'a smaller model, or this one on another device'}"
