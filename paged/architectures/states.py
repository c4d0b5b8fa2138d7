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
    width: number of tokens that the convolution sees. columns: numbers per token in its input.
    num_heads, value_dim: heads and head dimension of the values and states of "delta", and of x and the
        states of "mamba2".
    num_key_heads, key_dim: heads and head dimension of the queries and keys of "delta"; groups of heads, and
        the size of their B and C, of "mamba2".
    bias, conv_bias, output_bias: whether the input projection, the convolution and the output projection have
        a bias.
    stored: how the checkpoint orders the input projections of "delta": by projection, by key head, or only
        those of the gates by key head.
    has_rates: whether the checkpoint has the rates of decays, -e^A_log, as GGUF files have, and not A_log.
    norm: what is normalised in each group of "mamba2": the outputs times silu of their gate, or the outputs
        before the gate is applied; None: nothing is.
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
        """Shape of the last inputs that the convolution keeps, in the dtype of activations."""
        return self.width - 1, self.columns

    @property
    def matrices(self) -> tuple[int, int, int]:
        """Shape of the matrices that the delta rule or Mamba-2 keeps, in float32."""
        return self.num_heads, self.key_dim, self.value_dim

    @property
    def run_inputs(self) -> tuple[int, int]:
        """How many numbers of each token of a run are kept: of the convolution, and of the delta rule."""
        return self.columns, (self.columns + 2 * self.num_heads if self.num_heads else 0)

    def num_bytes(self, element_bytes: int, num_run_places: int = 0) -> int:
        """Return the bytes of a sequence's state, and of the inputs of so many tokens of runs.

        element_bytes: bytes of one number of an activation.
        """
        inputs = math.prod(self.last_inputs) + num_run_places * sum(self.run_inputs)
        return inputs * element_bytes + math.prod(self.matrices) * 4

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
