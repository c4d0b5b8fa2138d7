"""PriorityKind: a number, or one of its names."""

from __future__ import annotations

from typing import Any

from ...base.kinds import Choice, Kind, Number, OneOf, Schema

# A lower number goes first.
PRIORITIES = {"high": -10.0, "normal": 0.0, "low": 10.0}


class PriorityKind(Kind):
    """A number, or one of PRIORITIES, which is parsed to its number."""

    types = (int, float, str)
    _kinds = OneOf((Number(), Choice(tuple(PRIORITIES))))

    def parse(self, name: str, value: Any) -> float:
        found, _ = self._kinds.parts(name, value)
        return PRIORITIES[found] if isinstance(found, str) else found

    def schema(self) -> Schema:
        return self._kinds.schema()

    def __str__(self) -> str:
        return str(self._kinds)
