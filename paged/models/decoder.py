"""Decoder: the one transformer that every supported architecture is an instance of."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ..batch import Batch
from ..kernels.backend import Kernels
from ..kv_cache import KVCache
from ..layers import MLP, Attention, Embedding, RMSNorm, RotaryEmbedding
from ..linear import Linear, PlainWeight, WeightForm
from .config import ModelConfig


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the additions are fused into the norms."""

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels)
        self.attention = Attention(config, layer, kernels)
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels)
        self.mlp = MLP(config, kernels)

    def forward(
        self,
        hidden: Tensor | None,  # what the layer before adds to the residual; nothing in the first layer
        residual: Tensor,  # [num_tokens, hidden_size], updated in place
        cos_sin: tuple[Tensor, Tensor],
        batch: Batch,
        kv_cache: KVCache,
    ) -> Tensor:  # like residual, to be added to it
        hidden = self.input_norm(residual) if hidden is None else self.input_norm(hidden, residual)
        hidden = self.attention(hidden, cos_sin, batch, kv_cache)
        hidden = self.post_attention_norm(hidden, residual)
        out: Tensor = self.mlp(hidden)
        return out


class Decoder(nn.Module):
    """Embedding, decoder layers, final norm and output head, over one ragged batch."""

    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        self.config, self.kernels = config, kernels
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(config)
        self.layers = nn.ModuleList(DecoderLayer(config, i, kernels) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels)
        self.head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        """Compute the batch's new tokens, writing their K and V into the cache.

        Returns [num_rows, hidden_size]: the final hidden states, behind the last norm, of `batch.rows` only.
        """
        residual: Tensor = self.embedding(batch.token_ids)
        cos_sin = self.rotary(batch)
        hidden: Tensor | None = None
        for layer in self.layers:
            hidden = layer(hidden, residual, cos_sin, batch, kv_cache)
        if not batch.num_rows:
            return residual[:0]
        assert hidden is not None
        out: Tensor = self.norm(hidden[batch.rows], residual[batch.rows])
        return out

    def logits(self, hidden: Tensor) -> Tensor:  # [n, hidden_size], from `forward` -> f32[n, vocab_size]
        """The output head."""
        logits: Tensor = self.head(hidden)
        return logits.float()

    def take_forms(self, form: Callable[[Tensor], WeightForm]) -> None:
        """Trade every linear's weight for one in this form; one tied to the embedding stays as it is."""
        for module in self.modules():
            if isinstance(module, Linear):
                tied = module.weight is self.embedding.weight
                module.take_form(PlainWeight if tied else form)

    def hf_tensors(self) -> dict[str, Tensor]:
        """Where each tensor of a Hugging Face checkpoint goes: its name and the view that takes it.

        The views cover the parameters exactly, so that a checkpoint which fills them all is complete.
        """
        tensors: dict[str, Tensor] = {
            "model.embed_tokens.weight": self.embedding.weight,
            "model.norm.weight": self.norm.weight,
        }
        if not self.config.tie_word_embeddings:
            tensors["lm_head.weight"] = self.head.weight
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            names: dict[str, Tensor] = {
                "input_layernorm.weight": layer.input_norm.weight,
                "post_attention_layernorm.weight": layer.post_attention_norm.weight,
                **layer.attention.hf_tensors(),
                **layer.mlp.hf_tensors(),
            }
            tensors.update({f"model.layers.{i}.{name}": tensor for name, tensor in names.items()})
        return {name: tensor.detach() for name, tensor in tensors.items()}
