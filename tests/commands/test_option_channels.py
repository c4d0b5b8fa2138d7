"""Every option comes through every channel: flags, the environment, files, models.toml and EngineArgs.

The options of an engine and of a server are given all at once, each with another value than its default. An
option that is new here needs a value in VALUES only if its type alone does not say one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any

import pytest
import yaml

from paged import EngineArgs, EngineConfig, FlexibleArgumentParser
from paged.commands import cli, common, serve, serve_models
from paged.commands import simulate as simulation
from paged.commands.options import NEGATED, option_type
from paged.server.options import ServeOptions
from paged.simulate import plan as planning
from tests.support.command_line import running, write

NONE = None  # no other value goes with the rest
VALUES = {
    "model": NONE,
    "dtype": "bfloat16",
    "quantization": "int8",
    "kv_cache_dtype": "int8",
    "device": "cuda",
    "block_size": 32,
    "scheduling_policy": "fair",
    "tenant_weights": {"a": 1.5, "b": 2.0},
    "watermark": 0.25,
    "preemption_mode": "swap",
    "attention_backend": "torch",
    "pipeline_layers": [3, 4],
    "pipeline_parallel_size": 2,
    "rank_timeout_s": 1.5,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
    "cudagraph_capture_sizes": [1, 3],
    "max_cudagraph_capture_size": 3,
    "async_scheduling": False,
    "limit_mm_per_prompt": {"image": 2},
    "mm_processor_kwargs": {"size": {"longest_edge": 9}},
    "allowed_media_domains": ["a.example", "b.example"],
    "ssl_keyfile": NONE,
    "ssl_certfile": NONE,
    "api_keys": NONE,
    "default_reservation": NONE,
    "root_path": "/llm",
    "lora_modules": ["a=b", '{"name": "c", "path": "d"}'],
    "allowed_hosts": ["llm.example", "*"],
    "default_chat_template_kwargs": {"a": {"b": 1}},
    "tool_call_parser": "hermes",
    "reasoning_parser": "none",
    "router": "round-robin",
    "log_format": "json",
    "metrics_prefix": "vllm",
    "max_request_bytes": 2048,
    "models": NONE,
    "memory": NONE,
    "keep_alive": NONE,
    "preload": NONE,
    "max_load_wait_s": NONE,
    "allow_model_changes": NONE,
    "prefix_dir": NONE,
    "prefix_bytes": NONE,
    "api": ["ollama"],
    "step_timeout": 3.0,
}
KEYS = ("speculative_config", "limit_mm_per_prompt", "mm_processor_kwargs", "default_chat_template_kwargs")
SERVED = ["serve", "--model", "demo"]


class Started(BaseException):
    """What a command would start an engine with, or a server."""


def other_values(owner: type[Any]) -> dict[str, Any]:
    values = {}
    for field in fields(owner):
        kind = option_type(owner, field.name)
        of_type = {
            bool: not field.default,
            int: 9,
            float: 0.75,
            str: f"some-{field.name}",
            list[str]: [f"{field.name}-a", f"{field.name}-b"],
        }
        value = VALUES[field.name] if field.name in VALUES else of_type[kind]
        assert value != (field.default if field.default is not MISSING else value) or value is NONE
        if value is not NONE:
            values[field.name] = value
    return values


ENGINE, SERVER = other_values(EngineConfig), other_values(ServeOptions)
BOTH = ENGINE | SERVER


def text_of(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | bool) else str(value)


def flags_of(name: str, value: Any, form: str = "spaces") -> Iterator[str]:
    flag = f"--{name if form == 'underscores' else name.replace('_', '-')}"
    if isinstance(value, bool):
        yield flag if value else f"--{NEGATED.get(name, f'no-{flag[2:]}')}"
    elif form == "keys" and name in KEYS:
        for key, part in value.items():
            yield from (f"{flag}.{key}", text_of(part))
    elif form == "equals":
        yield from (f"{flag}={text_of(each)}" for each in (value if isinstance(value, list) else [value]))
    else:
        yield flag
        yield from map(text_of, value if isinstance(value, list) else [value])


def same(config: Any, wanted: dict[str, Any], names: Any) -> None:
    """Compare values, of which objects may still be JSON."""
    found = {name: getattr(config, name) for name in names}
    for name, value in found.items():
        if is_dataclass(value):
            found[name] = {key: part for key, part in asdict(value).items() if key in wanted[name]}
        elif isinstance(value, str) and isinstance(wanted[name], dict):
            found[name] = json.loads(value)
        elif isinstance(value, tuple):
            found[name] = [*value]
    assert found == {name: wanted[name] for name in names}


@pytest.fixture
def start(monkeypatch, capsys):
    """Run a command until it would start an engine; return the engine's config and the server's options."""
    for variable in os.environ:
        if variable.startswith("PAGED_"):
            monkeypatch.delenv(variable)

    def stop(*values: Any) -> None:
        raise Started(*values)

    def stop_serve(_entry, engine, options, _listeners) -> None:
        stop(EngineConfig(**engine), options)

    monkeypatch.setattr(common, "start", lambda options: stop(EngineConfig(**options)))
    monkeypatch.setattr(planning, "make_plan", stop)
    monkeypatch.setattr(simulation, "_run", lambda options, *_: stop(simulation._configs(options)[1]))
    monkeypatch.setattr(serve, "run", lambda _, begin: begin(None))
    monkeypatch.setattr(serve, "_serve", stop_serve)

    with running(monkeypatch, capsys) as run:

        def start(*argv: str) -> tuple[Any, ...]:
            try:
                pytest.fail(f"no engine: {run(*argv)}")
            except Started as started:
                return started.args

        yield start


@pytest.mark.parametrize(
    "channel", ["spaces", "equals", "underscores", "keys", "environment", "file", "texts"]
)
def test_every_option_of_a_server(channel, start, tmp_path, monkeypatch):
    argv = []
    if channel == "environment":
        for name, value in BOTH.items():
            text = json.dumps(value) if name == "lora_modules" else None
            text = text or (",".join(map(str, value)) if isinstance(value, list) else text_of(value))
            monkeypatch.setenv(f"PAGED_{name.upper()}", text)
    elif channel in ("file", "texts"):
        quoted = {name: v if isinstance(v, list) else text_of(v) for name, v in BOTH.items()}
        given = BOTH if channel == "file" else quoted
        file = write(tmp_path / "a.yaml", yaml.safe_dump({k.replace("_", "-"): v for k, v in given.items()}))
        argv = ["--config", str(file)]
    else:
        argv = [text for name, value in BOTH.items() for text in flags_of(name, value, channel)]
    engine, options = start(*SERVED, *argv)
    same(engine, ENGINE, ENGINE)
    same(options, SERVER, SERVER)


@pytest.mark.parametrize(
    "command",
    [
        "generate x",
        "chat",
        "run-batch IN OUT",
        "bench throughput",
        "bench latency",
        "warmup",
        "plan",
        "simulate",
    ],
)
def test_every_option_of_an_engine_that_a_command_takes(command, start, tmp_path, monkeypatch):
    write(
        source := tmp_path / "in", {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {}}
    )
    argv = command.replace("IN", str(source)).replace("OUT", str(tmp_path / "out")).split()
    taken = {
        name: value
        for name, value in ENGINE.items()
        if name in options_of(argv) and (command, name) != ("simulate", "seed")
    }
    (config,) = start(*argv, "--model", "demo", *(t for n, v in taken.items() for t in flags_of(n, v)))
    same(config, taken, taken)
    # A name of models.toml has the same options.
    lines = [f"{name} = {toml(value)}" for name, value in taken.items()]
    monkeypatch.setenv(
        "PAGED_MODELS", str(write(tmp_path / "m", "[m]", 'checkpoint = "demo"', "[m.engine]", *lines))
    )
    (config,) = start(*argv, "--model", "m")
    same(config, taken, taken)


def options_of(argv: list[str]) -> set[str]:
    """Return the names of the options of a command."""
    command: Any = cli.Commands(name="paged")
    for name in argv[: 2 if argv[0] == "bench" else 1]:
        command = command.get_command(None, name)
    return {each.name for each in command.params}


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {toml(part)}' for key, part in value.items())}}}"
    return json.dumps(value)


# Options of a server that go with several models alone.
OF_MODELS = {
    "memory": "1GiB",
    "keep_alive": "10m",
    "preload": ["m"],
    "max_load_wait_s": 0.5,
    "allow_model_changes": True,
    "prefix_dir": "prefixes",
    "prefix_bytes": "2GiB",
}


@pytest.mark.parametrize("channel", ["flags", "environment", "file"])
def test_every_option_of_a_server_of_several_models(channel, start, tmp_path, monkeypatch):
    assert SERVER.keys() | OF_MODELS.keys() | {n for n, v in VALUES.items() if v is NONE} >= {
        field.name for field in fields(ServeOptions)
    }
    lines = ("[m]", 'checkpoint = "demo"', "[m.engine]", "max_waiting = 7", "[k]", 'checkpoint = "demo"')
    file = write(tmp_path / "m", *lines)
    monkeypatch.chdir(tmp_path)

    def stop(catalog, base, options, *_) -> None:
        raise Started(options, [serve_models.engine_options(each, base) for each in catalog.entries()])

    monkeypatch.setattr(serve_models, "run", lambda _, begin: begin(None))
    monkeypatch.setattr(serve_models, "_serve", stop)
    argv = ["serve", "m", "k"]
    if channel == "flags":
        monkeypatch.setenv("PAGED_MODELS", str(file))
        argv += [text for name, value in OF_MODELS.items() for text in flags_of(name, value)]
    elif channel == "environment":
        monkeypatch.setenv("PAGED_MODELS", str(file))
        for name, value in OF_MODELS.items():
            monkeypatch.setenv(
                f"PAGED_{name.upper()}", ",".join(value) if isinstance(value, list) else text_of(value)
            )
    else:
        argv += [
            "--config",
            str(write(tmp_path / "a.yaml", yaml.safe_dump({**OF_MODELS, "models": str(file)}))),
        ]
    options, (of_m, of_k) = start(*argv)
    same(options, OF_MODELS, OF_MODELS)
    assert (of_m["max_waiting"], of_k["max_waiting"]) == (7, serve_models.MAX_WAITING)


def test_every_option_of_engine_args_and_of_models_toml(start, tmp_path, monkeypatch):
    for form in ("spaces", "underscores", "keys"):
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        argv = [text for name, value in ENGINE.items() for text in flags_of(name, value, form)]
        same(EngineArgs.from_cli_args(parser.parse_args(["--model", "demo", *argv])), ENGINE, ENGINE)
    lines = [f"{name} = {toml(value)}" for name, value in ENGINE.items()]
    monkeypatch.setenv(
        "PAGED_MODELS", str(write(tmp_path / "m", "[m]", 'checkpoint = "demo"', "[m.engine]", *lines))
    )
    same(start("serve", "m")[0], ENGINE, ENGINE)


def test_a_flag_turns_off_what_a_file_turns_on(start, tmp_path):
    switches = {name: value for name, value in BOTH.items() if value is True or value is False}
    switches["async_scheduling"] = True
    more = {"admin_key": "a", "enable_lora": True}
    file = write(tmp_path / "a.yaml", yaml.safe_dump(switches | more))
    off = {name: not value for name, value in switches.items()}
    engine, options = start(
        *SERVED, "--config", str(file), *(t for n, v in off.items() for t in flags_of(n, v))
    )
    same(engine, off, ENGINE.keys() & off.keys())
    same(options, off, SERVER.keys() & off.keys())


def test_other_forms_of_values(start, tmp_path):
    """vLLM's numbers of tokens; objects of adapters, and what YAML merges, in a file."""
    for text, number in (("32k", 32_000), ("0.5K", 512), ("1M", 2**20), ("7", 7)):
        engine, _ = start(*SERVED, "--max-model-len", text, f"--max_num_batched_tokens={text}")
        assert (engine.max_model_len, engine.max_num_batched_tokens) == (number, number)
    text = "<<: {enable-lora: true, seed: 3}\nlora-modules: [{name: a, path: b}, c=d]\nseed: 4"
    engine, options = start(*SERVED, "--config", str(write(tmp_path / "a.yaml", text)))
    assert (engine.seed, options.lora_modules) == (4, ('{"name": "a", "path": "b"}', "c=d"))


WRONG = {
    "max_model_len": "1.0001k",
    "max_num_seqs": "-1",
    "port": "x",
    "dtype": "float33",
    "enforce_eager": "maybe",
    "mm_processor_kwargs": "[1]",
    "speculative_config": '{"method": "x"}',
    "pipeline_layers": "4,x",
    "default_chat_template_kwargs": "{",
}


@pytest.mark.usefixtures("start")  # nothing is served if a value is taken
def test_an_error_names_an_option_as_it_is_written(run, tmp_path, monkeypatch):
    for name, text in WRONG.items():
        flag = name.replace("_", "-")
        if name != "enforce_eager":  # whose flag takes no value
            assert f"--{flag}" in run.refused(*SERVED, f"--{flag}={text}").partition(" must be ")[0]
        file = write(tmp_path / "a.yaml", "seed: 1", f"{flag}: '{text}'")
        said = run.refused(*SERVED, "--config", file)
        assert said.startswith(f"paged: {file}, line 2: {flag}")
        monkeypatch.setenv(f"PAGED_{name.upper()}", text)
        assert run.refused(*SERVED).startswith(f"paged: PAGED_{name.upper()}")
        monkeypatch.delenv(f"PAGED_{name.upper()}")
    said = run.refused(*SERVED, "--swap-space", "2", "--preemption-mode", "recompute")
    assert said.startswith("paged: --swap-space 2 has no effect with --preemption-mode 'recompute'")
    file = write(tmp_path / "a.yaml", "seed: 1", "sed: 2")
    assert "line 2 got an unknown argument 'sed'; did you mean 'seed'" in run.refused(
        *SERVED, "--config", file
    )
    for argv, message in (
        (
            ["--speculative-config.method", "x", "--speculative-config", "{}"],
            "given as a whole and by its keys",
        ),
        (
            ["--mm-processor-kwargs.a", "1", "--mm-processor-kwargs.a.b", "1"],
            "a part of a value that is given",
        ),
        (["--mm-processor-kwargs.a"], "--mm-processor-kwargs.a needs a value"),
    ):
        assert message in run.refused(*SERVED, *argv)
