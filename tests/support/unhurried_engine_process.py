"""An engine process whose steps take the seconds that a file says, as long as that is there."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from paged.runner.model_runner import ModelRunner
from paged.server import engine_process

WHILE = "UNHURRIED_WHILE"  # names the file


def unhurried(execute: Any) -> Any:
    file = Path(os.environ[WHILE])

    def run(self: ModelRunner, schedule: Any) -> Any:
        with suppress(FileNotFoundError):
            time.sleep(float(file.read_text()))
        return execute(self, schedule)

    return run


if __name__ == "__main__":
    ModelRunner.execute = unhurried(ModelRunner.execute)  # type: ignore[method-assign]
    engine_process.main()
