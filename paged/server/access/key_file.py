"""The keys file: a JSON object on a line for each key, which is known by its sha256 alone."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Any

from ...base.errors import ConfigError, PagedError, RequestError, ResourceError
from ...base.fields import Field, FieldTable
from ...base.json_kinds import ListOf, Text
from ...base.kinds import Integer, Kind, Number, Schema
from ...protocol.fields.common import PriorityKind
from ...protocol.limits import MAX_NAME_LENGTH

MAX_FILE_BYTES = 2**26
NEW_KEY_BYTES = 32  # random ones of a new key
KEY_PREFIX = "paged-"  # of new keys: scanners of repositories find what has one
_DIGEST = re.compile("[0-9a-f]{64}")
# The key of a file that others may read could be tried out; one that others may write lets them in.
_OTHERS = stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP


class Digest(Kind):
    """A sha256 in hexadecimal digits."""

    types = (str,)

    def parse(self, name: str, value: Any) -> bytes:
        if not isinstance(value, str) or not _DIGEST.fullmatch(value):
            raise RequestError(f"{name} must be {self}")
        return bytes.fromhex(value)

    def schema(self) -> Schema:
        return {"type": "string", "pattern": f"^{_DIGEST.pattern}$"}

    def __str__(self) -> str:
        return "64 hexadecimal digits in lower case"


class Moment(Kind):
    """A date or a time. A date begins in UTC; a time has its offset from UTC."""

    types = (str,)

    def parse(self, name: str, value: Any) -> float:
        """Return the time in seconds since 1970."""
        try:
            if len(value) == len("2027-01-31"):
                found = datetime.combine(date.fromisoformat(value), datetime.min.time(), UTC)
            else:
                found = datetime.fromisoformat(value)
            if found.tzinfo is not None:
                return found.timestamp()
        except (TypeError, ValueError, OverflowError):
            pass
        raise RequestError(f"{name} must be {self}")

    def schema(self) -> Schema:
        return {"type": "string"}

    def __str__(self) -> str:
        return "a date such as 2027-01-31, or a time such as 2027-01-31T18:00:00Z"


class PriorityRange(Kind):
    """A pair of priorities: the most urgent and the least urgent one."""

    types = (list,)

    def parse(self, name: str, value: Any) -> tuple[float, float]:
        first, last = ListOf(PriorityKind(), 2, 2).parts(name, value)[0]
        if first > last:
            raise RequestError(f"{name} must be {self}")
        return float(first), float(last)

    def schema(self) -> Schema:
        return ListOf(PriorityKind(), 2, 2).schema()

    def __str__(self) -> str:
        return 'the most and the least urgent priority, such as ["normal", "low"] or [-5, 5]'


_NAME = Text(1, MAX_NAME_LENGTH)
_COUNT = Integer(1)
KEY_TABLE = FieldTable(
    "a key",
    [
        Field("sha256", Digest(), "the sha256 of the key", required=True),
        Field("tenant", _NAME, "who uses the key; several keys may have the same tenant", required=True),
        Field(
            "weight",
            Number(0, above=True),
            "the share of the tenant with --scheduling-policy fair, by default 1; the same in all its lines",
        ),
        Field(
            "cache",
            _NAME,
            "the name of a prefix cache that the tenant shares with all others that name it, by default its "
            "own; the same in all its lines",
        ),
        Field(
            "priorities",
            PriorityRange(),
            "the most and the least urgent priority of requests, with --scheduling-policy priority; by "
            'default "normal" and any less urgent one',
        ),
        Field("models", ListOf(_NAME, 1), "the names of the model that requests may give, by default all"),
        Field("requests_per_minute", _COUNT, "most HTTP requests with a body in any 60 seconds"),
        Field("tokens_per_minute", _COUNT, "most tokens of prompts and outputs in any 60 seconds"),
        Field("concurrent_requests", _COUNT, "most HTTP requests with a body at once"),
        Field(
            "concurrent_sequences",
            _COUNT,
            "most sequences in requests in progress: each prompt, input or continuation, times its samples",
        ),
        Field("expires", Moment(), "when the key stops to be valid"),
    ],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEntry:
    """One line of a keys file. KEY_TABLE explains each field.

    line: the number of the line, from 1.
    expires: the end of the key's validity, in seconds since 1970.
    cache_name: the name of the prefix cache for the key's requests. Every tenant and every shared cache has
        its own name.
    """

    line: int
    sha256: bytes = field(repr=False)
    tenant: str
    weight: float | None = None
    cache: str | None = None
    priorities: tuple[float, float] | None = None
    models: tuple[str, ...] | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    concurrent_sequences: int | None = None
    expires: float | None = None
    cache_name: str = field(init=False)

    def __post_init__(self) -> None:
        name = ["tenant", self.tenant] if self.cache is None else ["cache", self.cache]
        object.__setattr__(self, "cache_name", json.dumps(name))


def read_keys(path: str) -> list[KeyEntry]:
    """Read the keys of a file. Raises ConfigError naming the line; the message contains no digest."""
    return parse_keys(path, _text_of(path))


def parse_keys(path: str, text: str) -> list[KeyEntry]:
    """Parse the text of a keys file, as `read_keys` does. Empty lines and # comments are skipped."""
    entries = []
    # Not splitlines, which finds line ends within strings.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            entries.append(_entry_of(path, number, line))
    if not entries:
        raise ConfigError(f"{path} has no key; paged keys new makes one")
    _check_together(path, entries)
    return entries


def _text_of(path: str) -> str:
    """Return what a file holds that others may not read or write."""
    try:
        # Without waiting for a writer, should it be a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ResourceError(f"the keys file {path} cannot be read: {reason}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ResourceError(f"the keys file {path} is not a regular file")
        if status.st_mode & _OTHERS:
            raise ResourceError(
                f"the keys file {path} can be read or written by others (mode {status.st_mode & 0o777:o}); "
                f"allow it to the server's user alone: chmod 600 {path}"
            )
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"the keys file {path} is larger than {MAX_FILE_BYTES:,} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}, line {number}: it is not UTF-8") from None


def _entry_of(path: str, number: int, line: str) -> KeyEntry:
    """Return the key of a line. Messages name fields, and no values: a key may be in a wrong place."""
    where = f"{path}, line {number}"
    try:
        given = json.loads(line, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where}: it must be a JSON object without a name twice") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: it must be a JSON object")
    kinds = {known.name: known for known in KEY_TABLE.fields}
    if given.keys() - kinds.keys():
        raise ConfigError(f"{where}: it has an unknown field; it may have {', '.join(kinds)}")
    for known in KEY_TABLE.fields:
        if known.required and given.get(known.name) is None:
            raise ConfigError(f"{where}: {known.name} is missing")
    try:
        values, _ = KEY_TABLE.parse(given)
    except PagedError as error:
        name = re.split(r"[.\[]", error.param or "", maxsplit=1)[0]
        raise ConfigError(f"{where}: {name} is wrong; it must be: {kinds[name].kind}") from None
    if "models" in values:
        values["models"] = tuple(values["models"])
    return KeyEntry(line=number, **values)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is given twice")
    return found


def _check_together(path: str, entries: Iterable[KeyEntry]) -> None:
    """Raise ConfigError for a key that is given twice, or a tenant with two weights or two caches."""
    lines: dict[bytes, int] = {}
    tenants: dict[str, KeyEntry] = {}
    for entry in entries:
        where = f"{path}, line {entry.line}"
        if (first := lines.setdefault(entry.sha256, entry.line)) != entry.line:
            raise ConfigError(f"{where}: it has the key of line {first}; give it once")
        known = tenants.setdefault(entry.tenant, entry)
        for name in ("weight", "cache"):
            if getattr(known, name) != getattr(entry, name):
                raise ConfigError(
                    f"{where}: {name} is another one than in line {known.line}, which has the same tenant"
                )


def new_key() -> str:
    """Return a new random key."""
    return KEY_PREFIX + secrets.token_urlsafe(NEW_KEY_BYTES)


def digest_of(key: bytes) -> bytes:
    """Return the sha256 of a key, as the file stores it."""
    return hashlib.sha256(key).digest()


def line_of(key: str, **values: Any) -> str:
    """Return the line for a key in the file. Raises ConfigError for a wrong value."""
    given = {name: value for name, value in values.items() if value is not None}
    line = json.dumps({"sha256": digest_of(key.encode()).hex(), **given})
    parse_keys("the new key", line)
    return line
