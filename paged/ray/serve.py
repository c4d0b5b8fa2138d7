"""A Ray Serve application: each replica is an engine with the server's own routes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ..base.errors import ClusterError, ConfigError, EngineDeadError
from ..base.validation import shown
from ..options.config import EngineConfig
from ..server.launcher import LocalLauncher
from ..server.options import MAX_WAITING, ServeOptions
from .missing import explained

try:
    import ray
    from ray import serve
except ImportError as error:
    raise explained(error) from None

# Serve listens, divides and restarts, each in its own way.
OF_SERVE = frozenset(
    {
        "host",
        "port",
        "uds",
        "ssl_keyfile",
        "ssl_certfile",
        "root_path",
        "metrics_port",
        "max_connections",
        "keep_alive_timeout_s",
        "head_timeout_s",
        "slow_client_timeout_s",
        "replicas",
        "ray",
        "router",
        "drain_delay",
        "drain_timeout",
    }
)

if inspect.signature(serve.ingress).parameters["app"].default is inspect.Parameter.empty:
    raise ClusterError(
        f"Serve of ray {ray.__version__} takes no application that a replica makes itself; install a newer "
        "one: 2.60.0 is tested"
    )


def app(
    model: str,
    *,
    deployment: Mapping[str, Any] | None = None,
    server: Mapping[str, Any] | None = None,
    **options: Any,
) -> serve.Application:
    """Return an application for `serve.run`. Its replicas serve a model with the routes of `paged serve`.

    >>> serve.run(app("demo", deployment={"num_replicas": 2}))

    Ray Serve scales, checks and updates the replicas. When a replica ends, its streams end too, and clients
    see incomplete bodies. (With `paged serve --ray`, streams go on in another replica.)

    deployment: options of `serve.deployment`, such as num_replicas, autoscaling_config or ray_actor_options.
        By default max_ongoing_requests is the number of requests that an engine admits, and an actor gets a
        GPU or num_threads cores.
    server: options of `paged serve`, except options for sockets and replicas.
    options: the arguments of `LLMEngine`.

    Raises ConfigError.
    """
    from ..server.engine_client import sendable_options

    for name, terms in (("deployment", deployment), ("server", server)):
        if not isinstance(terms, Mapping | None):
            raise ConfigError(f"{name} must be options by name, got {shown(terms)}")
    if "replicas" in options:
        raise ConfigError("replicas are Serve's: give deployment={'num_replicas': ...}")
    config = EngineConfig(model, **{"max_waiting": MAX_WAITING, **options})
    given = sendable_options(config, {"max_waiting": MAX_WAITING, **options})
    server_options = dict(server or {})
    if refused := sorted(OF_SERVE & server_options.keys()):
        raise ConfigError(
            f"{', '.join(refused)} of server are for Serve itself: see serve.start and deployment"
        )
    ServeOptions(**server_options)
    of_serve = {"max_ongoing_requests": config.num_seats + MAX_WAITING, **(deployment or {})}
    of_serve.setdefault("ray_actor_options", _resources(options, config.num_ranks))
    try:
        deployed = serve.deployment(**of_serve)(_Replica)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"deployment: {error}") from error
    return deployed.bind({"model": model, **given}, server_options)


def app_of_config(args: dict[str, Any]) -> serve.Application:
    """Return the application for the arguments in a config file of Serve: the arguments of `app` by name.

    Raises ConfigError.
    """
    if "model" not in args:
        raise ConfigError("the application's args need model, a directory or an id of the hub")
    return app(**args)


def _resources(options: Mapping[str, Any], num_ranks: int) -> dict[str, Any]:
    """Return what an actor asks for: a GPU for each rank of the model, or a core for each of its threads."""
    if options.get("device", "auto").startswith("cuda"):
        return {"num_gpus": num_ranks}
    return {"num_cpus": num_ranks * (options.get("num_threads") or 1)}


class _OneProcess(LocalLauncher):
    """Starts the one engine process of a replica."""

    def check_room(self, num: int) -> None:  # noqa: ARG002
        """Raise ConfigError: replicas are Serve's."""
        raise ConfigError("Ray Serve adds and removes replicas: see num_replicas of deployment")


@serve.ingress()
class _Replica:
    """An engine in a process of its own, and the server's application."""

    def __init__(self, engine_options: Mapping[str, Any], server_options: Mapping[str, Any]) -> None:
        from ..server.engine_client import EngineClient

        # Its hosts are those of Serve's proxies.
        options = ServeOptions(**{"allowed_hosts": ["*"], **server_options})
        self._engine = EngineClient(
            **engine_options,
            log_format=options.log_format,
            resume=options.resume,
            max_restarts=options.max_restarts,
            step_timeout=options.step_timeout,
            launcher=_OneProcess(),
        )
        self._options = options

    def __serve_build_asgi_app__(self) -> Any:
        """Return the server's application. Serve calls it once the engine is made."""
        from ..server.app import new_app
        from ..server.front_end import FrontEnd
        from ..server.http.exchange import CUT, IS_TOO_SLOW

        served = new_app(FrontEnd(self._engine, self._options))

        async def door(scope: Any, receive: Any, send: Any) -> None:
            # Slow clients are those of Serve's proxies, which hold what they have not read.
            await served({**scope, IS_TOO_SLOW: lambda: False, CUT: lambda: None}, receive, send)

        return door

    async def check_health(self) -> None:
        """Raise EngineDeadError if no engine is left, or none is well, so that Serve replaces the replica."""
        if self._engine.dead_error is not None:
            raise EngineDeadError(str(self._engine.dead_error))
        if troubles := await self._engine.troubles():
            raise EngineDeadError("; ".join(troubles))

    def __del__(self) -> None:
        self._engine.shutdown()
