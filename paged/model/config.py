"""ModelConfig: the shape and options of a decoder. `hf_config` reads it from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DEMO = Path(__file__).parents[1] / "demo"  # the checkpoint that model="demo" stands for


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The base of a rotary embedding, and how it is scaled beyond the trained context."""

    type: str  # "default", "linear", "dynamic" or "llama3"
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with the same window, which share block tables because they see the same tokens."""

    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder. The supported architectures differ in the flags only."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layer_windows: tuple[int | None, ...]  # each layer's sliding window in tokens; None: full attention
    dtype: str  # of the checkpoint

    @property
    def max_context(self) -> int:
        """The longest sequence that positions exist for; dynamic and linear scaling extend it."""
        if self.rope.type in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.rope.factor)
        return self.max_position_embeddings

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """The layers by window, in groups of equal size, so that one pool's blocks fit every group.

        The size is that of the smallest set of layers with the same window. If it does not divide a larger
        set, the last group of that set has fewer layers, and its blocks leave space unused.
        """
        by_window: dict[int | None, list[int]] = {}
        for layer, window in enumerate(self.layer_windows):
            by_window.setdefault(window, []).append(layer)
        size = min(map(len, by_window.values()))
        return tuple(
            LayerGroup(window, tuple(layers[i : i + size]))
            for window, layers in by_window.items()
            for i in range(0, len(layers), size)
        )

    @property
    def num_layer_params(self) -> int:
        """The number of weights in all layers, without embedding, head, norms and biases."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim  # Q and O, K and V
        return self.num_layers * self.hidden_size * (attention + 3 * self.intermediate_size)

    @property
    def kv_heads_per_slot(self) -> int:
        """The K heads and V heads of one token, summed over the layers of one group."""
        return 2 * len(self.layer_groups[0].layers) * self.num_kv_heads
