"""The backend "torch" in place of the fastest one, for a model that only plain torch computes."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

import torch

from ..base.errors import ConfigError, ResourceError
from .sizes import Sizes

if TYPE_CHECKING:
    from ..kernels.operations import Kernels

logger = logging.getLogger(__name__)


def require_torch(
    kernels: Kernels, head_dims: set[int], group: int, sizes: Sizes, device: torch.device
) -> None:
    """Log that plain torch computes a model, since `kernels` do not support its attention.

    group: the largest number of query heads that share a KV head.

    Raises ConfigError if the options allow no other backend.
    """
    config = sizes.config
    needs_other = config.deterministic or config.async_scheduling
    quantised_on_gpu = config.quantization is not None and device.type != "cpu"
    error = _error_of(kernels, head_dims, group, sizes.target, device)
    if config.attention_backend != "auto" or needs_other or quantised_on_gpu:
        raise error
    if sizes.part is None or (sizes.part.is_last and sizes.shard.index == 0):  # the other ranks do the same
        _warn(config.model, str(error).removesuffix("; use 'torch'"))


def _error_of(
    kernels: Kernels, head_dims: set[int], group: int, target: str, device: torch.device
) -> ConfigError:
    """Return an error that says what the backend's attention lacks."""
    prefix = f"attention_backend {kernels.name!r}"
    try:
        dims = kernels.head_dims(target)
    except ValueError as error:
        return ResourceError(f"{prefix}: {error}")
    lacks = [
        f"a head_dim from {dims[0]} to {dims[-1]} on this device, {device}; this model's is {head_dim}"
        for head_dim in sorted(head_dims)
        if head_dim not in dims
    ]
    lacks.append(f"at most {kernels.max_group} query heads for a KV head; this model has {group}")
    return ConfigError(f"{prefix} takes {lacks[0]}; use 'torch'")


@cache  # an engine asks for kernels several times
def _warn(model: str, reason: str) -> None:
    logger.warning(
        "attention_backend 'torch' is taken for %s: slower, and last bits of results may depend on the "
        "batch; %s",
        model,
        reason,
    )
