"""Tensors that are multiplied by the factors of a model, as in Falcon-H1, when they are read."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from ..architectures.config import LAYERS
from ..base.errors import UnsupportedModelError
from .open_file import FileTensor
from .stored import FLOATS, StoredTensor

Factors = tuple[tuple[str, tuple[tuple[int, float], ...]], ...]  # see `TensorNames.factors`

# What holds the scales of a weight in codes, and the dimension of them that is its outputs.
_SCALES = {"scales": 1, "weight_scale": 0, "weight_scale_inv": 0}
# What such a weight has beside them.
_CODES = ("qweight", "qzeros", "g_idx", "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx")


def scaled(name: str, tensor: StoredTensor, factors: Factors) -> StoredTensor:
    """Return a tensor that is multiplied by its factors when it is read; without factors, the tensor itself.

    name: the tensor's name in the decoder.

    Raises UnsupportedModelError for a weight in codes whose scales cannot take the factors.
    """
    part = name.removeprefix(LAYERS).partition(".")[2] if name.startswith(LAYERS) else name
    module, _, last = part.rpartition(".")
    runs = dict(factors).get(f"{module}.weight" if last != "bias" else part)
    if runs is None or last in _CODES or (last == "weight" and tensor.dtype not in FLOATS):
        return tensor
    values = torch.cat([torch.full((count,), factor, dtype=torch.float32) for count, factor in runs])
    dim = _SCALES.get(last, 0)
    is_known = last in ("weight", "bias", *_SCALES) and tensor.dtype in FLOATS
    assert isinstance(tensor, FileTensor), "factors are those of safetensors files"
    given = {each.name: getattr(tensor, each.name) for each in fields(FileTensor)}
    if is_known and dim < len(tensor.shape) and tensor.shape[dim] == len(values):
        return ScaledTensor(**given, factors=values, dim=dim)
    if is_known and len(set(values.tolist())) == 1:  # of all outputs, or of blocks of them
        return ScaledTensor(**given, factors=values[:1], dim=0)
    if last in ("weight", "bias"):
        return tensor  # of another shape than config.json says, which an error will name
    raise UnsupportedModelError(
        f"{tensor.path}: {tensor.name} of shape {tensor.shape} in {tensor.dtype} cannot be multiplied by the "
        f"{len(runs)} factors that config.json has for rows of {module}; weights in floats, or in codes with "
        "a scale for each row, can"
    )


@dataclass(frozen=True, slots=True)
class ScaledTensor(FileTensor):
    """A tensor that is multiplied when it is read, in float32, and then rounded to its dtype.

    factors: f32[n], a factor for each index of the dimension `dim`; or f32[1], a factor for all numbers.
    """

    factors: Tensor = field(compare=False)
    dim: int

    def read(self, rows: slice = slice(None), out: Tensor | None = None) -> Tensor:
        found = FileTensor.read(self, rows, out)
        if not found.dim():
            return found.copy_(found.float() * self.factors[0])
        own = self.factors
        if len(own) > 1 and self.dim == 0:
            own = own[rows]
        shape = [1] * found.dim()
        shape[self.dim] = len(own)
        return found.copy_(found.float() * own.view(shape))

    def read_columns(self, rows: slice, columns: range) -> Tensor:
        return self.read(rows)[:, columns.start : columns.stop]
