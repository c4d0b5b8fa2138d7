"""The MLPs of a decoder layer."""

from __future__ import annotations

from torch import Tensor, nn

from ...kernels.backend import Kernels
from ..config import ModelConfig
from ..linear import Linear, split_rows


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), where act is silu or GELU (Shazeer 2020).

    Gate and up are one product, which may include silu(gate) * up.
    """

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels) -> None:
        super().__init__()
        assert config.activation in ("silu", "gelu_tanh"), f"a gated MLP has no {config.activation}"
        inner = config.mlp_sizes[layer]
        self.split_sizes = [inner, inner]
        self.fused, is_silu = config.fused_gate_up, config.activation == "silu"
        self.activate = kernels.silu_and_mul if is_silu else kernels.gelu_and_mul
        self.gate_up = Linear(config.hidden_size, 2 * inner, bias=config.mlp_bias, gated=is_silu)
        self.down = Linear(inner, config.hidden_size, bias=config.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:  # [num_tokens, hidden_size] -> the same
        hidden = self.gate_up(hidden)
        out: Tensor = self.down(hidden if self.gate_up.form.gated else self.activate(hidden))
        return out

    def hf_tensors(self) -> dict[str, Tensor]:
        """Return views of the parameters under their Hugging Face names, relative to the layer."""
        names, sizes = ["mlp.gate_proj", "mlp.up_proj"], self.split_sizes
        if self.fused:
            names, sizes = ["mlp.gate_up_proj"], [sum(sizes)]
        down = split_rows(["mlp.down_proj"], self.down, [self.down.out_features])
        return {**split_rows(names, self.gate_up, sizes), **down}


class PlainMLP(nn.Module):
    """down(gelu(up(x))): an MLP without a gate."""

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels) -> None:
        super().__init__()
        assert config.activation in ("gelu", "gelu_tanh"), f"an MLP without gate has no {config.activation}"
        self.kernels, self.tanh = kernels, config.activation == "gelu_tanh"
        inner = config.mlp_sizes[layer]
        self.up = Linear(config.hidden_size, inner, bias=config.mlp_bias)
        self.down = Linear(inner, config.hidden_size, bias=config.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:  # [num_tokens, hidden_size] -> the same
        hidden = self.up(hidden)
        self.kernels.gelu(hidden, tanh=self.tanh)
        out: Tensor = self.down(hidden)
        return out

    def hf_tensors(self) -> dict[str, Tensor]:
        """Return views of the parameters under their Hugging Face names, relative to the layer."""
        up = split_rows(["mlp.up_proj"], self.up, [self.up.out_features])
        return {**up, **split_rows(["mlp.down_proj"], self.down, [self.down.out_features])}
