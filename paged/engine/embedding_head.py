"""EmbeddingHead: the layers that a checkpoint has between a pooled vector and its embedding."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..base.errors import CheckpointError
from ..checkpoints.embedding_files import Dense, EmbeddingSettings
from ..checkpoints.safetensors_file import SafetensorsFile


class EmbeddingHead:
    """Turns pooled vectors into embeddings, in float32 on the CPU, as sentence-transformers does.

    It handles one vector at a time, so that a result's bits do not depend on other vectors.

    Raises CheckpointError for weights that are missing or have the wrong shape.
    """

    def __init__(self, settings: EmbeddingSettings) -> None:
        self._steps = [_Layer(step) if isinstance(step, Dense) else None for step in settings.steps]

    def __call__(
        self,
        vector: Tensor,  # f64[hidden_size]
    ) -> Tensor:  # f64[size]
        """Return the embedding before it is cut and normalized."""
        found = vector.float()
        for layer in self._steps:
            found = functional.normalize(found, dim=0) if layer is None else layer(found)
        return found.double()


class _Layer:
    """A dense layer with its weights."""

    def __init__(self, dense: Dense) -> None:
        shape = [dense.out_features, dense.in_features]
        wanted = {"linear.weight": shape}
        if dense.bias:
            wanted["linear.bias"] = shape[:1]
        if dense.use_residual and dense.in_features != dense.out_features:
            wanted["residual.weight"] = shape
        self._dense = dense
        self._tensors = _read(dense, wanted)

    def __call__(self, vector: Tensor) -> Tensor:
        dense = self._dense
        tensors = self._tensors
        found = functional.linear(vector, tensors["linear.weight"], tensors.get("linear.bias"))
        if dense.activation is not None:
            found = getattr(functional, dense.activation)(found)
        if dense.use_residual:
            weight = tensors.get("residual.weight")
            found = found + (vector if weight is None else functional.linear(vector, weight))
        return found


def _read(dense: Dense, wanted: dict[str, list[int]]) -> dict[str, Tensor]:
    """Read the tensors of a layer, whose shapes are compared first."""
    path = dense.directory / "model.safetensors"
    with SafetensorsFile(path) as file:
        if file.tensors.keys() != wanted.keys():
            names = ", ".join(sorted(file.tensors))
            raise CheckpointError(f"{path}: must hold {', '.join(wanted)}, got {names or 'no tensor'}")
        for name, shape in wanted.items():
            stored = file.tensors[name]
            if stored.shape != shape or not stored.dtype.is_floating_point:
                raise CheckpointError(
                    f"{path}: {name} is {stored.dtype} of shape {stored.shape}, but config.json makes it "
                    f"floats of shape {shape}"
                )
        return {name: file.tensors[name].read().to(torch.float32) for name in wanted}
