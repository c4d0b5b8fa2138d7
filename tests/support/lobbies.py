"""A server of several models on a loopback port, in a thread of this process.

Its engines are processes, or all are one engine of this process: then loading takes as long as a test says.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paged import AsyncLLMEngine
from paged.base.errors import PagedError
from paged.checkpoints.library.models_file import ModelEntry, ModelsFile
from paged.server.http.listener import Server, bind_all, new_event_loop
from paged.server.models.catalog import Catalog
from paged.server.models.lobby import LoadedModel, Lobby
from paged.server.models.routes import new_lobby_app, new_lobby_metrics_app
from paged.server.models.weigh import ModelWeight
from paged.server.options import ServeOptions
from tests.support.served import PATIENCE_S, Served

SIZE = 2**30  # of each model of a lobby in this process


@dataclass
class Loading:
    """How models of this process are loaded.

    load_s: how long it takes. errors: of the models that fail. log: what was loaded and unloaded.
    gate: is set while loads may end.
    """

    load_s: float = 0.0
    errors: dict[str, PagedError] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.gate.set()


class _Here(LoadedModel):
    """A model whose engine is that of the tests: it is not ended."""

    def __init__(self, loading: Loading, entry: ModelEntry, client: Any, front: Any) -> None:
        super().__init__(entry, client, front)
        self._loading = loading

    @property
    def shares_threads(self) -> bool:
        return True  # though the engine of the tests has a number of its own

    def share_threads(self, num_engines: int) -> None:
        self.num_sharing = num_engines
        self._loading.log.append(f"{self.entry.name} shares with {num_engines}")

    async def aclose(self) -> None:
        self._loading.log.append(f"unload {self.entry.name}")


class LobbyHere(Lobby):
    """A lobby whose models are all one engine."""

    loading: Loading
    engine: AsyncLLMEngine

    def _weigh(self, entry: ModelEntry) -> ModelWeight:
        return ModelWeight(SIZE, 64, 512, f"{entry.name} of the test")

    async def _load(self, entry: ModelEntry, weight: ModelWeight) -> LoadedModel:  # noqa: ARG002
        self.loading.log.append(f"load {entry.name}")
        await asyncio.sleep(self.loading.load_s)
        while not self.loading.gate.is_set():
            await asyncio.sleep(0.005)
        if entry.name in self.loading.errors:
            raise self.loading.errors[entry.name]
        self.lengths[entry.name] = self.engine.max_model_len
        return _Here(self.loading, entry, self.engine, self._front_of(entry, self.engine))  # type: ignore[arg-type]


@contextmanager
def lobby_here(
    engine: AsyncLLMEngine, file: Path, *names: str, memory: int = SIZE, **options: Any
) -> Iterator[tuple[Served, Loading]]:
    """Yield a server of the models of a file, which are all this engine, and how they load."""
    loading = Loading()

    def make(catalog: Catalog, chosen: ServeOptions) -> Lobby:
        lobby = LobbyHere(catalog, chosen, (), engine_options=lambda _: {}, free=0)
        lobby.loading = loading
        lobby.engine = engine
        return lobby

    with _serving(make, file, names, memory=memory, **options) as served:
        yield served, loading


@contextmanager
def lobby_of_processes(file: Path, *names: str, engine: dict[str, Any], **options: Any) -> Iterator[Served]:
    """Yield a server of the models of a file, each in a process of its own. engine: options of all."""

    def make(catalog: Catalog, chosen: ServeOptions) -> Lobby:
        def options_of(entry: ModelEntry) -> dict[str, Any]:
            return {**engine, **entry.engine, "model": entry.checkpoint}

        return Lobby(catalog, chosen, (), engine_options=options_of, free=0)

    with _serving(make, file, names, **options) as served:
        yield served


@contextmanager
def _serving(
    make: Callable[[Catalog, ServeOptions], Lobby], file: Path, names: tuple[str, ...], **options: Any
) -> Iterator[Served]:
    started = threading.Event()
    served: list[Served] = []

    async def serve() -> None:
        chosen = ServeOptions(port=0, **options)
        lobby = make(Catalog(names, ModelsFile(file)), chosen)
        with bind_all(chosen) as listeners:
            server = Server(
                new_lobby_app(lobby),
                chosen,
                on_start=lambda: None,
                on_refusal=lobby.observers.refused,
                metrics_app=new_lobby_metrics_app(lobby),
            )
            loop = asyncio.get_running_loop()
            served.append(Served(lobby, listeners.main.getsockname()[1], loop, server))  # type: ignore[arg-type]
            serving = loop.create_task(server.listen(*listeners))
            while not server.started:
                await asyncio.sleep(0.001)
            started.set()
            await serving
        await lobby.host.aclose()

    def run() -> None:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(PATIENCE_S)
    try:
        yield served[0]
    finally:
        served[0].loop.call_soon_threadsafe(served[0].server.stop)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
