"""`paged serve`: an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.errors import ConfigError
from ..options.lora_request import lora_modules_of
from ..server.options import MAX_WAITING, ServeOptions
from . import common
from .headings import MODEL, SERVER
from .options import option_type, with_options
from .serving import SERVE, SERVED_ENGINE, begin, listen, run, take_weights
from .settings import from_environment, from_file

if TYPE_CHECKING:
    from ..checkpoints.library.models_file import ModelEntry
    from ..server.engine_client import EngineClient
    from ..server.http.listener import Listeners, Server

SERVED_MODEL_HELP = """A local directory, a GGUF file, a Hugging Face hub id, or demo for the checkpoint that
ships with paged. It may also come from the environment or the file, as all options may. [default: none]"""
CONFIG_HELP = """A YAML file of options, such as port: 8000. Flags override PAGED_... in the environment, such
as PAGED_PORT=8000, and these override the file. [default: none]"""
_MODELS_HELP = "The same as --model. Several are loaded when they are asked for, and share the memory."
ServedModels = Annotated[
    list[str] | None, typer.Argument(metavar="[MODEL]...", help=_MODELS_HELP, show_default=False)
]


@with_options(SERVE, SERVED_ENGINE, defaults={"max_waiting": f"{MAX_WAITING:,}"})
def serve(
    model: ServedModels = None,
    model_option: Annotated[
        str | None, typer.Option("--model", help=SERVED_MODEL_HELP, rich_help_panel=MODEL)
    ] = None,
    config: Annotated[Path | None, typer.Option(help=CONFIG_HELP, rich_help_panel=SERVER)] = None,
    **options: Any,
) -> int:
    """Serve a model, or several that come and go, over HTTP with OpenAI's API."""
    common.require_server("paged serve")
    names = model or []
    one = names[0] if len(names) == 1 else None
    settings = _settings(config, {"model": common.one_model(one, model_option), **options})
    if isinstance(settings.get("chat_template"), str):  # a file may give another type, which is refused
        settings["chat_template"] = common.template_text(settings["chat_template"])
    if len(names) > 1 or "models" in settings:
        from .serve_models import serve_models

        return serve_models(names or [*filter(None, [settings.get("model")])], settings)
    if "model" not in settings:
        raise ConfigError(
            "name a model: paged serve MODEL, PAGED_MODEL=..., or model: ... in the file; several names, or "
            "--models, serve several"
        )
    serve_options = ServeOptions(**common.given(settings, SERVE[1]))
    serve_options.check_one_model()
    entry = common.named(settings["model"])
    engine_options = {
        "max_waiting": MAX_WAITING,
        **common.engine_options(settings["model"], settings, SERVED_ENGINE[1]),
    }
    take_weights(serve_options, engine_options)
    if serve_options.lora_modules and not engine_options.get("enable_lora"):
        raise ConfigError(
            "lora_modules needs enable_lora: paged serve MODEL --enable-lora --lora-modules NAME=PATH"
        )
    if serve_options.allow_runtime_lora_updating and not engine_options.get("enable_lora"):
        raise ConfigError("allow_runtime_lora_updating needs enable_lora: paged serve MODEL --enable-lora")
    common.follow(engine_options)
    return run(serve_options, lambda listeners: _serve(entry, engine_options, serve_options, listeners))


def _settings(config: Path | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are given: by flags, else by the environment, else by a file."""
    types = {name: option_type(owner, name) for owner, names in (SERVE, SERVED_ENGINE) for name in names}
    types |= {"model": str, "config": str}
    # PAGED_MODELS names the file of all commands, and does not make this a server of several models.
    environment = from_environment({name: kind for name, kind in types.items() if name != "models"})
    # The processes that this one starts need no keys.
    for name in ("PAGED_API_KEY", "PAGED_ADMIN_KEY"):
        os.environ.pop(name, None)
    file = config or environment.pop("config", None)
    del types["config"]
    from_flags = common.given(flags, types)
    return {**(from_file(Path(file), types) if file else {}), **environment, **from_flags}


async def _serve(
    entry: ModelEntry, engine_options: Mapping[str, Any], options: ServeOptions, listeners: Listeners
) -> int:
    from ..server.app import new_app, new_metrics_app
    from ..server.engine_client import EngineClient
    from ..server.front_end import FrontEnd
    from ..server.telemetry.request_log import announce

    observers = begin(options)
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
        engine.text.set_defaults(entry.sampling)
        front = FrontEnd(engine, _of_entry(options, entry), observers, system=entry.system)
        announce(engine.describe())
        await listen(
            front,
            (new_app(front), new_metrics_app(front)),
            options,
            listeners,
            name=", ".join(front.names),
            beside=lambda server: [_stop_without(engine, server)],
        )
    # The server ends by itself only if no engine is left: systemd and Kubernetes start it again.
    return 0 if front.is_draining else 1


def _of_entry(options: ServeOptions, entry: ModelEntry) -> ServeOptions:
    """Return the options with the name and the template of a model of models.toml."""
    names = options.served_model_name or (entry.name,)
    template = entry.template if options.chat_template is None else options.chat_template
    return replace(options, served_model_name=names, chat_template=common.template_text(template))


async def _stop_without(engine: EngineClient, server: Server) -> None:
    """Stop the server when no engine is left."""
    while engine.is_running:
        await asyncio.sleep(0.2)
    server.stop()
