"""Routers: choose the replica for each request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from ..base.errors import ConfigError

_MOST_LOAD = 2**62
WAITING_WEIGHT = 4  # as in the balancing of vLLM


def load_of(num_tokens: int, *, has_output: bool) -> int:
    """Return the load that an unfinished request adds to its replica.

    num_tokens: the number of tokens in its prompt and its output so far.
    has_output: whether the replica has sent a token of the request. Before that, the prompt must be computed,
        and the first tokens of later requests wait for it. Decodes delay others little, since each step has
        room for all of them.
    """
    return num_tokens if has_output else WAITING_WEIGHT * num_tokens


class Router(Protocol):
    """Chooses a replica for each request."""

    def choose(self, token_ids: Sequence[int], loads: Sequence[int]) -> int:
        """Return the number of a replica. Between two calls, replicas may be added, or removed from the end.

        loads: for each replica, the sum of `load_of` over its unfinished requests.
        """

    def forget(self, replica: int) -> None:
        """Forget what was sent to a replica, because it restarts or is removed."""


class RoundRobin:
    """Chooses the replicas in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, token_ids: Sequence[int], loads: Sequence[int]) -> int:  # noqa: ARG002
        chosen = self._next % len(loads)
        self._next = chosen + 1
        return chosen

    def forget(self, replica: int) -> None:
        """Do nothing: this router has no state about single replicas."""


class LeastLoaded:
    """Chooses the replica with the lowest load; of equal loads, the first."""

    def choose(self, token_ids: Sequence[int], loads: Sequence[int]) -> int:  # noqa: ARG002
        return loads.index(min(loads))

    def forget(self, replica: int) -> None:
        """Do nothing: this router has no state."""


class PrefixAware:
    """Chooses the replica that was sent the longest prefix of the prompt in earlier requests.

    If that replica's load is more than MAX_RATIO times the lowest load plus MAX_EXTRA, it chooses the least
    loaded replica.

    As in SGLang's and llm-d's routers, the choice is based on what was sent to each replica, not on what the
    replica still caches. The router remembers the MAX_PREFIXES most recently used blocks of block_size
    tokens.
    """

    MAX_PREFIXES = 2**18
    MAX_RATIO = 1.5
    MAX_EXTRA = 2**14

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        # By hash of all tokens up to a block's end, least recently used first.
        self._holders: OrderedDict[int, set[int]] = OrderedDict()

    def choose(self, token_ids: Sequence[int], loads: Sequence[int]) -> int:
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

    def forget(self, replica: int) -> None:
        for holders in self._holders.values():
            holders.discard(replica)

    def _keys(self, token_ids: Sequence[int]) -> list[int]:
        keys = []
        key = 0
        size = self._block_size
        for end in range(size, len(token_ids), size):
            key = hash((key, *token_ids[end - size : end]))
            keys.append(key)
        return keys

    def _remember(self, keys: list[int], replica: int) -> None:
        holders = self._holders
        # In reverse order, so that the ends of prefixes are forgotten first.
        for key in reversed(keys):
            holders.setdefault(key, set()).add(replica)
            holders.move_to_end(key)
        while len(holders) > self.MAX_PREFIXES:
            holders.popitem(last=False)


ROUTERS = ("round-robin", "least-loaded", "prefix-aware")


def new_router(name: str, block_size: int) -> Router:
    """Return a new router. Raises ConfigError for an unknown name."""
    if name == "round-robin":
        return RoundRobin()
    if name == "least-loaded":
        return LeastLoaded()
    if name == "prefix-aware":
        return PrefixAware(block_size)
    raise ConfigError(f"router must be one of {', '.join(ROUTERS)}; got {name!r}")


def choose_among(router: Router, token_ids: Sequence[int], loads: Sequence[int | None]) -> int:
    """Return the index of a replica that accepts requests.

    loads: see `Router.choose`; None for a replica that accepts no requests. At least one must accept them.
    """
    # A router knows replicas by their number; one that can have none is never the least loaded.
    known = [_MOST_LOAD if load is None else load for load in loads]
    for _ in loads:
        chosen = router.choose(token_ids, known)
        if loads[chosen] is not None:
            return chosen
    return known.index(min(known))
