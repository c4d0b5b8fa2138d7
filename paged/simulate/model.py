"""The shape of a model, from its config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, ConfigError, PagedError
from ..models.config import ModelConfig

DEMO = Path(__file__).parents[1] / "demo"


def read_model(model: str) -> ModelConfig:
    """The config of a local directory, or of "demo". No weights are needed.

    Raises ConfigError if there is no config.json, CheckpointError or UnsupportedModelError if it is no good.
    """
    file = (DEMO if model == "demo" else Path(model)) / "config.json"
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; model must be 'demo' or a directory with a config.json")
    try:
        hf = json.loads(file.read_bytes())
        return ModelConfig.from_hf({"layer_types": _layer_types(hf), **hf})
    except PagedError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{file}: {error.args[0]} is missing") from error
    except (TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}") from error


def _layer_types(hf: dict[str, Any]) -> list[str]:
    """What transformers adds to configs of Qwen that do not have it."""
    windowed = hf.get("use_sliding_window") and hf.get("sliding_window")
    first = hf.get("max_window_layers", 0) if windowed else hf["num_hidden_layers"]
    num_layers = range(hf["num_hidden_layers"])
    return ["sliding_attention" if layer >= first else "full_attention" for layer in num_layers]
