"""The config of a model, from its config.json, and from the headers of its weights if they are there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..architectures.config import ModelConfig
from ..architectures.hf_config import read_config
from ..base.errors import CheckpointError, MissingModelError
from ..checkpoints.model_directory import resolve_config


def read_model(model: str, revision: str | None = None) -> ModelConfig:
    """Read the config of a model: a local directory, a hub id or "demo". No weights are needed.

    Raises CheckpointError if there is no config.json, or it is invalid, and UnsupportedModelError.
    """
    try:
        directory = resolve_config(model, revision)
    except CheckpointError as error:
        raise type(error)(f"model: {error}") from error
    file = directory / "config.json"
    if not file.is_file():
        raise MissingModelError(
            f"{file}: no such file; model must be 'demo', a hub id or a directory with it"
        )
    config = read_config(directory)
    if config.layer_bits is None or not any(directory.glob("*.safetensors")):
        return config
    return replace(config, layer_bits=_stored_layer_bits(directory, config))


def _stored_layer_bits(directory: Path, config: ModelConfig) -> float:
    """Return the bits that a weight of the layers takes in its files, on average."""
    # Only here, as a simulation of other models needs no torch.
    from ..checkpoints.formats.recognizers import KEPT
    from ..model.weights.loading import open_tensors

    with open_tensors(directory, config.tensor_names) as sources:
        num_bytes = sum(
            tensor.num_bytes
            for name, tensor in sources.items()
            if not name.startswith(("model.embed_", "lm_head."))
            and ((last := name.rpartition(".")[2]) in KEPT or (last == "weight" and len(tensor.shape) == 2))
        )
    return 8 * num_bytes / config.num_layer_params
