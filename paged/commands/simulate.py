"""`paged simulate`: the figures of a fleet that need not exist, or a table over a parameter."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from ..config import EngineConfig
from ..errors import ConfigError
from ..protocol.jobs import check_writable
from ..simulate.fleet import Fleet, FleetConfig
from ..simulate.report import report, sweep_report
from ..simulate.timeline import Timeline, check_matplotlib
from ..simulate.workload import Workload, read_shares
from .options import option

MAPPINGS = ("tenants", "tenant_weights")


_engine, _fleet, _workload = (partial(option, owner) for owner in (EngineConfig, FleetConfig, Workload))

MODEL_HELP = "A directory with a config.json; without it, the checkpoint that ships with `paged`, 'demo'."
WEIGHTS_HELP = "For the policy fair, what tenants are entitled to, such as a=1,b=2; 1 where nothing is said."
SWEEP_HELP = """Simulate once for each value of an option, and print a table: num_blocks=1000,2000,4000, or
input_len=lognormal:500,0.8;fixed:500 where values have commas of their own."""
PLOT_HELP = "Write a PNG: requests, tokens a second and blocks used over time."


def simulate(
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    gpu: Annotated[str | None, _fleet("gpu")] = None,
    replicas: Annotated[int | None, _fleet("replicas")] = None,
    router: Annotated[str | None, _fleet("router")] = None,
    requests: Annotated[int | None, _workload("requests")] = None,
    rate: Annotated[float | None, _workload("rate")] = None,
    arrivals: Annotated[str | None, _workload("arrivals")] = None,
    burstiness: Annotated[float | None, _workload("burstiness")] = None,
    input_len: Annotated[str | None, _workload("input_len")] = None,
    output_len: Annotated[str | None, _workload("output_len")] = None,
    prefixes: Annotated[int | None, _workload("prefixes")] = None,
    prefix_len: Annotated[int | None, _workload("prefix_len")] = None,
    turns: Annotated[int | None, _workload("turns")] = None,
    think_time: Annotated[float | None, _workload("think_time")] = None,
    tenants: Annotated[list[str] | None, _workload("tenants")] = None,
    trace: Annotated[str | None, _workload("trace")] = None,
    seed: Annotated[int | None, _workload("seed")] = None,
    scheduling_policy: Annotated[
        str | None, _engine("scheduling_policy", "--scheduling-policy", "--policy")
    ] = None,
    tenant_weights: Annotated[list[str] | None, typer.Option(help=WEIGHTS_HELP)] = None,
    num_blocks: Annotated[int | None, _engine("num_blocks")] = None,
    block_size: Annotated[int | None, _engine("block_size")] = None,
    kv_cache_dtype: Annotated[str | None, _engine("kv_cache_dtype")] = None,
    max_model_len: Annotated[int | None, _engine("max_model_len")] = None,
    max_num_seqs: Annotated[int | None, _engine("max_num_seqs")] = None,
    max_num_batched_tokens: Annotated[int | None, _engine("max_num_batched_tokens")] = None,
    gpu_memory_utilization: Annotated[float | None, _engine("gpu_memory_utilization")] = None,
    enable_prefix_caching: Annotated[bool | None, _engine("enable_prefix_caching")] = None,
    long_prefill_token_threshold: Annotated[int | None, _engine("long_prefill_token_threshold")] = None,
    max_num_partial_prefills: Annotated[int | None, _engine("max_num_partial_prefills")] = None,
    max_waiting: Annotated[int | None, _engine("max_waiting")] = None,
    watermark: Annotated[float | None, _engine("watermark")] = None,
    preemption_mode: Annotated[str | None, _engine("preemption_mode")] = None,
    max_preemptions: Annotated[int | None, _engine("max_preemptions")] = None,
    swap_space: Annotated[float | None, _engine("swap_space")] = None,
    coefficients: Annotated[str | None, _fleet("coefficients")] = None,
    flops_efficiency: Annotated[float | None, _fleet("flops_efficiency")] = None,
    bandwidth_efficiency: Annotated[float | None, _fleet("bandwidth_efficiency")] = None,
    step_overhead: Annotated[float | None, _fleet("step_overhead")] = None,
    sweep: Annotated[str | None, typer.Option(help=SWEEP_HELP)] = None,
    plot: Annotated[Path | None, typer.Option(help=PLOT_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, times in seconds.")] = False,
) -> int:
    """Predict latency, throughput and cache use of a fleet: the real scheduler on a virtual clock."""
    given = {name: value for name, value in locals().items() if value not in (None, [], ())}
    options = {name: given[name] for name in (*_NAMES, *MAPPINGS) if name in given}
    for name in MAPPINGS:
        if name in options:
            options[name] = read_shares(name, options[name])
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


# Options by name, but for those of MAPPINGS. `seed` is the workload's.
_NAMES = [
    field.name
    for owner in (FleetConfig, Workload, EngineConfig)
    for field in fields(owner)
    if field.name in simulate.__annotations__ and field.name not in MAPPINGS
]


def _sweep(options: dict[str, Any], name: str, values: list[Any], *, as_json: bool) -> None:
    # All of them are checked before the first is simulated.
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
    if name not in _NAMES:
        raise ConfigError(f"--sweep knows no option {name!r}; it takes {', '.join(_NAMES)}")
    parts = values.split(";" if ";" in values else ",")
    if not (equals and all(parts)):
        raise ConfigError(f"--sweep must be an option and its values such as rate=1,2,4; got {text!r}")
    kinds = get_args(get_type_hints(simulate)[name])
    return name, [_parse(part, kinds) for part in parts]


def _parse(text: str, kinds: tuple[type, ...]) -> bool | int | float | str:
    """A value as its option has it. The configs refuse what is none, by the text that it stays."""
    if bool in kinds:
        return {"true": True, "false": False}.get(text, text)
    for kind in (int, float):
        if kind in kinds:
            with suppress(ValueError):
                return kind(text)
    return text


def _configs(options: Mapping[str, Any]) -> tuple[FleetConfig, EngineConfig, Workload]:
    def of(owner: type[Any]) -> dict[str, Any]:
        return {field.name: options[field.name] for field in fields(owner) if field.name in options}

    engine = {"model": "demo", **of(EngineConfig)}
    engine.pop("seed", None)
    return FleetConfig(**of(FleetConfig)), EngineConfig(**engine), Workload(**of(Workload))


def _run(options: Mapping[str, Any], plot: Path | None = None) -> dict[str, Any]:
    """Simulate, and say how it went. Shows how far it is on stderr."""
    from tqdm import tqdm

    fleet_config, engine, workload = _configs(options)
    num_requests, arrivals = workload.open()
    started = time.perf_counter()
    timeline = None if plot is None else Timeline()
    fleet = Fleet(fleet_config, engine, timeline)
    with tqdm(total=num_requests, desc="Simulating", unit="request", disable=None) as bar:
        statistics = fleet.run(arrivals, workload.think_time, bar.update)
    summary = {**statistics.summary(), "wall_s": time.perf_counter() - started}
    if plot is not None and timeline is not None:
        where = f"{fleet_config.replicas:,} x {fleet_config.gpu}"
        timeline.plot(plot, fleet.num_blocks * fleet_config.replicas, f"{engine.model} on {where}")
    return summary
