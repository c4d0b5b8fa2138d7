"""`paged serve`: an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.errors import ConfigError
from ..options.config import EngineConfig
from ..options.lora_request import lora_modules_of
from ..server.access.keys import keys_of
from ..server.options import MAX_WAITING, ServeOptions
from . import common
from .headings import MODEL, SERVER
from .options import option_type, with_options
from .settings import from_environment, from_file

if TYPE_CHECKING:
    from ..server.engine_client import EngineClient
    from ..server.front_end import FrontEnd
    from ..server.http.listener import Listeners, Server

SERVED_MODEL_HELP = """A local directory, a GGUF file, a Hugging Face hub id, or demo for the checkpoint that
ships with paged. It may also come from the environment or the file, as all options may. [default: none]"""
CONFIG_HELP = """A YAML file of options, such as port: 8000. Flags override PAGED_... in the environment, such
as PAGED_PORT=8000, and these override the file. [default: none]"""
SERVED_ENGINE = (EngineConfig, [*common.ENGINE[1], "skip_tokenizer_init", "max_queued_tokens"])
SERVE = (ServeOptions, [field.name for field in fields(ServeOptions)])


@with_options(SERVE, SERVED_ENGINE, defaults={"max_waiting": f"{MAX_WAITING:,}"})
def serve(
    model: common.ModelArgument = None,
    model_option: Annotated[
        str | None, typer.Option("--model", help=SERVED_MODEL_HELP, rich_help_panel=MODEL)
    ] = None,
    config: Annotated[Path | None, typer.Option(help=CONFIG_HELP, rich_help_panel=SERVER)] = None,
    **options: Any,
) -> int:
    """Serve a model over HTTP with OpenAI's API."""
    common.require_server("paged serve")
    settings = _settings(config, {"model": common.one_model(model, model_option), **options})
    if "model" not in settings:
        raise ConfigError("name a model: paged serve MODEL, PAGED_MODEL=..., or model: ... in the file")
    if isinstance(settings.get("chat_template"), str):  # a file may give another type, which is refused
        settings["chat_template"] = common.template_text(settings["chat_template"])
    serve_options = ServeOptions(**common.given(settings, SERVE[1]))
    settings.setdefault("max_waiting", MAX_WAITING)
    engine_options = common.engine_options(settings["model"], settings, SERVED_ENGINE[1])
    _take_weights(serve_options, engine_options)
    if serve_options.lora_modules and not engine_options.get("enable_lora"):
        raise ConfigError(
            "lora_modules needs enable_lora: paged serve MODEL --enable-lora --lora-modules NAME=PATH"
        )
    common.follow(engine_options)

    from ..server.http.listener import bind_all, new_event_loop

    with bind_all(serve_options) as listeners, asyncio.Runner(loop_factory=new_event_loop) as runner:
        if serve_options.is_exposed:
            common.complain(
                f"warning: every machine that reaches {serve_options.host} may use this server; "
                "--api-key or --api-keys lets only those use it that have a key"
            )
        return runner.run(_serve(engine_options, serve_options, listeners))


def _settings(config: Path | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are given: by flags, else by the environment, else by a file."""
    types = {name: option_type(owner, name) for owner, names in (SERVE, SERVED_ENGINE) for name in names}
    types |= {"model": str, "config": str}
    environment = from_environment(types)
    # The processes that this one starts need no keys.
    for name in ("PAGED_API_KEY", "PAGED_ADMIN_KEY"):
        os.environ.pop(name, None)
    file = config or environment.pop("config", None)
    names = [name for name in types if name != "config"]
    from_flags = common.given(flags, names)
    return {**(from_file(Path(file), names) if file else {}), **environment, **from_flags}


def _take_weights(options: ServeOptions, engine_options: dict[str, Any]) -> None:
    """Give the engine the weights of the keys file, which is checked before the model is loaded."""
    policy = engine_options.get("scheduling_policy")
    keys = keys_of(options.api_keys, scheduling_policy=policy, default_reservation=None)
    if keys is None:
        return
    if engine_options.get("tenant_weights"):
        raise ConfigError("tenant_weights and api_keys exclude each other; give weights in the keys file")
    if keys.weights:
        engine_options["tenant_weights"] = dict(keys.weights)


async def _collect_garbage(front: FrontEnd) -> None:
    from ..server.interpreter import Garbage, switch_often

    switch_often()
    garbage = Garbage()
    while True:
        await asyncio.sleep(1)
        garbage.collect(is_idle=front.is_idle, is_heavy=front.body_budget.is_heavy)


async def _serve(engine_options: Mapping[str, Any], options: ServeOptions, listeners: Listeners) -> int:
    from ..server.app import new_app, new_metrics_app
    from ..server.drain import NOTIFY_READY, Drain, notify
    from ..server.engine_client import EngineClient
    from ..server.front_end import FrontEnd
    from ..server.http.listener import Server, allow_many_connections, port_url, url_of
    from ..server.telemetry.records import Observer
    from ..server.telemetry.request_log import RequestLog, announce, set_up_logging

    # Until it can be logged, or the keys can be read again.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    allow_many_connections()
    set_up_logging(options.log_format)
    observers: list[Observer] = [RequestLog()]
    if options.otlp_traces_endpoint is not None:
        from ..server.telemetry.traces import Traces

        observers.append(Traces(options.otlp_traces_endpoint))
    client = EngineClient(
        **engine_options,
        replicas=options.replicas,
        router=options.router,
        lora_modules=lora_modules_of(options.lora_modules),
        stream_interval_s=options.stream_interval_s,
        log_format=options.log_format,
        resume=options.resume,
        max_restarts=options.max_restarts,
        step_timeout=options.step_timeout,
        launcher=common.launcher_of(options.ray, engine_options, options.replicas),
    )
    async with client as engine:
        front = FrontEnd(engine, options, observers)
        announce(engine.describe())
        address = f"{', '.join(front.names)} is served at {url_of(options, listeners.main)}"
        if listeners.metrics is not None:
            address = f"metrics are at {port_url(options, listeners.metrics)}/metrics; {address}"

        def on_start() -> None:
            announce(address)
            notify(NOTIFY_READY)

        server = Server(
            new_app(front),
            options,
            on_start=on_start,
            on_refusal=front.observers.refused,
            metrics_app=new_metrics_app(front),
        )
        loop = asyncio.get_running_loop()
        beside = [loop.create_task(_collect_garbage(front)), loop.create_task(_stop_without(engine, server))]
        loop.add_signal_handler(signal.SIGHUP, front.on_hangup)
        with Drain(front, server, delay_s=options.drain_delay, timeout_s=options.drain_timeout) as drain:
            front.drain = drain.begin
            await server.listen(*listeners)
        for task in beside:
            task.cancel()
        front.observers.close()
    # The server ends by itself only if no engine is left: systemd and Kubernetes start it again.
    return 0 if front.is_draining else 1


async def _stop_without(engine: EngineClient, server: Server) -> None:
    """Stop the server when no engine is left."""
    while engine.is_running:
        await asyncio.sleep(0.2)
    server.stop()
