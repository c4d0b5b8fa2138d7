"""StateSpec: what a layer keeps of a sequence in place of K and V of every token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """The part of a layer that stores a state of fixed size for each sequence, in place of K and V of every
    token.

    kind: "delta": a convolution, then the gated delta rule (Qwen3-Next); "mamba2": a convolution, then the
        state space of Mamba-2 (Dao & Gu 2024); "conv": a gated convolution (LFM2).
    width: number of tokens in the window of the convolution. columns: numbers per token in its input.
    num_heads, value_dim: number and dimension of the heads of values (of x for "mamba2") and of states.
    num_key_heads, key_dim: for "delta", number and dimension of the heads of queries and keys; for "mamba2",
        number of groups of heads and the size of a group's B and C.
    bias, conv_bias, output_bias: whether the input projection, the convolution and the output projection have
        a bias.
    stored: the order of the rows of "delta"'s input projections in the checkpoint: "by_part", one projection
        after another; "by_key_head"; or "gates_by_key_head", which orders only the projections of the gates
        by key head.
    has_rates: whether the checkpoint stores the rates of decays, -e^A_log, as in GGUF files, instead of
        A_log.
    norm: the order of gate and norm in each group of "mamba2": "gate_first" multiplies the outputs by
        silu(gate) before the norm, "norm_first" after the norm; None has no norm.
    limits: the minimum and the maximum time step of "mamba2".
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
        """Shape of the convolution's last inputs in a state, in the dtype of activations."""
        return self.width - 1, self.columns

    @property
    def matrices(self) -> tuple[int, int, int]:
        """Shape of the float32 matrices in a state of the delta rule or Mamba-2."""
        return self.num_heads, self.key_dim, self.value_dim

    @property
    def run_inputs(self) -> tuple[int, int]:
        """How many numbers of each token of a run are kept: of the convolution, and of the matrices."""
        return self.columns, (self.columns + self.num_gates if self.num_heads else 0)

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
        """Numbers per token in the values of all heads."""
        return self.num_heads * self.value_dim

    @property
    def num_inputs(self) -> int:
        """Number of outputs of the input projections of "delta" and "mamba2", including the gates."""
        return self.columns + self.num_values + self.num_gates

    @property
    def num_gates(self) -> int:
        """Numbers per token that decide how the matrices of all heads change."""
        return self.num_heads * (2 if self.kind == "delta" else 1)
