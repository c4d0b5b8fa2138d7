"""Decoder: the transformer that computes every supported architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ..kernels.backend import Kernels
from .batch import Batch, Queries
from .config import ModelConfig
from .kv_cache import KVCache
from .layers import MLP, Attention, Embedding, RMSNorm, RotaryEmbedding
from .linear import Linear
from .weight_forms import Forms


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the additions are fused into the norms."""

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels)
        self.attention = Attention(config, layer, kernels)
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels)
        self.mlp = MLP(config, kernels)

    def project(
        self,
        hidden: Tensor | None,  # the previous layer's output, to be added to the residual
        residual: Tensor,  # [num_tokens, hidden_size], updated in place
        cos_sin: tuple[Tensor, Tensor],
        batch: Batch,
        kv_cache: KVCache,
    ) -> Tensor:  # [num_tokens, num_heads, head_dim]
        """Write K and V of the new tokens into the cache. Return their queries."""
        hidden = self.input_norm(residual) if hidden is None else self.input_norm(hidden, residual)
        return self.attention.project(hidden, cos_sin, batch, kv_cache)

    def attend(self, query: Tensor, residual: Tensor, queries: Queries, kv_cache: KVCache) -> Tensor:
        """Run the layer from attention on. Return what it adds to the residual, which is updated in place."""
        hidden = self.attention.attend(query, queries, kv_cache)
        hidden = self.post_attention_norm(hidden, residual)
        out: Tensor = self.mlp(hidden)
        return out

    def hf_tensors(self) -> dict[str, Tensor]:
        """Return views of the parameters under their Hugging Face names, relative to the layer."""
        return {
            "input_layernorm.weight": self.input_norm.weight,
            "post_attention_layernorm.weight": self.post_attention_norm.weight,
            **self.attention.hf_tensors(),
            **self.mlp.hf_tensors(),
        }


class Decoder(nn.Module):
    """Embedding, decoder layers, final norm and output head, over one ragged batch."""

    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        self.config, self.kernels = config, kernels
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(config, kernels)
        layers = nn.ModuleList(DecoderLayer(config, i, kernels) for i in range(config.num_layers))
        self.layers = cast(Sequence[DecoderLayer], layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels)
        self.head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            del self.head.weight  # the head shares the embedding's form

    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        """Compute the batch's new tokens, and write their K and V into the cache.

        Returns [num_output_rows, hidden_size]: the hidden states of `batch.output_rows` after the final norm.
        """
        return self.attend_last(*self.compute_kv(batch, kv_cache), batch, kv_cache)

    def compute_kv(self, batch: Batch, kv_cache: KVCache) -> tuple[Tensor, Tensor]:
        """Run the model up to the last layer's K and V, which is all that later tokens need.

        Returns the last layer's queries [num_tokens, num_heads, head_dim], and the residual
        [num_tokens, hidden_size].
        """
        residual: Tensor = self.embedding(batch.token_ids)
        cos_sin = self.rotary(batch)
        hidden: Tensor | None = None
        *layers, last = self.layers
        for layer in layers:
            query = layer.project(hidden, residual, cos_sin, batch, kv_cache)
            hidden = layer.attend(query, residual, batch.queries, kv_cache)
        return last.project(hidden, residual, cos_sin, batch, kv_cache), residual

    def attend_last(self, query: Tensor, residual: Tensor, batch: Batch, kv_cache: KVCache) -> Tensor:
        """Run what remains after `compute_kv`, for `batch.output_rows` only: few tokens of most prompts."""
        if batch.output_queries is None:
            return residual[:0]
        if not batch.is_decode:
            # Not torch's indexing, whose threads go on looking for work for milliseconds.
            rows, take_rows = batch.output_rows, self.kernels.take_rows
            query = take_rows(query.flatten(1), rows).view(-1, *query.shape[1:])
            residual = take_rows(residual, rows)
        hidden = self.layers[-1].attend(query, residual, batch.output_queries, kv_cache)
        out: Tensor = self.norm(hidden, residual)
        return out

    def logits(self, hidden: Tensor) -> Tensor:  # [n, hidden_size], from `forward` -> f32[n, vocab_size]
        """Apply the output head."""
        logits: Tensor = self.head(hidden)
        return logits.float()

    def load(
        self, device: torch.device, forms: Forms, read_into: Callable[[Mapping[str, Tensor]], None]
    ) -> None:
        """Load the weights of a model that was made on the meta device.

        Each part is allocated, read and converted to its forms before the next, so that only one part at a
        time is in memory twice. read_into: copies the checkpoint's tensors of these names into these tensors.
        """
        self.rotary.to(device)
        for prefix, part in self._parts().items():
            _allocate(part, device)
            read_into(_with_prefix(prefix, part))
            if isinstance(part, Embedding):
                part.take_form(forms.embedding)
            for module in part.modules():
                if isinstance(module, Linear):
                    form = forms.gated if module.gated else forms.layers
                    module.take_form(forms.head if module is self.head else form)
        if self.config.tie_word_embeddings:
            self.head.form = self.embedding.form

    def hf_tensors(self) -> dict[str, Tensor]:
        """Return the destination of each tensor of a Hugging Face checkpoint, by name. Call before `load`.

        The destinations are views that cover the parameters exactly.
        """
        tensors: dict[str, Tensor] = {}
        for prefix, part in self._parts().items():
            tensors |= _with_prefix(prefix, part)
        return tensors

    def _parts(self) -> dict[str, nn.Module]:
        """Return the parts that are loaded one by one, by the prefix of their Hugging Face names."""
        parts: dict[str, nn.Module] = {"model.embed_tokens.": self.embedding, "model.norm.": self.norm}
        if not self.config.tie_word_embeddings:
            parts["lm_head."] = self.head
        return parts | {f"model.layers.{i}.": layer for i, layer in enumerate(self.layers)}


def _with_prefix(prefix: str, part: nn.Module) -> dict[str, Tensor]:
    tensors = part.hf_tensors() if isinstance(part, DecoderLayer) else dict(part.named_parameters())
    return {prefix + name: tensor.detach() for name, tensor in tensors.items()}


def _allocate(part: nn.Module, device: torch.device) -> None:
    """Allocate the parameters of a part that is on the meta device."""
    for module in part.modules():
        for name, parameter in module.named_parameters(recurse=False):
            # Not empty_like: on a meta tensor it would import sympy.
            memory = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(module, name, nn.Parameter(memory, requires_grad=False))
