"""What `paged serve` does for one model and for several: prepare this process, and listen."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Protocol

from ..base.errors import ConfigError
from ..options.config import EngineConfig
from ..server.access.keys import keys_of
from ..server.options import ServeOptions
from . import common

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from ..server.http.budgets import BodyBudget
    from ..server.http.listener import Listeners, Server
    from ..server.telemetry.records import Observer, Observers

SERVED_ENGINE = (EngineConfig, [*common.ENGINE[1], "skip_tokenizer_init", "max_queued_tokens"])
SERVE = (ServeOptions, [field.name for field in fields(ServeOptions)])


def run(options: ServeOptions, serve: Callable[[Listeners], Coroutine[Any, Any, int]]) -> int:
    """Run a server on the sockets of its options. Return its exit code."""
    from ..server.http.listener import bind_all, new_event_loop

    with bind_all(options) as listeners, asyncio.Runner(loop_factory=new_event_loop) as runner:
        if options.is_exposed:
            common.complain(
                f"warning: every machine that reaches {options.host} may use this server; "
                "--api-key or --api-keys lets only those use it that have a key"
            )
        return runner.run(serve(listeners))


def take_weights(options: ServeOptions, engine_options: dict[str, Any]) -> None:
    """Give the engine the weights of the keys file, which is checked before the model is loaded."""
    policy = engine_options.get("scheduling_policy")
    keys = keys_of(options.api_keys, scheduling_policy=policy, default_reservation=None)
    if keys is None:
        return
    if engine_options.get("tenant_weights"):
        raise ConfigError("tenant_weights and api_keys exclude each other; give weights in the keys file")
    if keys.weights:
        engine_options["tenant_weights"] = dict(keys.weights)


class Served(Protocol):
    """The attributes of a front end that a server uses; see `FrontEnd`."""

    observers: Observers
    body_budget: BodyBudget
    drain: Callable[[], None]
    is_draining: bool
    is_closed: bool

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""

    @property
    def num_accepted(self) -> int:
        """How many accepted requests have no whole response yet."""

    def on_hangup(self) -> None:
        """Read files, such as the keys, again."""

    def stop(self) -> None:
        """Refuse new requests, and abort the requests in progress."""


async def _collect_garbage(front: Served) -> None:
    from ..server.interpreter import Garbage, switch_often

    switch_often()
    garbage = Garbage()
    while True:
        await asyncio.sleep(1)
        garbage.collect(is_idle=front.is_idle, is_heavy=front.body_budget.is_heavy)


def begin(options: ServeOptions) -> list[Observer]:
    """Prepare this process for a server. Return what observes its requests."""
    from ..server.http.listener import allow_many_connections
    from ..server.telemetry.request_log import RequestLog, set_up_logging

    # Until it can be logged, or the keys can be read again.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    allow_many_connections()
    set_up_logging(options.log_format)
    observers: list[Observer] = [RequestLog()]
    if options.otlp_traces_endpoint is not None:
        from ..server.telemetry.traces import Traces

        observers.append(Traces(options.otlp_traces_endpoint))
    return observers


async def listen(
    front: Served,
    apps: tuple[ASGIApp, ASGIApp],
    options: ServeOptions,
    listeners: Listeners,
    *,
    name: str,
    beside: Callable[[Server], Sequence[Coroutine[Any, Any, None]]] = lambda _: (),
) -> None:
    """Serve until a signal, or until a coroutine of `beside` stops the server.

    apps: the applications of the server and of --metrics-port. name: what is served.
    """
    from ..server.app import new_ollama_app
    from ..server.drain import NOTIFY_READY, Drain, notify
    from ..server.http.listener import Server, port_url, url_of
    from ..server.telemetry.request_log import announce

    address = f"{name} is served at {url_of(options, listeners.main)}"
    if listeners.metrics is not None:
        address = f"metrics are at {port_url(options, listeners.metrics)}/metrics; {address}"

    if listeners.ollama is not None:
        address = f"Ollama's API is at {port_url(options, listeners.ollama)}; {address}"

    def on_start() -> None:
        announce(address)
        notify(NOTIFY_READY)

    app, metrics_app = apps
    server = Server(
        app,
        options,
        on_start=on_start,
        on_refusal=front.observers.refused,
        metrics_app=metrics_app,
        ollama_app=None if listeners.ollama is None else new_ollama_app(app, options),
    )
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(each) for each in (_collect_garbage(front), *beside(server))]
    loop.add_signal_handler(signal.SIGHUP, front.on_hangup)
    with Drain(front, server, delay_s=options.drain_delay, timeout_s=options.drain_timeout) as drain:
        front.drain = drain.begin
        await server.listen(*listeners)
    for task in tasks:
        task.cancel()
    front.observers.close()
