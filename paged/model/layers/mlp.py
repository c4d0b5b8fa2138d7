"""The feed-forward parts of a decoder layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from ...architectures.config import LAYERS, ModelConfig
from ...architectures.spec import FeedForwardSpec
from ...checkpoints.stored import StoredRows
from ..exchanges import gather
from ..part import Shard
from ..weights.forms import Role
from .linear import Linear

if TYPE_CHECKING:
    from ...kernels.operations import Kernels


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), where act is silu or GELU (Shazeer 2020).

    Gate and up are computed by one matrix product. Its kernel may apply silu(gate) * up itself.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        kernels: Kernels,
        spec: FeedForwardSpec,
        shard: Shard,
        name: str = "mlp",
    ) -> None:
        super().__init__()
        assert spec.activation in ("silu", "gelu_tanh"), f"a gated MLP has no {spec.activation}"
        self.shard = shard
        name = f"{LAYERS}{layer}.{name}"
        is_silu = spec.activation == "silu"
        self.activate = kernels.silu_and_mul if is_silu else kernels.gelu_and_mul
        parts = {f"{name}.gate_proj": spec.size, f"{name}.up_proj": spec.size}
        if spec.fused:
            parts = {f"{name}.gate_up_proj": 2 * spec.size}
        stored = StoredRows(parts, transposed=config.transposed_weights)
        if not shard.is_whole:
            gates = shard.share(spec.size)
            stored = stored.take(gates, range(spec.size + gates.start, spec.size + gates.stop))
        role: Role = "gated" if is_silu else "layer"
        self.gate_up = Linear(config.hidden_size, stored, bias=spec.bias, role=role)
        self.down = _down(config, layer, spec, shard, name)

    def forward(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        """Compute the MLP of hidden states [num_tokens, hidden_size]."""
        hidden = self.gate_up(hidden, adapters)
        inner = hidden if self.gate_up.form.gated else self.activate(hidden)
        return gather(self.down(gather(inner, self.shard), adapters), self.shard)


class PlainMLP(nn.Module):
    """down(act(up(x))), where act is GELU or the square of ReLU: an MLP without a gate."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        kernels: Kernels,
        spec: FeedForwardSpec,
        shard: Shard,
        name: str = "mlp",
    ) -> None:
        super().__init__()
        assert spec.activation in ("gelu", "gelu_tanh", "relu_squared"), f"no MLP has {spec.activation} alone"
        self.shard = shard
        self.kernels = kernels
        self.activation = spec.activation
        name = f"{LAYERS}{layer}.{name}"
        stored = StoredRows({f"{name}.up_proj": spec.size}, transposed=config.transposed_weights)
        if not shard.is_whole:
            stored = stored.take(shard.share(spec.size))
        self.up = Linear(config.hidden_size, stored, bias=spec.bias)
        self.down = _down(config, layer, spec, shard, name)

    def forward(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        """Compute the MLP of hidden states [num_tokens, hidden_size]."""
        hidden = self.up(hidden, adapters)
        if self.activation == "relu_squared":
            self.kernels.relu_squared(hidden)
        else:
            self.kernels.gelu(hidden, tanh=self.activation == "gelu_tanh")
        return gather(self.down(gather(hidden, self.shard), adapters), self.shard)


def new_mlp(
    config: ModelConfig, layer: int, kernels: Kernels, spec: FeedForwardSpec, shard: Shard, name: str = "mlp"
) -> MLP | PlainMLP:
    """Make an MLP with or without a gate.

    name: its name within the layer.
    """
    return (MLP if spec.gated else PlainMLP)(config, layer, kernels, spec, shard, name)


def _down(config: ModelConfig, layer: int, spec: FeedForwardSpec, shard: Shard, name: str) -> Linear:
    parts = {f"{name}.down_proj": config.hidden_size}
    stored = StoredRows(parts, transposed=config.transposed_weights)
    if not shard.is_whole:
        stored = stored.take(shard.share(config.hidden_size))
    num_precise = stored.num_rows if is_precise(layer, len(config.layers)) else 0
    return Linear(spec.size, stored, bias=spec.bias, num_precise=num_precise)


def is_precise(layer: int, num_layers: int) -> bool:
    """Return whether `down` of a layer is stored in more bits in an int4 model, as in llama.cpp's Q4_K_M.

    This holds for the first and last eighth of the layers, and for every third layer between: for half of all
    layers.
    """
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


class ManyExperts(nn.Module):
    """The interface of `experts.Experts`, so that models without experts need not import that module."""

    @property
    def is_recordable(self) -> bool:
        """Whether the grouped products launch no torch operation."""
        raise NotImplementedError

    def finish_loading(self) -> None:
        """Join the weights of all experts, once all are loaded."""
        raise NotImplementedError
