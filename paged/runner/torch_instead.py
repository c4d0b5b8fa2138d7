"""The backend "torch" in place of the fastest one, for a model that only plain torch computes."""

from __future__ import annotations

import logging
from functools import cache

from ..base.errors import ConfigError
from .sizes import Sizes

logger = logging.getLogger(__name__)


def require_torch(error: ConfigError, sizes: Sizes) -> None:
    """Log that plain torch computes a model. Raise `error` if the options do not allow it.

    error: why the fastest backend does not support the model.
    """
    config = sizes.config
    needs_other = config.deterministic or config.async_scheduling
    quantised_on_gpu = config.quantization is not None and sizes.device != "cpu"
    if config.attention_backend != "auto" or needs_other or quantised_on_gpu:
        raise error
    _warn(config.model, str(error).removesuffix("; use 'torch'"))


@cache  # every process of an engine, and its plan, chooses anew
def _warn(model: str, reason: str) -> None:
    logger.warning(
        "attention_backend 'torch' is taken for %s: slower, and last bits of results may depend on the "
        "batch; %s",
        model,
        reason,
    )
