"""Activations, LayerNorm and the highest logit of rows."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...checked import checked


@checked
def silu_and_mul(x: Tensor) -> Tensor:  # [num_tokens, 2 * size] -> [num_tokens, size]
    """Return silu(gate) * up, where x is gate and up side by side; see `reference.silu_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@checked
def gelu_and_mul(x: Tensor, up: Tensor | None = None) -> Tensor:  # -> [num_tokens, size]
    """Return gelu(gate) * up. x holds both side by side, or `up` is given; see `reference.gelu_and_mul`."""
    gate, up = x.chunk(2, dim=-1) if up is None else (x, up)
    return F.gelu(gate, approximate="tanh").mul_(up)


@checked
def layer_norm(
    x: Tensor,  # [num_rows, size]
    weight: Tensor,  # [size]
    bias: Tensor,  # [size]
    eps: float,
    residual: Tensor | None = None,  # like x, updated in place
) -> Tensor:  # [num_rows, size]
    """Return the layer norm of x, or of residual += x if a residual is given; see `reference.layer_norm`."""
    if residual is not None:
        x = residual.add_(x)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


@checked
def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:  # f32[n, vocab_size] -> i64[n], f32[n]
    """Return the index of each row's first maximum, and the maximum; see `reference.greedy`."""
    if logits.device.type != "cpu":
        # Of equal values, torch's reduction on a GPU takes the one of the lowest index.
        highest, tokens = logits.max(-1)
        return tokens, highest
    # numpy's argmax is vectorised; torch's is not on a CPU, and takes 7 times as long.
    tokens = torch.from_numpy(logits.detach().numpy().argmax(-1))
    return tokens, logits.gather(1, tokens[:, None])[:, 0]
