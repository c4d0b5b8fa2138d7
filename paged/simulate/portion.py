"""Portion: what one rank holds of a model, in numbers of weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from ..architectures.config import ModelConfig
from ..architectures.spec import FeedForwardSpec, LayerSpec
from ..model.part import ModelPart, Shard


@dataclass(frozen=True, slots=True)
class Portion:
    """The layers of a rank, and its part of the tables.

    model: the config with these layers alone, each as wide as the rank's shard of it.
    num_head_params: weights of the output head that it multiplies by; 0 before the last stage.
    num_table_params: weights of embedding, head and positions that it keeps.
    """

    model: ModelConfig
    num_head_params: int
    num_table_params: int

    @classmethod
    def of(cls, model: ModelConfig, part: ModelPart | None = None) -> Self:
        """Return what computes this part of a model; None: all of it."""
        part = part or ModelPart.whole(model.num_layers)
        shard = part.shard
        table = len(shard.tokens(model.vocab_size)) * model.hidden_size
        num_tables = part.is_first + part.is_last
        if num_tables == 2 and model.tie_word_embeddings:
            num_tables = 1
        params = num_tables * table
        if part.is_first and model.learned_positions:
            params += model.max_position_embeddings * model.hidden_size
        inputs = model.layer_inputs
        if inputs is not None:
            if part.is_first:
                params += len(shard.tokens(inputs.vocab_size)) * inputs.size * model.num_layers
            inputs = replace(inputs, size=len(shard.share(inputs.size)))
        layers = tuple(_shard_of(model.layers[index], shard) for index in part.layers)
        return cls(replace(model, layers=layers, layer_inputs=inputs), table * part.is_last, params)

    @property
    def num_step_params(self) -> int:
        """The number of weights that a step of many tokens reads."""
        return self.model.num_layer_params + self.num_head_params


def _shard_of(layer: LayerSpec, shard: Shard) -> LayerSpec:
    """Return what a shard computes of a layer. One with experts is never divided."""
    mlp = layer.feed_forward
    if shard.is_whole or not isinstance(mlp, FeedForwardSpec):
        return layer
    own = replace(mlp, size=len(shard.share(mlp.size)))
    attention = layer.attention and shard.attention(layer.attention)
    return replace(
        layer, attention=attention, state=layer.state and shard.state(layer.state), feed_forward=own
    )
