"""The feed-forward parts of a decoder layer."""

from __future__ import annotations

from torch import Tensor, nn

from ...kernels.backend import Kernels
from ..spec import FeedForwardSpec
from .linear import Linear, split_rows


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), where act is silu or GELU (Shazeer 2020).

    Gate and up are one product, which may include silu(gate) * up.
    """

    def __init__(self, spec: FeedForwardSpec, hidden_size: int, kernels: Kernels) -> None:
        super().__init__()
        assert spec.activation in ("silu", "gelu_tanh"), f"a gated MLP has no {spec.activation}"
        self.split_sizes = [spec.size, spec.size]
        self.fused = spec.fused
        is_silu = spec.activation == "silu"
        self.activate = kernels.silu_and_mul if is_silu else kernels.gelu_and_mul
        self.gate_up = Linear(hidden_size, 2 * spec.size, bias=spec.bias, gated=is_silu)
        self.down = Linear(spec.size, hidden_size, bias=spec.bias)

    def forward(self, hidden: Tensor) -> Tensor:  # [num_tokens, hidden_size] -> the same
        hidden = self.gate_up(hidden)
        out: Tensor = self.down(hidden if self.gate_up.form.gated else self.activate(hidden))
        return out

    def hf_tensors(self) -> dict[str, Tensor]:
        """Return views of the parameters under their Hugging Face names, relative to the layer."""
        names = ["mlp.gate_proj", "mlp.up_proj"]
        sizes = self.split_sizes
        if self.fused:
            names = ["mlp.gate_up_proj"]
            sizes = [sum(sizes)]
        down = split_rows(["mlp.down_proj"], self.down, [self.down.out_features])
        return {**split_rows(names, self.gate_up, sizes), **down}


class PlainMLP(nn.Module):
    """down(gelu(up(x))): an MLP without a gate."""

    def __init__(self, spec: FeedForwardSpec, hidden_size: int, kernels: Kernels) -> None:
        super().__init__()
        assert spec.activation in ("gelu", "gelu_tanh"), f"an MLP without gate has no {spec.activation}"
        self.kernels = kernels
        self.tanh = spec.activation == "gelu_tanh"
        self.up = Linear(hidden_size, spec.size, bias=spec.bias)
        self.down = Linear(spec.size, hidden_size, bias=spec.bias)

    def forward(self, hidden: Tensor) -> Tensor:  # [num_tokens, hidden_size] -> the same
        hidden = self.up(hidden)
        self.kernels.gelu(hidden, tanh=self.tanh)
        out: Tensor = self.down(hidden)
        return out

    def hf_tensors(self) -> dict[str, Tensor]:
        """Return views of the parameters under their Hugging Face names, relative to the layer."""
        up = split_rows(["mlp.up_proj"], self.up, [self.up.out_features])
        return {**up, **split_rows(["mlp.down_proj"], self.down, [self.down.out_features])}


def new_feed_forward(spec: FeedForwardSpec, hidden_size: int, kernels: Kernels) -> MLP | PlainMLP:
    """Make the feed-forward part of a layer."""
    return (MLP if spec.gated else PlainMLP)(spec, hidden_size, kernels)
