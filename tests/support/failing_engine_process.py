"""An engine process whose step raises once a request of 13 prompt tokens runs."""

from __future__ import annotations

from typing import Any

from paged.runner.model_runner import ModelRunner
from paged.server.engine_process import main

UNLUCKY = 13


def failing(execute: Any) -> Any:
    def run(self: ModelRunner, schedule: Any) -> Any:
        if any(request.num_prompt_tokens == UNLUCKY for request in schedule.requests):
            raise RuntimeError("a step that fails")
        return execute(self, schedule)

    return run


if __name__ == "__main__":
    ModelRunner.execute = failing(ModelRunner.execute)  # type: ignore[method-assign]
    main()
