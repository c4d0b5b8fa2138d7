"""The hosts from which images may be fetched: allowed_media_domains."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..base.errors import ConfigError
from ..base.validation import shown

HTTPS_PORT = 443
# A name in ASCII, with a letter in its last label: no address in any spelling.
HOST = r"(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*(?!0x)[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_ENTRY = re.compile(rf"({HOST})(?::(\d{{1,5}}))?", re.IGNORECASE | re.ASCII)
MOST_HOST = 253


def media_domains_of(value: object) -> tuple[str, ...]:
    """Return the hosts in lower case, with a port if it is not 443. Raises ConfigError."""
    if value is None:
        return ()
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, Sequence):
        raise ConfigError(f"allowed_media_domains must be a list of names of hosts, got {shown(value)}")
    return tuple(map(_domain, entries))


def _domain(entry: object) -> str:
    found = _ENTRY.fullmatch(entry) if isinstance(entry, str) else None
    host, port = ("", "") if found is None else (found[1].lower(), found[2])
    if not 0 < len(host) <= MOST_HOST or host.rpartition(".")[2].isdigit() or int(port or 1) > 65535:
        raise ConfigError(
            "allowed_media_domains must be names of hosts such as images.example or images.example:8443, in "
            f"ASCII (xn-- for other letters) and no addresses, got {shown(entry)}"
        )
    return host if port is None or int(port) == HTTPS_PORT else f"{host}:{int(port)}"
