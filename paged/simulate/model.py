"""The config of a model, from its config.json alone."""

from __future__ import annotations

from ..errors import CheckpointError, ConfigError
from ..model.config import ModelConfig
from ..model.hf_config import read_config
from ..model.hub import resolve_config


def read_model(model: str, revision: str | None = None) -> ModelConfig:
    """Read the config of a model: a local directory, a hub id or "demo". No weights are needed.

    Raises ConfigError if there is no config.json, CheckpointError or UnsupportedModelError if it is invalid.
    """
    try:
        directory = resolve_config(model, revision)
    except CheckpointError as error:
        raise ConfigError(f"model: {error}") from error
    file = directory / "config.json"
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; model must be 'demo', a hub id or a directory with it")
    return read_config(directory)
