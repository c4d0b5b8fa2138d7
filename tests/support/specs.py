"""Read and change the layers of a ModelConfig in tests."""

from dataclasses import replace
from operator import attrgetter
from typing import Any

from paged.architectures.config import ModelConfig


def windows(config: ModelConfig) -> tuple[int | None, ...]:
    """Return each layer's sliding window."""
    return tuple(attention.window for attention in config.attentions.values())


def value_at(config: ModelConfig, path: str) -> Any:
    """Return an attribute by its path; `layer.` begins those of the first layer, `windows` is of all."""
    if path == "windows":
        return windows(config)
    return attrgetter(path.replace("layer.", "layers.", 1))(_WithFirstLayer(config))


class _WithFirstLayer:
    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self.layers = config.layers[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def with_attention(config: ModelConfig, **fields: Any) -> ModelConfig:
    """Return the config with these fields in the attention of all layers."""
    layers = (replace(each, attention=replace(each.attention, **fields)) for each in config.layers)
    return replace(config, layers=tuple(layers))
