"""WholeWeight: what all numbers of a weight decide, of which a shard holds a share only.

Each process decides alone, by reading the rest: one that is replaced loads while the others compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .coded import Weight


@dataclass(slots=True)
class WholeWeight:
    """The weight that a form is made of now.

    num_shards: into how many it is divided. read: reads all of it; None: the form is made of all, or the rest
    is known to be alike.
    """

    num_shards: int = 1
    read: Callable[[], Weight] | None = None

    def has(self, own: Weight, check: Callable[[Weight], bool]) -> bool:
        """Return whether the whole weight passes a check. own: the share of it that is in memory."""
        return check(own) and (self.read is None or check(self.read()))
