"""Per-layer embeddings (PLE): a vector for each token and layer, gated by the residual and added to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...architectures.config import LAYERS, ModelConfig
from ...checkpoints.stored import StoredRows
from ..exchanges import gather
from ..part import ModelPart, Shard
from .linear import Embedding, Linear
from .norms import RMSNorm

if TYPE_CHECKING:
    from ...kernels.operations import Kernels


class PerLayerEmbeddings(nn.Module):
    """The per-layer vectors of each token: a separate embedding, plus a projection of the usual embedding.

    transformers multiplies the projection by hidden_size ** -0.5 before its norm; here the norm's eps
    accounts for that factor. transformers multiplies the sum by 2 ** -0.5; here the norm in `PerLayerGate`
    accounts for that.
    """

    def __init__(self, config: ModelConfig, kernels: Kernels, shard: Shard) -> None:
        super().__init__()
        assert config.layer_inputs is not None
        self.kernels = kernels
        self.shard = shard
        self.size = config.layer_inputs.size
        width = config.num_layers * self.size
        table = StoredRows({"model.embed_tokens_per_layer": config.layer_inputs.vocab_size})
        self.embed_tokens_per_layer = Embedding(table, width, "table", kernels, shard)
        projection = StoredRows({"model.per_layer_model_projection": width})
        if not shard.is_whole:
            projection = projection.take(shard.share(width))
        self.per_layer_model_projection = Linear(config.hidden_size, projection, bias=False)
        eps = config.norm.eps * config.hidden_size
        self.per_layer_projection_norm = RMSNorm(self.size, eps, kernels, "model.per_layer_projection_norm")
        dtype = self.per_layer_projection_norm.weight.dtype
        self.factor = float(torch.tensor(self.size**0.5, dtype=dtype, device="cpu"))

    def forward(self, token_ids: Tensor, embedded: Tensor, adapters: Tensor | None = None) -> Tensor:
        """Return the vectors of all layers, [num_tokens, num_layers * size].

        embedded: [num_tokens, hidden_size], already multiplied by the embedding's scale.
        adapters: see `Batch`.
        """
        inputs: Tensor = self.embed_tokens_per_layer(token_ids)
        self.kernels.scale_and_cap(inputs, self.factor)
        projected = gather(self.per_layer_model_projection(embedded, adapters), self.shard)
        by_layer = projected.view(-1, self.size)
        self.per_layer_projection_norm.into(by_layer, inputs.view(-1, self.size), add=True)
        return inputs


class PerLayerGate(nn.Module):
    """Adds norm(W (gelu(G residual) * x)) to the residual, where x is the layer's vector of each token.

    part: the part of the model. The inputs of `forward` begin with its first layer.
    """

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels, part: ModelPart) -> None:
        super().__init__()
        assert config.layer_inputs is not None
        self.kernels = kernels
        self.shard = shard = part.shard
        size = config.layer_inputs.size
        own = shard.share(size)
        start = (layer - part.layers.start) * size + own.start
        self.columns = slice(start, start + len(own))
        name = f"{LAYERS}{layer}"
        gate = StoredRows({f"{name}.per_layer_input_gate": size})
        projection = StoredRows({f"{name}.per_layer_projection": config.hidden_size})
        if not shard.is_whole:
            gate = gate.take(own)
            projection = projection.take(shard.share(config.hidden_size))
        self.per_layer_input_gate = Linear(config.hidden_size, gate, bias=False)
        self.per_layer_projection = Linear(size, projection, bias=False)
        # x comes multiplied by 2 ** 0.5: see PerLayerEmbeddings.
        self.post_per_layer_input_norm = RMSNorm(
            config.hidden_size, 2 * config.norm.eps, kernels, f"{name}.post_per_layer_input_norm"
        )

    def forward(self, inputs: Tensor, residual: Tensor, adapters: Tensor | None = None) -> None:
        """Update the residual [num_tokens, hidden_size] in place.

        inputs: the per-layer vectors of this part's layers.
        adapters: see `Batch`.
        """
        gate = self.per_layer_input_gate(residual, adapters)
        gated = self.kernels.gelu_and_mul(gate, inputs[:, self.columns])
        projected = gather(self.per_layer_projection(gather(gated, self.shard), adapters), self.shard)
        self.post_per_layer_input_norm.into(projected, residual, add=True)
