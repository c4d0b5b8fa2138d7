"""LayerNorm with a bias, with the addition to the residual stream before it."""

import torch.nn.functional as F
from torch import Tensor

from ...checked import checked


@checked
def layer_norm(
    x: Tensor,  # [num_rows, size]
    weight: Tensor,  # [size]
    bias: Tensor,  # [size]
    eps: float,
    residual: Tensor | None = None,  # like x, updated in place
) -> Tensor:  # [num_rows, size]
    """Return the norm of x, after residual += x if given; see `reference.layer_norm`."""
    if residual is not None:
        x = residual.add_(x)
    return F.layer_norm(x, weight.shape, weight, bias, eps)
