"""The gated activation gelu(gate) * up."""

import torch.nn.functional as F
from torch import Tensor

from ...checked import checked


@checked
def gelu_and_mul(x: Tensor, up: Tensor | None = None) -> Tensor:  # -> [num_tokens, size]
    """Return gelu(gate) * up, of x or of x and `up`; see `reference.gelu_and_mul`."""
    gate, up = x.chunk(2, dim=-1) if up is None else (x, up)
    return F.gelu(gate, approximate="tanh").mul_(up)
