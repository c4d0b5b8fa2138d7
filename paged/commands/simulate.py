"""`paged simulate`: predicted figures of a fleet, or a table of them over the values of an option."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ..base.errors import ConfigError
from ..options.config import EngineConfig
from ..protocol.jobs import check_writable
from ..simulate.fleet import Fleet, FleetConfig
from ..simulate.report import report, sweep_report
from ..simulate.timeline import Timeline, check_matplotlib
from ..simulate.workload import Workload
from . import common
from .headings import MODEL, SCHEDULING
from .options import option, option_type, value_of_flag, with_options

MAPPINGS = ("tenants", "tenant_weights")
# The fields of EngineConfig that a simulation does not depend on.
NOT_SIMULATED = {
    "tokenizer",
    "tokenizer_revision",
    "generation_config",
    "dtype",
    "quantization",
    "device",
    "cpu_memory_utilization",
    "attention_backend",
    "num_threads",
    "rank_timeout_s",
    "deterministic",
    "enforce_eager",
    "cudagraph_capture_sizes",
    "max_cudagraph_capture_size",
    "speculative_config",
    "enable_lora",
    "max_loras",
    "max_lora_rank",
    "max_cpu_loras",
    "lora_target_modules",
    "seed",
    "skip_tokenizer_init",
}
# Options by the class that has them. `seed` is the workload's.
_NAMES = {
    FleetConfig: [field.name for field in fields(FleetConfig)],
    Workload: [field.name for field in fields(Workload)],
    EngineConfig: [field.name for field in fields(EngineConfig) if field.name not in NOT_SIMULATED],
}
_OWN = ("model", "scheduling_policy", "tenant_weights")  # declared below, with a flag or help of their own
_NOT_SWEPT = (*MAPPINGS, "pipeline_layers")  # of several values each
_SWEPT = {name: owner for owner, names in _NAMES.items() for name in names if name not in _NOT_SWEPT}

MODEL_HELP = """A directory with a config.json, a GGUF file, a Hugging Face hub id, of which config.json
alone is fetched, or demo for the checkpoint that ships with `paged`. [default: demo]"""
WEIGHTS_HELP = (
    """For the policy fair, the relative shares of tenants, such as a=1,b=2. [default: 1 for each]"""
)
SWEEP_HELP = """Simulate once for each value of an option and print a table: num_blocks=1000,2000,4000, or
input_len=lognormal:500,0.8;fixed:500 if values contain commas. [default: none]"""
PLOT_HELP = "Write a PNG: requests, tokens a second and blocks used over time. [default: none]"
JSON_HELP = "Print JSON, times in seconds. [default: off]"


@with_options(
    *((owner, [name for name in names if name not in _OWN]) for owner, names in _NAMES.items()),
    defaults={"async_scheduling": "off"},
)
def simulate(
    model: common.ModelArgument = None,
    model_option: Annotated[
        str | None, typer.Option("--model", help=MODEL_HELP, rich_help_panel=MODEL)
    ] = None,
    scheduling_policy: Annotated[
        str | None, option(EngineConfig, "scheduling_policy", "--scheduling-policy", "--policy")
    ] = None,
    tenant_weights: Annotated[
        list[str] | None, typer.Option(help=WEIGHTS_HELP, rich_help_panel=SCHEDULING)
    ] = None,
    sweep: Annotated[str | None, typer.Option(help=SWEEP_HELP)] = None,
    plot: Annotated[Path | None, typer.Option(help=PLOT_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
    **options: Any,
) -> int:
    """Predict latency, throughput and cache use of a fleet: the real scheduler runs on a virtual clock."""
    model = common.one_model(model, model_option)
    weights = value_of_flag("tenant_weights", list[str], tenant_weights)
    options |= {"scheduling_policy": scheduling_policy, "tenant_weights": weights}
    options = {name: value for name, value in options.items() if value not in (None, [], ())}
    if model is not None:
        entry = common.named(model)
        known = {name: value for name, value in entry.engine.items() if name in _NAMES[EngineConfig]}
        options = {**known, **options, "model": entry.checkpoint}
    if sweep is not None:
        if plot is not None:
            raise ConfigError("--plot shows one simulation; leave it out of a --sweep")
        name, values = _read_sweep(sweep)
        if name in options:
            raise ConfigError(
                f"--sweep goes over {name}, which is also given as {options[name]!r}; leave one out"
            )
        _sweep(options, name, values, as_json=as_json)
        return 0
    if plot is not None:
        check_matplotlib()
        check_writable(plot, *(Path(options[name]) for name in ("trace", "coefficients") if name in options))
    summary = _run(options, plot)
    print(json.dumps(summary) if as_json else report(summary))
    return 0


def _sweep(options: dict[str, Any], name: str, values: list[Any], *, as_json: bool) -> None:
    # All values are validated before the first simulation.
    for value in values:
        _configs({**options, name: value})
    summaries = [(value, _run({**options, name: value})) for value in values]
    if as_json:
        print(json.dumps({"sweep": name, "rows": [{name: value, **s} for value, s in summaries]}))
    else:
        print(sweep_report(name, summaries))


def _read_sweep(text: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    name = name.removeprefix("--").replace("-", "_")
    name = "scheduling_policy" if name == "policy" else name
    if name not in _SWEPT:
        raise ConfigError(f"--sweep knows no option {name!r}; it takes {', '.join(_SWEPT)}")
    parts = values.split(";" if ";" in values else ",")
    if not (equals and all(parts)):
        raise ConfigError(f"--sweep must be an option and its values such as rate=1,2,4; got {text!r}")
    kind = option_type(_SWEPT[name], name)
    return name, [_parse(part, kind) for part in parts]


def _parse(text: str, kind: Any) -> bool | int | float | str:
    """Return the value of an option. Other text is returned unchanged, for the configs to refuse."""
    if kind is bool:
        return {"true": True, "false": False}.get(text, text)
    if kind in (int, float):
        with suppress(ValueError):
            value: int | float = kind(text)
            return value
    return text


def _configs(options: Mapping[str, Any]) -> tuple[FleetConfig, EngineConfig, Workload]:
    def of(owner: type[Any]) -> dict[str, Any]:
        return {field.name: options[field.name] for field in fields(owner) if field.name in options}

    engine = {"model": "demo", **of(EngineConfig)}
    engine.pop("seed", None)
    return FleetConfig(**of(FleetConfig)), EngineConfig(**engine), Workload(**of(Workload))


def _run(options: Mapping[str, Any], plot: Path | None = None) -> dict[str, Any]:
    """Simulate and return the summary. Show progress on stderr."""
    from tqdm import tqdm

    fleet_config, engine, workload = _configs(options)
    if fleet_config.slice is not None:
        workload = workload.sliced(fleet_config.slice / fleet_config.replicas)
    num_requests, arrivals = workload.open()
    started = time.perf_counter()
    timeline = None if plot is None else Timeline()
    fleet = Fleet(fleet_config, engine, timeline, workload.seed)
    with tqdm(total=num_requests, desc="Simulating", unit="request", disable=None) as bar:
        statistics = fleet.run(arrivals, workload.think_time, bar.update)
    summary = {**statistics.summary(), "wall_s": time.perf_counter() - started}
    if plot is not None and timeline is not None:
        where = f"{fleet_config.num_simulated:,} x {fleet_config.gpu}"
        timeline.plot(plot, fleet.num_blocks * fleet_config.num_simulated, f"{engine.model} on {where}")
    return summary
