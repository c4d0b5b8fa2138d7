"""StateSpec: what a layer keeps of a sequence in place of K and V of every token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """A layer that keeps a state of fixed size for each sequence, in place of K and V of every token.

    kind: "delta": a convolution, then the gated delta rule (Qwen3-Next); "mamba2": a convolution, then the
        state space of Mamba-2 (Dao & Gu 2024); "conv": a gated convolution (LFM2).
    width: how many tokens the convolution sees. columns: how many numbers of each.
    num_heads, value_dim: of values and states, of "delta" and of "mamba2", where values are x.
    num_key_heads, key_dim: of queries and keys; of "mamba2", of groups of heads, and of their C and B.
    bias: of the projection of inputs, as conv_bias and output_bias of the others.
    stored: how the checkpoint stores the inputs of "delta": by what they are, by key head, or only those of
        gates by key head.
    has_rates: whether the checkpoint has the rates of decays, -e^A_log, as GGUF files have, and not A_log.
    norm: what is normalised of each group of "mamba2": outputs times silu of their gate, or outputs before
        the gate; None: nothing is.
    limits: the least and the longest time step of "mamba2".
    """

    kind: Literal["delta", "mamba2", "conv"]
    width: int
    columns: int
    num_heads: int = 0
    num_key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    bias: bool = False
    conv_bias: bool = False
    output_bias: bool = False
    stored: Literal["by_part", "by_key_head", "gates_by_key_head"] = "by_part"
    has_rates: bool = False
    norm: Literal["gate_first", "norm_first"] | None = "norm_first"
    limits: tuple[float, float] = (0.0, math.inf)

    @property
    def last_inputs(self) -> tuple[int, int]:
        """The shape of what the convolution keeps, in the dtype of activations."""
        return self.width - 1, self.columns

    @property
    def matrices(self) -> tuple[int, int, int]:
        """The shape of what the delta rule or Mamba-2 keeps, in float32."""
        return self.num_heads, self.key_dim, self.value_dim

    def num_bytes(self, element_bytes: int) -> int:
        """Return the bytes of a sequence's state. element_bytes: of an activation."""
        return math.prod(self.last_inputs) * element_bytes + math.prod(self.matrices) * 4

    def num_params(self, hidden_size: int) -> int:
        """Return the number of weights, without norms and biases."""
        if self.kind == "conv":
            return 4 * hidden_size * self.columns + self.width * self.columns
        return hidden_size * (self.num_inputs + self.num_values) + self.width * self.columns

    @property
    def num_values(self) -> int:
        """The numbers that a token has in all heads."""
        return self.num_heads * self.value_dim

    @property
    def num_inputs(self) -> int:
        """The outputs of the projection of inputs of "delta" and "mamba2", with the gates of each head."""
        return self.columns + self.num_values + self.num_heads * (2 if self.kind == "delta" else 1)
