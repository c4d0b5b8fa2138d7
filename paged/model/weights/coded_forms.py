"""Weights in codes for torch's products: tiles of rows become floats, one after the other.

For devices and backends without kernels for codes. Results depend on the batch as in any product of torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ...checkpoints.coded import CodedWeight
from .forms import Role, TableForm

_TILE_ELEMENTS = 2**19  # of a tile in floats, so that it stays in a cache


class CodedProduct(TableForm):
    """A weight in codes that torch decodes in each product. 4-bit codes are stored two to a byte."""

    gated = is_recordable = False

    def __init__(self, weight: CodedWeight, role: Role, *, dtype: torch.dtype) -> None:  # noqa: ARG002
        self.dtype = dtype
        self.num_rows, self.num_inputs = weight.shape
        self.order = weight.order
        is_packed = weight.table is not None and self.num_inputs % 2 == 0
        codes = weight.codes
        self.weight = replace(
            weight, stored=codes[:, ::2] | codes[:, 1::2] << 4 if is_packed else codes, order=None
        )
        self.is_packed = is_packed

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.order is not None:
            x = x[:, self.order]
        out = x.new_empty(len(x), self.num_rows)
        for rows in self._tiles():
            torch.mm(x, self._floats(rows).to(x.dtype).T, out=out[:, rows])
        return out if bias is None else out.add_(bias)

    def rows(self, indices: Tensor) -> Tensor:
        found = self._floats(indices)
        if self.order is None:
            return found.to(self.dtype)
        return torch.empty_like(found, dtype=self.dtype).index_copy_(1, self.order, found.to(self.dtype))

    def _floats(self, rows: Tensor | slice) -> Tensor:
        """Return rows of the weight in float32, with columns in their stored order."""
        part = self.weight.take(rows)
        if self.is_packed:
            both = torch.stack([part.codes & 15, part.codes >> 4], dim=2)
            part = replace(part, stored=both.flatten(1))
        return part.floats()

    def _tiles(self) -> Iterator[slice]:
        step = max(1, _TILE_ELEMENTS // self.num_inputs)
        return (slice(start, min(start + step, self.num_rows)) for start in range(0, self.num_rows, step))
