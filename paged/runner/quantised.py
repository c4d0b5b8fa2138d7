"""What a quantised checkpoint, or a quantised model, needs at its start besides the weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import nn

from ..architectures.config import ModelConfig
from ..architectures.schemes import UNUSED, Quantization
from ..base.errors import ConfigError
from ..checkpoints.gguf.gguf_file import GgufTensor
from ..checkpoints.stored import Sources
from ..device.devices import is_here, weights_in_panels
from ..kernels.operations import Kernels
from ..model.layers.linear import Linear
from ..model.weights.choice import Forms, choose_forms
from ..model.weights.kv_scales import FoundScales, read_kv_scales
from ..model.weights.loading import KVScales
from ..model.weights.quantization import Int4Weight
from .sizes import Sizes

logger = logging.getLogger(__name__)


def take_scales(
    sizes: Sizes,
    model_config: ModelConfig,
    device: torch.device,
    quantization: Quantization,
    sources: Sources,
) -> tuple[Sources, Mapping[int, KVScales]]:
    """Return the tensors that weights are made of, and the scales of K and V by layer.

    The scales of K and V are read only for an fp8 cache.
    """
    found = FoundScales({}, frozenset())
    takes_scales = sizes.kv_dtype == "float8_e4m3fn" and quantization.kv_scales_are_fp8
    if takes_scales and is_here(device) and all(each.has_data for each in sources.values()):
        found = read_kv_scales(sources, model_config, device)
    return _without_unused(sources, quantization, found), found.by_layer


def require_no_blocks(sources: Sources, quantization: str) -> None:
    """Raise ConfigError if a GGUF file is already quantised."""
    found = [each for each in sources.values() if isinstance(each, GgufTensor) and each.type.in_blocks]
    if found:
        types = ", ".join(sorted({tensor.type.name for tensor in found}))
        raise ConfigError(
            f"quantization {quantization!r} is for weights in floats, but {found[0].path} has {types} "
            "already; leave it out"
        )


def _without_unused(sources: Sources, quantization: Quantization, kv_scales: FoundScales) -> Sources:
    """Leave out the scales of activations, of K and of V. Log which are used.

    kv_scales: the scales that were read.
    """
    used = {name: tensor for name, tensor in sources.items() if name.rpartition(".")[2] not in UNUSED}
    if quantization.quantizes_activations:
        logger.info("activations are not quantised: products are computed with the weights alone")
    if kv_scales.by_layer:
        logger.info("K and V have the checkpoint's scales in %d layers", len(kv_scales.by_layer))
    if num_unused := len(sources) - len(used) - len(kv_scales.names):
        logger.info("%d scales of activations, K and V in the checkpoint are not used", num_unused)
    return used


def float_forms(sizes: Sizes, kernels: Kernels, device: torch.device) -> Forms:
    """Choose the forms of weights that stay floats in a quantised model, such as a vision tower's."""
    dtype: torch.dtype = getattr(torch, sizes.dtype)
    in_panels = weights_in_panels(sizes.config, kernels, device, dtype)
    return choose_forms(device, dtype, None, tied=False, in_panels=in_panels)


def require_whole_groups(model: nn.Module) -> None:
    """Raise ConfigError for a layer whose inputs cannot be divided into int4 groups."""
    size = Int4Weight.GROUP
    for name, module in model.named_modules():
        if not isinstance(module, Linear) or module.role == "head" or module.stays_float:
            continue
        if module.in_features % size:
            raise ConfigError(
                f"quantization 'int4' divides inputs into groups of {size}, and {name} has "
                f"{module.in_features}; use quantization='int8'"
            )
