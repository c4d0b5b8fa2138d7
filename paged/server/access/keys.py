"""Keys: the keys in force, each with its tenant, its limits and what it has used."""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import time
from collections.abc import Iterable, Mapping

from ...base.errors import ConfigError
from ...protocol.fields.common import PRIORITIES
from .key_file import KeyEntry, digest_of, read_keys
from .limits import Clock, KeyUsage

DEFAULT_RESERVATION = 1024  # tokens of an output, where a request may have as many


class Keys:
    """The keys of a file. The file can be read again while requests are in progress.

    path: the file.
    scheduling_policy: the engine's policy. Some fields of keys have an effect only with certain policies.
    default_reservation: maximum number of tokens that are reserved for an output.
    clock: returns the time by which limits are counted. now: returns the time by which keys expire, in
        seconds since 1970.

    Raises ConfigError naming the line.
    """

    def __init__(
        self,
        path: str,
        *,
        scheduling_policy: object,
        default_reservation: int = DEFAULT_RESERVATION,
        clock: Clock = time.monotonic,
        now: Clock = time.time,
    ) -> None:
        self.path = path
        self.default_reservation = default_reservation
        self._policy = scheduling_policy
        self._clock = clock
        self._now = now
        # By what only this process can compute of a digest: how long a look-up takes tells nothing of others.
        self._secret = secrets.token_bytes(32)
        self._by_place: dict[bytes, KeyUsage] = {}
        self.replace(self.read())

    def read(self) -> list[KeyEntry]:
        """Read the file. Return its entries, which `replace` puts in force. Any thread may call this.

        Raises ConfigError naming the line.
        """
        entries = read_keys(self.path)
        for entry in entries:
            for name, policy in (("weight", "fair"), ("priorities", "priority")):
                if getattr(entry, name) is not None and policy != self._policy:
                    where = f"{self.path}, line {entry.line}"
                    raise ConfigError(f"{where}: {name} goes with --scheduling-policy {policy} alone")
        return entries

    def replace(self, entries: Iterable[KeyEntry]) -> None:
        """Put new entries in force. Keys that are still in the file keep their usage counts."""
        known = self._by_place
        self._by_place = {}
        for entry in entries:
            place = self._place_of(entry.sha256)
            usage = known.get(place) or KeyUsage(entry, self._clock)
            usage.entry = entry
            self._by_place[place] = usage

    def __len__(self) -> int:
        return len(self._by_place)

    def find(self, token: bytes) -> KeyUsage | None:
        """Return the usage of a key; None for a wrong key. The duration reveals nothing about other keys."""
        digest = digest_of(token)
        usage = self._by_place.get(self._place_of(digest))
        known = digest if usage is None else usage.entry.sha256
        return usage if hmac.compare_digest(digest, known) else None

    def has_expired(self, entry: KeyEntry) -> bool:
        """Return whether a key is no longer valid."""
        return entry.expires is not None and self._now() >= entry.expires

    @property
    def weights(self) -> Mapping[str, float]:
        """The weight of each tenant that has a weight."""
        entries = [usage.entry for usage in self._by_place.values()]
        return {entry.tenant: entry.weight for entry in entries if entry.weight is not None}

    def _place_of(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, digest_size=16, key=self._secret).digest()


def keys_of(
    path: str | None,
    *,
    scheduling_policy: object,
    default_reservation: int | None,
) -> Keys | None:
    """Return the keys of the file that a server's options name; None without a file. Raises ConfigError."""
    if path is None:
        return None
    reservation = DEFAULT_RESERVATION if default_reservation is None else default_reservation
    return Keys(path, scheduling_policy=scheduling_policy, default_reservation=reservation)


def salt_of(entry: KeyEntry, salt: str | None) -> str:
    """Return the prefix cache's salt for a request, which no request of another tenant can have.

    salt: the salt that the request itself gives.
    """
    # The first part ends where its JSON does: no salt makes it another one.
    return entry.cache_name if salt is None else entry.cache_name + salt


def priorities_of(entry: KeyEntry) -> tuple[float, float]:
    """Return the most urgent and the least urgent priority that a key's requests may have."""
    return (PRIORITIES["normal"], math.inf) if entry.priorities is None else entry.priorities


def priority_of(entry: KeyEntry, given: float | None) -> float | None:
    """Return the priority of a request: its own, or else the allowed priority nearest to normal.

    Raises ValueError if the request's own priority is not allowed.
    """
    if given is None and entry.priorities is None:
        return None
    first, last = priorities_of(entry)
    if given is None:
        return min(max(0.0, first), last) or None
    if not first <= given <= last:
        raise ValueError(given)
    return given
