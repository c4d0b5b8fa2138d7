"""StateSpec: what a layer keeps of a sequence in place of K and V of every token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """A layer that keeps a state of fixed size for each sequence, in place of K and V of every token.

    kind: "delta": a convolution, then the gated delta rule (Qwen3-Next); "conv": a gated convolution (LFM2).
    width: number of tokens that the convolution sees. columns: numbers per token in its input.
    num_heads, value_dim: heads and head dimension of the values and states of "delta"; num_key_heads,
        key_dim: heads and head dimension of its queries and keys.
    stored: how the checkpoint orders the input projections of "delta": by projection, or by key head.
    """

    kind: Literal["delta", "conv"]
    width: int
    columns: int
    num_heads: int = 0
    num_key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    bias: bool = False  # of the projections and of the convolution
    stored: Literal["by_part", "by_key_head"] = "by_part"

    @property
    def last_inputs(self) -> tuple[int, int]:
        """Shape of the last inputs that the convolution keeps, in the dtype of activations."""
        return self.width - 1, self.columns

    @property
    def matrices(self) -> tuple[int, int, int]:
        """Shape of the matrices that the delta rule keeps, in float32."""
        return self.num_heads, self.key_dim, self.value_dim

    def num_bytes(self, element_bytes: int) -> int:
        """Return the bytes of a sequence's state.

        element_bytes: bytes of one number of an activation.
        """
        return math.prod(self.last_inputs) * element_bytes + math.prod(self.matrices) * 4

    def num_params(self, hidden_size: int) -> int:
        """Return the number of weights, without norms and biases."""
        if self.kind == "conv":
            return 4 * hidden_size * self.columns + self.width * self.columns
        values = self.num_heads * self.value_dim
        inputs = self.columns + values + 2 * self.num_heads
        return hidden_size * (inputs + values) + self.width * self.columns
