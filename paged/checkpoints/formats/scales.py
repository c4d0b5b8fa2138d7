"""Scales by tensor, output, group of inputs, or block of outputs and inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...architectures.schemes import Scheme
from ..stored import Layout, StoredPart
from .groups import FINITE, SCALES


@dataclass(frozen=True)
class ScaleLayout:
    """How scales of a weight are stored."""

    rows: int | None  # how many outputs a scale is for; None: all
    inputs: int | None
    shape: tuple[int, ...]  # of a scale for all inputs: () or (1,), as writers differ
    dtype: torch.dtype  # in memory

    @classmethod
    def of(cls, scheme: Scheme, part: StoredPart, name: str) -> ScaleLayout:
        """Return the layout of a part's scales."""
        tensor = part.get(name)
        shape = [1] if tensor is None else tensor.shape
        own = shape if scheme.scale_rows is None else shape[1:]
        is_one = math.prod(own) == 1 and len(own) <= 1
        dtype = torch.float32 if tensor is None else tensor.dtype
        if dtype == torch.float8_e8m0fnu:
            dtype = torch.bfloat16  # which holds all its numbers
        return cls(
            scheme.scale_rows,
            scheme.scale_inputs,
            tuple(own) if is_one else (1,),
            dtype if dtype in SCALES else torch.float32,
        )

    def num_groups(self, num_inputs: int) -> int:
        """Return how many scales a row of this many inputs has."""
        return 1 if self.inputs is None else -(-num_inputs // self.inputs)

    def layout(self, num_inputs: int) -> Layout:
        """Return the layout of the scales."""
        columns = self.shape if self.inputs is None else (self.num_groups(num_inputs),)
        return Layout(
            columns,
            self.dtype,
            None if self.rows is None else 0,
            self.rows or 1,
            stored_dtypes=(*SCALES, torch.float8_e8m0fnu),
            check=FINITE,
        )

    def layout_of_zeros(self, num_inputs: int) -> Layout:
        """Return the layout of integer zeros, one for each scale."""
        layout = self.layout(num_inputs)
        return layout._replace(dtype=torch.int8, stored_dtypes=(torch.int8,), check=None)

    def by_row(self, values: Tensor) -> Tensor:
        """Return what was read by `layout` as [num_rows, num_groups]."""
        return values.view(len(values), -1)
