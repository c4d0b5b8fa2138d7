"""FrontEnd: what all routes share: the engine, the options, and the names of the model."""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from typing import TYPE_CHECKING

from ..errors import EngineDeadError
from ..sampling_params import MAX_SEED
from .http.failures import Failure, FinishRate, HttpError, failure_of
from .http.streams import KeepAlive
from .options import ServeOptions

if TYPE_CHECKING:
    from .served_engine import ServedEngine


class FrontEnd:
    """The engine, and what the routes know about its requests.

    names: of the model, the first one in responses.
    created: when the server started, in seconds since 1970.
    num_open: requests that are being answered.
    is_stopping: whether the server ends, so that new requests are refused.
    """

    def __init__(self, engine: ServedEngine, options: ServeOptions) -> None:
        self.engine, self.options = engine, options
        self.names = tuple(options.served_model_name) or (engine.config.model,)
        self.created = int(time.time())
        self.keep_alive = KeepAlive()
        self.rate = FinishRate()
        self.num_open = 0
        self.is_stopping = False

    def check_model(self, name: str | None) -> None:
        """Raise HttpError if a request names another model."""
        if name is not None and name not in self.names:
            raise HttpError(
                404,
                f"the model {name!r} is not here; this server has {', '.join(map(repr, self.names))}",
                param="model",
                code="model_not_found",
            )

    def check_serving(self) -> None:
        """Raise EngineDeadError if no request can be served now."""
        if self.is_stopping:
            raise EngineDeadError("the server is shutting down")
        if self.engine.dead_error is not None:
            raise self.engine.dead_error

    def seed_for(self, request_id: str) -> int:
        """Return the seed of a request that gives none.

        It is chosen here, so that the request can be repeated by another engine.
        """
        text = f"{self.engine.config.seed}/{request_id}"
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        return int.from_bytes(digest[:8], "little") & MAX_SEED

    def stop(self) -> None:
        """Refuse new requests, and end those that are being answered."""
        if not self.is_stopping:
            self.is_stopping = True
            # It waits for the current step.
            asyncio.get_running_loop().run_in_executor(None, self.engine.shutdown)

    def failure_of(self, error: Exception, request_id: str) -> Failure:
        """Return the response for an error."""
        num_waiting = self.num_open - self.engine.config.max_num_seqs * self.options.replicas
        return failure_of(error, self.rate.seconds_for(max(1, num_waiting)), request_id)


def new_identity() -> str:
    """Return an id for a request of the engine, unlike any other."""
    return uuid.uuid4().hex
