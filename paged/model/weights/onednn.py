"""Weights packed for oneDNN, which torch's own products on a CPU take."""

from __future__ import annotations

import torch
from torch import Tensor

from .forms import WeightForm


class PackedWeight(WeightForm):
    """A weight in oneDNN's layout, 2 to 3 times as fast for up to a few dozen rows. See `can_pack`."""

    gated = is_recordable = False
    # The number of rows that oneDNN chooses the layout for; 1 to 512 measure the same within noise.
    FOR_ROWS = 16

    def __init__(self, weight: Tensor) -> None:
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, self.FOR_ROWS)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")
        return out


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this torch packs linear layers on this CPU.

    The operations are private to torch, so this function tries them out.
    """
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if device.type != "cpu" or dtype == torch.float16 or not has_onednn:
        return False
    x = torch.arange(64, dtype=dtype).view(2, 32)
    try:
        return torch.equal(PackedWeight(torch.eye(32, dtype=dtype))(x, None), x)
    except (AttributeError, RuntimeError, TypeError):
        return False
