"""Sizes of memory as users write them: bytes, or a text such as "8GiB"."""

from __future__ import annotations

import re
from typing import Any

from .errors import ConfigError
from .validation import shown

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b?)", re.IGNORECASE | re.ASCII)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(name: str, value: Any) -> int:
    """Return a size in bytes. In a text, KB means 1000 bytes, and both KiB and K mean 1024 bytes.

    Raises ConfigError, naming the option, for anything else, and for less than a byte.
    """
    size = None
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        base = 1000 if match[3].lower() == "b" and match[2] else 1024
        size = int(float(match[1]) * base ** _POWERS[match[2].lower()])
    if size is None or not 1 <= size < 2**63:
        raise ConfigError(f"{name} must be a number of bytes or a size such as 8GiB, got {shown(value)}")
    return size
