"""An engine process with a hook: requests whose id says so end it. `tests.poisons` runs it."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from paged.engine.engine import LLMEngine
from paged.server import engine_process
from paged.server.engine_process import EngineServer

POISON = "poison"


def poison_id(number: int, kind: str, amount: float) -> str:
    """Return the id of a request that ends its process: "at once", or after "seconds" or "tokens"."""
    return f"{POISON} {number} {kind.replace(' ', '-')} {amount}"


def is_due(engine: LLMEngine) -> bool:
    """Return whether a request ends its engine now: each counts from the beginning of its present life."""
    for request_id, group in [*engine.core.groups.items()]:
        if not request_id.startswith(POISON):
            continue
        _, _, kind, amount = request_id.split()
        sample = group.samples[0]
        began = sample.metrics.first_scheduled_time
        if kind == "at-once":
            return True
        if kind == "seconds" and began is not None and time.perf_counter() - began >= float(amount):
            return True
        if kind == "tokens" and sample.num_output_tokens - sample.inputs.num_given_tokens >= float(amount):
            return True
    return False


class _PoisonedServer(EngineServer):
    def run(self) -> None:
        """Serve until a request ends the process."""
        threading.Thread(target=self._watch, daemon=True).start()
        super().run()

    def _watch(self) -> None:
        while True:
            self._die_if_due()
            time.sleep(0.002)

    def _die_if_due(self, *_: Any) -> None:
        if is_due(self.engine):
            os.kill(os.getpid(), signal.SIGKILL)

    def _deliver(self) -> None:
        super()._deliver()
        self._die_if_due()


if __name__ == "__main__":
    engine_process.EngineServer = _PoisonedServer
    engine_process.main()
