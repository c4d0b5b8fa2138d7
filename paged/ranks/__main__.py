"""`python -m paged.ranks alive`: a probe of this machine's ranks.

The driver starts ranks by `follow`, and an actor of Ray by `join`.
"""

from __future__ import annotations

import sys

USAGE = "usage: python -m paged.ranks alive"


def main(arguments: list[str]) -> int:
    """Run a command. Return its exit code."""
    match arguments:
        case ["alive"]:
            from .heartbeat import find_troubles

            num_ranks, troubles = find_troubles()
            for line in troubles or [f"{num_ranks} ranks run" if num_ranks else "no rank runs here"]:
                print(line)
            return 1 if troubles or not num_ranks else 0
        case ["follow", descriptor] if descriptor.isdecimal():
            from .rank_process import follow_parent

            return follow_parent(int(descriptor))
        case ["join"]:
            from .rank_process import join

            return join()
    print(USAGE, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
