"""Choose the formats to look for by what config.json says of the checkpoint's quantization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...gguf_names import GGUF_KEY
from ..stored import Recognizer
from .gguf import gguf_format


def recognizers_of(hf: Mapping[str, Any]) -> tuple[Recognizer, ...]:
    """Return what recognizes the quantised weights of a checkpoint with this config.json."""
    return (gguf_format,) if GGUF_KEY in hf else ()
