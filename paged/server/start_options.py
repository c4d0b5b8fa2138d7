"""The options of an engine, as they are sent to its process."""

from __future__ import annotations

import os
import sys
from typing import Any

from ..base.validation import shown
from ..config import EngineConfig
from ..errors import ConfigError


def sendable_options(config: EngineConfig, options: dict[str, Any], replicas: int) -> dict[str, Any]:
    """Return options of an engine as plain values. Raises ConfigError for what cannot be sent."""
    if not isinstance(config.scheduling_policy, str):
        policy = shown(config.scheduling_policy)
        raise ConfigError(f"scheduling_policy of an engine in another process must be a name, got {policy}")
    # With device "auto" each process finds out, as does one on another system than Linux.
    is_shared = replicas > 1 and config.device == "cpu" and sys.platform == "linux"
    if is_shared and replicas > (cores := len(os.sched_getaffinity(0))):
        raise ConfigError(f"{replicas} replicas need as many CPU cores; there are {cores}")
    if replicas > 1 and ":" in config.device:
        raise ConfigError(f"{replicas} replicas have a GPU each; give device 'cuda', got {config.device!r}")
    sent = dict(options)
    if "dtype" in sent:
        sent["dtype"] = config.dtype  # the name of torch's
    return sent
