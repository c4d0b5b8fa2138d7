"""An engine process that never makes its engine."""

from __future__ import annotations

import time
from typing import Any

from paged.engine.engine import LLMEngine
from paged.server.engine_process import main


def wait(_self: LLMEngine, **_options: Any) -> None:
    time.sleep(300)


if __name__ == "__main__":
    LLMEngine.__init__ = wait  # type: ignore[assignment, method-assign]
    main()
