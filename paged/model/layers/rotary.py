"""Rotary embeddings: the angles of every token, and the frequencies of each type of scaling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...architectures.config import ModelConfig
from ...architectures.spec import RopeConfig
from ..batch import Batch
from .frequencies import inverse_frequencies

if TYPE_CHECKING:
    from ...kernels.operations import Kernels


class Angles(NamedTuple):
    """The cosines and sines that rotate each token's query and key, and a factor for each query.

    query_factors: each token's queries are multiplied by its factor; None if all factors are 1.
    """

    cos: Tensor  # f32[num_tokens, head_dim // 2]
    sin: Tensor  # like cos
    query_factors: Tensor | None  # f32[num_tokens, 1]

    def take(self, indices: Tensor, kernels: Kernels) -> Angles:
        """Return the angles of the tokens with these indices, i64[n]."""
        cos = kernels.take_rows(self.cos, indices)
        sin = kernels.take_rows(self.sin, indices)
        factors = None
        if self.query_factors is not None:
            factors = kernels.take_rows(self.query_factors, indices)
        return Angles(cos, sin, factors)


class RotaryEmbedding(nn.Module):
    """The angles of every token, computed once per step for all layers with these frequencies."""

    inv_freq: Tensor  # f32[rotary_dim // 2]
    long_inv_freq: Tensor  # like inv_freq, for positions from long_offset on, if that is not 0

    def __init__(self, rope: RopeConfig, head_dim: int, config: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self._table: Angles | None = None
        self.rope = rope
        self.head_dim = head_dim
        self.rotary_dim = rope.rotary_dim or head_dim
        self.max_position_embeddings = config.max_position_embeddings
        # Frequencies are float32 in a model of any dtype.
        with torch.device("cpu"):
            frequencies = scaled_frequencies(rope, self.rotary_dim)
            long = scaled_frequencies(rope, self.rotary_dim, is_long=True)
        self.long_offset = config.long_context.offset if config.long_context else 0
        self.sections = None if config.vision is None else config.vision.sections
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.register_buffer("long_inv_freq", long, persistent=False)

    @property
    def is_tabulated(self) -> bool:
        """Whether steps take the angles from a precomputed table."""
        return self._table is not None

    def tabulate(self, num_positions: int) -> None:
        """Precompute the angles of the first positions. Call this once: recorded steps hold its address."""
        assert self._table is None, "the table must not move"
        positions = torch.arange(num_positions, device=self.inv_freq.device)
        angles = self._angles(positions, self.inv_freq)
        if self.long_offset:
            angles = _with_long_rows(angles, self._angles(positions, self.long_inv_freq), self.long_offset)
        if num_positions <= self.rope.original_max_position_embeddings:
            angles = angles._replace(query_factors=None)
        self._table = angles

    def forward(self, batch: Batch) -> Angles:
        if batch.grid_positions is not None:
            from .grid_angles import write_sections

            assert self.sections is not None, "positions are of three numbers in models of images alone"
            angles, rows, columns = (self._plain(own.contiguous()) for own in batch.grid_positions)
            write_sections(self.sections, angles.cos, rows.cos, columns.cos)
            write_sections(self.sections, angles.sin, rows.sin, columns.sin)
            return angles
        if self._table is None:
            if self.rope.type == "dynamic":
                from .dynamic_rope import dynamic_frequencies

                assert batch.rope_lens is not None, "dynamic rope needs the lengths of the sequences"
                trained = self.max_position_embeddings
                lengths = batch.rope_lens.clamp(min=trained)
                frequencies = dynamic_frequencies(self.rope, self.rotary_dim, trained, lengths)
                return self._angles(batch.positions, frequencies)
            if not self.long_offset:
                return self._angles(batch.positions, self.inv_freq)
            is_long = (batch.positions >= self.long_offset)[:, None]
            frequencies = torch.where(is_long, self.long_inv_freq, self.inv_freq)
            return self._angles(batch.positions % self.long_offset, frequencies)
        return self._table.take(batch.positions, self.kernels)

    def _plain(self, positions: Tensor) -> Angles:
        if self._table is None:
            return self._angles(positions, self.inv_freq)
        return self._table.take(positions, self.kernels)

    def _angles(self, positions: Tensor, frequencies: Tensor) -> Angles:
        """Compute the angles of positions: cos 1 and sin 0 for dimensions that are not rotated."""
        angles = positions[:, None] * frequencies
        cos = angles.cos()
        sin = angles.sin_()
        if self.rope.attention_factor != 1.0:
            cos = cos.mul_(self.rope.attention_factor)
            sin = sin.mul_(self.rope.attention_factor)
        if kept := (self.head_dim - self.rotary_dim) // 2:
            cos = F.pad(cos, (0, kept), value=1.0)
            sin = F.pad(sin, (0, kept))
        return Angles(cos, sin, self._query_factors(positions))

    def _query_factors(self, positions: Tensor) -> Tensor | None:
        """Compute the factors of queries, which grow with the position and sharpen attention (Llama 4)."""
        beta = self.rope.query_scaling_beta
        trained = self.rope.original_max_position_embeddings
        if not beta:
            return None
        spans = positions.div(trained, rounding_mode="floor")  # trained contexts before the token's own
        return (1 + beta * torch.log(1 + spans.float()))[:, None]


def _with_long_rows(short: Angles, long: Angles, offset: int) -> Angles:
    """Return one table with the rows of `long` from `offset` on. Nothing reads the rows between."""

    def joined(first: Tensor, second: Tensor) -> Tensor:
        rows = first.new_empty(offset + len(second), first.shape[1])
        rows[: len(first)] = first
        rows[offset:] = second
        return rows

    factors = short.query_factors, long.query_factors
    return Angles(
        joined(short.cos, long.cos),
        joined(short.sin, long.sin),
        None if factors[0] is None or factors[1] is None else joined(factors[0], factors[1]),
    )


def scaled_frequencies(
    rope: RopeConfig, rotary_dim: int, *, is_long: bool = False
) -> Tensor:  # f32[rotary_dim // 2]
    """Compute the rotary frequencies. Dynamic RoPE is scaled later, in each step.

    is_long: whether to use longrope's factors for requests beyond the trained context.
    """
    frequencies = inverse_frequencies(torch.tensor([rope.theta], dtype=torch.float32), rotary_dim)
    if rope.type in ("default", "dynamic"):
        return frequencies
    from .scaled_rope import scaled

    return scaled(frequencies, rope, rotary_dim, is_long=is_long)


def rotated_order(rope: RopeConfig, head_dim: int) -> Tensor | None:  # i64[head_dim]
    """Return the order of a head's dimensions in which kernels rotate i with i + head_dim // 2.

    The dimensions that are not rotated come last in each half. Returns None if the checkpoint has this order.
    """
    rotary_dim = rope.rotary_dim or head_dim
    if rotary_dim == head_dim and not rope.interleaved:
        return None
    dims = torch.arange(head_dim, device="cpu")
    rotated, others = dims[:rotary_dim], dims[rotary_dim:]
    halves = (rotated[::2], rotated[1::2]) if rope.interleaved else rotated.chunk(2)
    both = zip(halves, others.tensor_split(2), strict=True)
    return torch.cat([part for half in both for part in half])


class TokenRows(NamedTuple):
    """Per-token inputs of every layer: row i belongs to token i.

    angles: the angles of each rotary embedding of the model.
    inputs: the per-layer vectors of all layers, see PerLayerEmbeddings; None if the model has none.
    real_count, adapters: see `Batch`.
    """

    angles: Sequence[Angles]
    inputs: Tensor | None
    real_count: Tensor | None = None
    adapters: Tensor | None = None

    def take(self, indices: Tensor, kernels: Kernels) -> TokenRows:
        """Return the rows with these indices, i64[n]. Their adapters are left out."""
        inputs = None if self.inputs is None else kernels.take_rows(self.inputs, indices)
        return TokenRows([angles.take(indices, kernels) for angles in self.angles], inputs)
