"""Routers: which replica gets a request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from ..errors import ConfigError


class Router(Protocol):
    """Chooses a replica for each request."""

    def choose(self, token_ids: Sequence[int], loads: Sequence[int]) -> int:
        """The number of a replica.

        loads: outstanding tokens of each replica: those of its unfinished requests, prompt and output so far.
        """


class RoundRobin:
    """Each in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, token_ids: Sequence[int], loads: Sequence[int]) -> int:  # noqa: ARG002
        """The one after the last."""
        chosen = self._next
        self._next = (chosen + 1) % len(loads)
        return chosen


class LeastLoaded:
    """The fewest outstanding tokens; of equals, the first."""

    def choose(self, token_ids: Sequence[int], loads: Sequence[int]) -> int:  # noqa: ARG002
        """The one with the least to do."""
        return loads.index(min(loads))


class PrefixAware:
    """Whoever was sent the longest prefix of the prompt, unless it has too much to do; then the least loaded.

    As in SGLang's and llm-d's routers it remembers what it sent where, not what the replicas still hold:
    the MAX_PREFIXES blocks of block_size tokens that were asked for last. Too much is more than
    MAX_RATIO times the least load and MAX_EXTRA tokens.
    """

    MAX_PREFIXES = 2**18
    MAX_RATIO, MAX_EXTRA = 1.5, 8192

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        # By hash of all tokens up to a block's end, least recently used first.
        self._holders: OrderedDict[int, set[int]] = OrderedDict()

    def choose(self, token_ids: Sequence[int], loads: Sequence[int]) -> int:
        """The one that should know most of the prompt."""
        keys = self._keys(token_ids)
        known: set[int] = set()
        for key in keys:
            holders = self._holders.get(key)
            if holders is None:
                break
            known = holders
        least = min(loads)
        chosen = min(known, key=loads.__getitem__, default=None)
        if chosen is None or loads[chosen] > self.MAX_RATIO * least + self.MAX_EXTRA:
            chosen = loads.index(least)
        self._remember(keys, chosen)
        return chosen

    def _keys(self, token_ids: Sequence[int]) -> list[int]:
        keys, key, size = [], 0, self._block_size
        for end in range(size, len(token_ids), size):
            key = hash((key, *token_ids[end - size : end]))
            keys.append(key)
        return keys

    def _remember(self, keys: list[int], replica: int) -> None:
        holders = self._holders
        # From the end, so that the cache loses the ends of prefixes first.
        for key in reversed(keys):
            holders.setdefault(key, set()).add(replica)
            holders.move_to_end(key)
        while len(holders) > self.MAX_PREFIXES:
            holders.popitem(last=False)


ROUTERS = ("round-robin", "least-loaded", "prefix-aware")


def new_router(name: str, block_size: int) -> Router:
    """A router by name. Raises ConfigError for an unknown one."""
    if name == "round-robin":
        return RoundRobin()
    if name == "least-loaded":
        return LeastLoaded()
    if name == "prefix-aware":
        return PrefixAware(block_size)
    raise ConfigError(f"router must be one of {', '.join(ROUTERS)}; got {name!r}")
