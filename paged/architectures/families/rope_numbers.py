"""The numbers in the description of a rotary embedding, and their bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...base.errors import CheckpointError
from ...base.validation import check_number

MAX_ROPE_FACTOR = 1e4
MIN_ROPE_NUMBER = 1e-6


def rope_number(rope: Mapping[str, Any], name: str, most: float = MAX_ROPE_FACTOR) -> float:
    """Return the value of a key of rope_parameters: a positive number up to `most`."""
    return positive(name, rope[name], most)


def positive(name: str, value: Any, most: float = MAX_ROPE_FACTOR) -> float:
    """Return a number whose powers and reciprocals float32 represents."""
    check_number(CheckpointError, name, value, 0, most, above=True)
    return check_number(CheckpointError, name, value, MIN_ROPE_NUMBER)
