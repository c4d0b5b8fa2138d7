"""LoRA adapters over several ranks: the driver sends each rank the matrices of its layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..architectures.config import LAYERS
from ..checkpoints.lora_adapter import LoraPart
from ..model.part import ModelPart

Shapes = Mapping[str, tuple[int, int, int]]  # rank, rows and inputs of each adapted matrix, by its name


def names_in(part: ModelPart, names: Iterable[str]) -> list[str]:
    """Return those matrices of a model that a part of it computes, in this order."""
    return [name for name in names if _layer_of(name) in part.layers]


def _layer_of(name: str) -> int:
    """Return the layer of a matrix. Matrices before all layers are computed with the first."""
    return int(name.removeprefix(LAYERS).partition(".")[0]) if name.startswith(LAYERS) else 0


def packed(parts: Mapping[str, LoraPart], names: Sequence[str], dtype: torch.dtype) -> Tensor:
    """Return the numbers of these matrices, rounded to `dtype` as slots have them."""
    return torch.cat([each.to(dtype).flatten() for name in names for each in parts[name]])


def num_numbers(shapes: Shapes) -> int:
    """Return how many numbers `packed` gives for matrices of these shapes."""
    return sum(rank * (num_rows + num_inputs) for rank, num_rows, num_inputs in shapes.values())


def unpacked(sent: Tensor, shapes: Shapes) -> dict[str, LoraPart]:
    """Return the matrices that `packed` has packed, by name."""
    found = {}
    for name, (rank, num_rows, num_inputs) in shapes.items():
        a, b, sent = torch.split(
            sent, [rank * num_inputs, num_rows * rank, len(sent) - rank * (num_rows + num_inputs)]
        )
        found[name] = LoraPart(a.view(rank, num_inputs), b.view(num_rows, rank))
    return found
