"""An engine process whose step raises, or takes long, once a request of so many prompt tokens runs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from paged.runner.model_runner import ModelRunner
from paged.server import engine_process

UNLUCKY, SLOW = 13, 14
STEPS = (
    "PAGED_TEST_STEPS"  # names a folder, in which a file of each process gets a byte for each of its steps
)
SLOW_UNTIL = "PAGED_TEST_SLOW_UNTIL"  # names the file whose coming ends the step that takes long


def failing(execute: Any) -> Any:
    def run(self: ModelRunner, schedule: Any) -> Any:
        lengths = {request.num_prompt_tokens for request in schedule.requests}
        if UNLUCKY in lengths:
            raise RuntimeError("a step that fails")
        if SLOW in lengths:
            while not Path(os.environ[SLOW_UNTIL]).exists():
                time.sleep(0.01)
        if (folder := os.environ.get(STEPS)) is not None:
            with Path(folder, str(os.getpid())).open("ab") as file:
                file.write(b".")
        return execute(self, schedule)

    return run


if __name__ == "__main__":
    ModelRunner.execute = failing(ModelRunner.execute)  # type: ignore[method-assign]
    engine_process.HEARTBEAT_S = 0.1
    engine_process.main()
