"""How long ago a moment was, in words."""

from __future__ import annotations

import time

_UNITS = ((86_400, "days"), (3_600, "hours"), (60, "minutes"), (1, "seconds"))


def ago(moment: float) -> str:
    """Return how long ago a moment was, in the largest unit that gives at least 2."""
    seconds = max(0.0, time.time() - moment)
    size, name = next(((size, name) for size, name in _UNITS if seconds >= 2 * size), _UNITS[-1])
    return f"{seconds / size:.0f} {name} ago"
