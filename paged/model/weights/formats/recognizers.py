"""Choose the formats to look for by what config.json says of the checkpoint's quantization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..stored import Recognizer


def recognizers_of(hf: Mapping[str, Any]) -> tuple[Recognizer, ...]:  # noqa: ARG001
    """Return what recognizes the quantised weights of a checkpoint with this config.json."""
    return ()
