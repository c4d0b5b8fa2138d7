"""The config of a model, from its config.json alone."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError
from ..model.config import DEMO, ModelConfig
from ..model.hf_config import read_config


def read_model(model: str) -> ModelConfig:
    """Read the config of a local directory or of "demo". No weights are needed.

    Raises ConfigError if there is no config.json, CheckpointError or UnsupportedModelError if it is invalid.
    """
    file = (DEMO if model == "demo" else Path(model)) / "config.json"
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; model must be 'demo' or a directory with a config.json")
    return read_config(file.parent)
