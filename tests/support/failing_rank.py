"""A rank's process that fails at a step when it is told to: `python -m tests.support.failing_rank follow FD`.

The environment names a file, in which a test writes a rank and how it is to fail: "exception", "memory" or
"hang".
"""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import psutil

VARIABLE = "TEST_RANK_FAILURE"


def fail(how: str) -> None:
    """Fail as it is asked for."""
    if how == "exception":
        raise ArithmeticError("this step cannot be computed")
    while how == "hang":
        time.sleep(1)
    import torch

    room = psutil.Process().memory_info().vms + 2**24
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    torch.ones(2**28)


def main() -> int:
    """Run the rank."""
    from paged.ranks import __main__ as command
    from paged.ranks import follower, rank_process

    computed, ran = follower.FollowerRunner._compute, rank_process.RankProcess.run
    own = list[int]()

    def run(self: Any, runner: Any) -> None:
        own.append(self.rank)
        ran(self, runner)

    def compute(self: Any, plan: Any, number: int) -> None:
        file = Path(os.environ[VARIABLE])
        if file.exists():
            rank, how = file.read_text().split()
            if own == [int(rank)]:
                file.unlink()
                fail(how)
        computed(self, plan, number)

    follower.FollowerRunner._compute = compute  # type: ignore[method-assign]
    rank_process.RankProcess.run = run  # type: ignore[method-assign]
    return command.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
