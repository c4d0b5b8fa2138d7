"""An engine process whose step raises, or takes long, once a request of so many prompt tokens runs."""

from __future__ import annotations

import time
from typing import Any

from paged.runner.model_runner import ModelRunner
from paged.server.engine_process import main

UNLUCKY, SLOW = 13, 14
SLOW_S = 2.5


def failing(execute: Any) -> Any:
    def run(self: ModelRunner, schedule: Any) -> Any:
        lengths = {request.num_prompt_tokens for request in schedule.requests}
        if UNLUCKY in lengths:
            raise RuntimeError("a step that fails")
        if SLOW in lengths:
            time.sleep(SLOW_S)
        return execute(self, schedule)

    return run


if __name__ == "__main__":
    ModelRunner.execute = failing(ModelRunner.execute)  # type: ignore[method-assign]
    main()
