"""The options about images that few engines are given: limit_mm_per_prompt and mm_processor_kwargs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..base.errors import ConfigError
from ..base.validation import check_int, shown

OPTION = "limit_mm_per_prompt"
MAX_IMAGES = 4096


def check_kwargs(kwargs: object) -> None:
    """Raise ConfigError unless mm_processor_kwargs are values by name, which the processor knows."""
    is_dict = isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)
    if kwargs is not None and not is_dict:
        raise ConfigError(f"mm_processor_kwargs must be a dict of names and values, got {shown(kwargs)}")


def image_limits_of(limits: object) -> dict[str, int] | None:
    """Return the limits as numbers; vLLM also writes {"image": {"count": 4}}. Raises ConfigError."""
    if limits is None:
        return None
    if not isinstance(limits, Mapping):
        raise ConfigError(f'{OPTION} must be a dict such as {{"image": 4}}, got {shown(limits)}')
    return {kind: _limit_of(kind, limit) for kind, limit in limits.items()}


def _limit_of(kind: Any, limit: Any) -> int:
    if kind not in ("image", "audio", "video"):
        raise ConfigError(f"{OPTION} has {shown(kind)}; it takes image")
    name = f"{OPTION}[{kind!r}]"
    if isinstance(limit, Mapping):
        for key in limit:
            if key != "count":
                raise ConfigError(
                    f"{name} has {shown(key)}; it takes count. No memory is measured with images of a given "
                    "size: mm_processor_kwargs bounds the size of images"
                )
        if "count" not in limit:
            raise ConfigError(f'{name} must be an int, or a dict such as {{"count": 4}}, got {{}}')
        name = f"{name}['count']"
        limit = limit["count"]
    if kind != "image" and limit != 0:
        raise ConfigError(f"{name} must be 0, as {kind} is not supported, got {shown(limit)}")
    return check_int(ConfigError, name, limit, 0, MAX_IMAGES)
