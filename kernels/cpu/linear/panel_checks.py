"""Checks of packed weights, for calls from outside an engine."""

import torch
from torch import Tensor

from ...checks import (
    check_between,
    check_contiguous,
    check_device,
    check_flag,
    check_multiple,
    check_positive,
    check_shape,
    check_tensor,
)
from ..factor_heads import FACTORS_AT, TABLE_AT, FactorHead, is_valid_head
from ..formats import (
    BF12,
    BF12_GROUP,
    BF12_GROUP_BYTES,
    BF12_PAIRS,
    CODES4,
    CODES4_PAIRS,
    FORMATS,
    PANEL,
    TABLE_BYTES,
)
from ..target import LANES
from .panels import Panels, kinds_of, num_panels_of

_CPU = torch.device("cpu")


def check_bias(panels: Panels, bias: Tensor | None) -> None:
    """Raise ValueError unless the bias was made by `linear.pad` for these panels."""
    if bias is not None:
        check_shape("bias", bias, (len(panels.weight) * PANEL,), torch.float32)
        check_contiguous("bias", bias)
        check_device("bias", bias, _CPU)


def check_panels(panels: Panels) -> None:
    """Raise ValueError unless the panels have the layout that `pack`, `pack_codes` or `pack_bf12` makes."""
    if not isinstance(panels, Panels):
        raise ValueError(f"weight must be Panels, see `pack`, got {type(panels).__name__}")
    weight = panels.weight
    check_tensor("panels.weight", weight)
    check_tensor("panels.scales", panels.scales)
    dims = kinds_of(weight, panels.scales) if weight.dim() in (3, 4) else {}
    if weight.dtype not in dims or not FORMATS[dims[weight.dtype]].is_supported:
        raise ValueError(
            f"panels.weight must be in a format of this CPU, got {weight.dtype} of shape {list(weight.shape)}"
        )
    check_between("panels.out_features", panels.out_features, 1, 2**31 - 1)
    check_flag("panels.gated", panels.gated)
    check_multiple("panels.out_features", panels.out_features, "the two halves", 2 if panels.gated else 1)
    kind = panels.kind
    num_panels = num_panels_of(panels.out_features, panels.gated)
    width = dict.fromkeys((CODES4, CODES4_PAIRS), LANES)
    width |= dict.fromkeys((BF12, BF12_PAIRS), BF12_GROUP_BYTES // 2)
    last = () if weight.dim() == 3 else (1 if kind == BF12_PAIRS else 2,)
    check_shape("panels.weight", weight, (num_panels, None, width.get(kind, PANEL), *last))
    check_positive("panels.in_features", panels.in_features)
    for name, tensor in {"panels.weight": weight, "panels.scales": panels.scales}.items():
        check_tensor(name, tensor)
        check_contiguous(name, tensor)
        check_device(name, tensor, _CPU)
    if kind in (BF12, BF12_PAIRS):
        _check_exceptions(weight, panels.scales)
    elif panels.has_groups:
        _check_factors(panels)
    else:
        check_shape("panels.scales", panels.scales, (num_panels * PANEL,), torch.float32)


def _check_factors(panels: Panels) -> None:
    """Raise ValueError unless the factors' head fits the panels: the kernels go by it."""
    factors = panels.scales
    check_shape("panels.scales", factors, (None,))
    is_right = len(factors) >= FACTORS_AT
    if is_right:
        head = FactorHead(*factors[:TABLE_AT].clone().view(torch.int64).tolist())
        size = FACTORS_AT + len(panels.weight) * head.panel_bytes
        is_right = is_valid_head(head, panels.in_features) and len(factors) == size
    if not is_right:
        raise ValueError("panels.scales must be the factors that `pack_codes` made with panels.weight")


def _check_exceptions(weight: Tensor, exceptions: Tensor) -> None:
    """Raise ValueError unless every bf12 group's exceptions are in the list, and within the group."""
    check_shape("panels.scales", exceptions, (None,), torch.int32)
    heads = weight.flatten(0, 1).flatten(1)[:, TABLE_BYTES // 2 : TABLE_BYTES // 2 + 8]
    first, count = heads.contiguous().view(torch.int64).unbind(1)
    offsets = exceptions >> 8
    inside = (first >= 0) & (count >= 0) & (first <= len(exceptions)) & (count <= len(exceptions) - first)
    if not bool(inside.all()) or not bool(((offsets >= 0) & (offsets < 2 * BF12_GROUP)).all()):
        raise ValueError("panels.scales must be the exceptions that `pack_bf12` made with panels.weight")
