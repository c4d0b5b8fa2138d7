"""`paged serve` with several models, which are loaded when they are asked for."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import ConfigError
from ..checkpoints.hub import OFFLINE
from ..device.host_memory import free_on_cpu
from ..options.config import EngineConfig
from ..server.options import MAX_WAITING, ServeOptions
from . import common
from .serving import SERVE, SERVED_ENGINE, begin, listen, run, take_weights

if TYPE_CHECKING:
    from ..checkpoints.library.models_file import ModelEntry
    from ..server.http.listener import Listeners
    from ..server.models.catalog import Catalog


def serve_models(names: Sequence[str], settings: Mapping[str, Any]) -> int:
    """Serve several models: these, or all of models.toml and of the hub's cache."""
    from ..checkpoints.library.models_file import VARIABLE, ModelsFile
    from ..checkpoints.library.names import check_is_here
    from ..server.models.catalog import Catalog

    options = ServeOptions(**common.given(settings, SERVE[1]))
    options.check_many_models()
    file = ModelsFile(Path(options.models), must_exist=True) if options.models else ModelsFile.of_user()
    if options.prefix_dir is not None:
        _make_folder(Path(options.prefix_dir).expanduser())
    if options.models:
        os.environ[VARIABLE] = str(file.path)  # the engines' processes keep its packed weights the longest
    catalog = Catalog(names, file)
    base = common.given(settings, SERVED_ENGINE[1])
    base.pop("model", None)
    if base.get("enable_lora"):  # whose slots no request could use
        raise ConfigError("enable_lora goes with one model, and this server has several")
    EngineConfig("demo", **base)
    take_weights(options, base)
    preloaded = [_known(catalog, name) for name in options.preload]
    if not catalog.is_open:
        for entry in catalog.entries():
            check_is_here(entry)
            EngineConfig(**engine_options(entry, base))
    return run(options, lambda listeners: _serve(catalog, base, options, preloaded, listeners))


def _fetch_nothing() -> None:
    """Let this process and the engines' take models of the hub from its cache alone.

    The hub's own library is imported first, so that /api/pull can ask the hub.
    """
    from huggingface_hub import constants  # noqa: F401

    os.environ[OFFLINE] = "1"


def _make_folder(place: Path) -> None:
    """Make the folder of pinned prefixes, for its user alone, since prefixes are texts of users."""
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = None if os.access(place, os.W_OK | os.X_OK) else "it cannot be written"
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise ConfigError(f"--prefix-dir {place}: {reason}")


def engine_options(entry: ModelEntry, base: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a model's engine. base: the flags, which precede those of models.toml."""
    return {"max_waiting": MAX_WAITING, **entry.engine, **base, "model": entry.checkpoint}


def _known(catalog: Catalog, name: str) -> ModelEntry:
    entry = catalog.find(name)
    if entry is None:
        names = ", ".join(each.name for each in catalog.entries()) or "none"
        raise ConfigError(f"--preload {name} is not here; this server has {names}")
    return entry


async def _serve(
    catalog: Catalog,
    base: Mapping[str, Any],
    options: ServeOptions,
    preloaded: Sequence[ModelEntry],
    listeners: Listeners,
) -> int:
    from ..server.models.lobby import Lobby
    from ..server.models.routes import new_lobby_app, new_lobby_metrics_app
    from ..server.telemetry.request_log import announce

    _fetch_nothing()
    observers = begin(options)
    lobby = Lobby(
        catalog,
        options,
        observers,
        engine_options=lambda entry: engine_options(entry, base),
        free=int(free_on_cpu()),
        read_template=common.template_text,
    )
    announce(f"models have {lobby.host.residency.memory / 2**30:,.2f} GiB together")
    preloading = asyncio.get_running_loop().create_task(lobby.preload(preloaded))
    names = [entry.name for entry in catalog.entries()]
    try:
        await listen(
            lobby,
            (new_lobby_app(lobby), new_lobby_metrics_app(lobby)),
            options,
            listeners,
            name=", ".join(names) or "no model yet",
        )
    finally:
        preloading.cancel()
        await lobby.host.aclose()
    return 0
