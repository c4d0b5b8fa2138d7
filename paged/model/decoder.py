"""Decoder: the transformer that computes every supported architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import cast

import torch
from torch import Tensor, nn

from ..base.validation import check_number
from ..errors import CheckpointError
from ..kernels.backend import Kernels
from .batch import Batch, Queries
from .cache.kv_cache import KVCache
from .config import ModelConfig
from .layers.attention import Attention
from .layers.layer_inputs import PerLayerEmbeddings, PerLayerGate
from .layers.linear import Embedding, Linear
from .layers.mlp import new_feed_forward
from .layers.norms import LayerNorm, RMSNorm, new_norm
from .layers.rotary import RotaryEmbedding
from .layers.token_rows import TokenRows
from .weights.choice import Forms

MAX_SCALAR = 1e6  # of a layer


class DecoderLayer(nn.Module):
    """x + attention(x), then x + mlp(x), with norms of what goes in or what comes out: see NormNames.

    The additions are fused into norms.
    """

    before_attention: RMSNorm | LayerNorm | None
    after_attention: RMSNorm | None
    before_mlp: RMSNorm | LayerNorm | None
    after_mlp: RMSNorm | None

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels) -> None:
        super().__init__()
        spec = config.layers[layer]
        self.norm_names = spec.norms
        self.kernels = kernels
        self.transposed = config.transposed_weights
        for place, name in asdict(spec.norms).items():
            norm = config.residual_norm if place.startswith("before") else config.norm
            self.register_module(place, new_norm(norm, config.hidden_size, kernels) if name else None)
        self.attention = Attention(config, layer, kernels)
        self.mlp = new_feed_forward(spec.feed_forward, config.hidden_size, kernels)
        self.input = PerLayerGate(config, layer, kernels) if config.layer_inputs else None
        # Multiplies the residual after the layer.
        self.scalar = nn.Parameter(torch.empty(1), requires_grad=False) if spec.scaled else None
        self.factor = 1.0

    def project(
        self,
        hidden: Tensor | None,  # the previous layer's output, to be added to the residual
        residual: Tensor,  # [num_tokens, hidden_size], updated in place
        rows: TokenRows,
        batch: Batch,
        kv_cache: KVCache,
    ) -> Tensor:  # [num_tokens, num_heads, head_dim]
        """Write K and V of the new tokens into the cache. Return their queries."""
        hidden = add_and_norm(hidden, residual, self.before_attention)
        return self.attention.project(hidden, rows, batch, kv_cache)

    def attend(
        self, query: Tensor, residual: Tensor, rows: TokenRows, queries: Queries, kv_cache: KVCache
    ) -> Tensor | None:
        """Run the layer from attention on. Return what is left to add to the residual, which is updated in
        place.
        """
        hidden = self.attention.attend(query, queries, kv_cache)
        hidden = add_and_norm(self._normed(hidden, residual, self.after_attention), residual, self.before_mlp)
        left = self._normed(self.mlp(hidden), residual, self.after_mlp)
        if self.input is not None:
            assert left is None, "a sublayer follows one whose output is not normalised"
            self.input(rows.inputs, residual)
        if self.factor != 1.0:
            assert left is None, "the residual is multiplied after the addition of an output"
            self.kernels.scale_and_cap(residual, self.factor)
        return left

    def _normed(self, hidden: Tensor, residual: Tensor, norm: RMSNorm | None) -> Tensor | None:
        """Add the norm of a sublayer's output to the residual; return the output if there is no norm."""
        if norm is None:
            return hidden
        norm.into(hidden, residual, add=True)
        return None

    def hf_tensors(self) -> dict[str, Tensor]:
        """Return views of the parameters under their Hugging Face names, relative to the layer."""
        norms = {
            f"{name}.{key}": parameter
            for place, name in asdict(self.norm_names).items()
            if name
            for key, parameter in getattr(self, place).named_parameters()
        }
        sublayers = {**self.attention.hf_tensors(), **self.mlp.hf_tensors()}
        if self.transposed:
            sublayers = {name: x.t() if x.dim() == 2 else x for name, x in sublayers.items()}
        tensors = {**norms, **sublayers}
        if self.input is not None:
            tensors |= self.input.named_parameters()
        if self.scalar is not None:
            tensors["layer_scalar"] = self.scalar
        return tensors

    def finish_loading(self) -> None:
        """Make of the loaded weights what the kernels take. Raises CheckpointError."""
        self.attention.finish_loading()
        if self.scalar is not None:
            factor = self.scalar.item()
            name = f"layer_scalar of layer {self.attention.layer}"
            self.factor = check_number(CheckpointError, name, factor, 0, MAX_SCALAR, above=True)


class ParallelLayer(DecoderLayer):
    """x + attention(norm(x)) + mlp(norm(x)), with a norm of its own for each sublayer."""

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels) -> None:
        super().__init__(config, layer, kernels)
        others = self.after_attention, self.after_mlp, self.scalar
        assert all(other is None for other in others), "a parallel layer normalises inputs, and no more"

    def attend(
        self, query: Tensor, residual: Tensor, rows: TokenRows, queries: Queries, kv_cache: KVCache
    ) -> Tensor:
        """Run the layer as `DecoderLayer.attend` does."""
        assert rows.inputs is None, "only layers whose outputs are normalised have inputs"
        normed = add_and_norm(None, residual, self.before_mlp)
        self.kernels.add(self.attention.attend(query, queries, kv_cache), residual)
        out: Tensor = self.mlp(normed)
        return out


def add_and_norm(hidden: Tensor | None, residual: Tensor, norm: RMSNorm | LayerNorm | None) -> Tensor:
    """Add `hidden` to the residual in place, and return the norm of the sum, or the sum itself."""
    if norm is None:
        assert hidden is None, "a sublayer whose input is not normalised follows one whose output is"
        return residual
    out: Tensor = norm(residual) if hidden is None else norm(hidden, residual)
    return out


class Decoder(nn.Module):
    """Embedding, decoder layers, final norm and output head, over one ragged batch."""

    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        self.config = config
        self.kernels = kernels
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.positions = None
        if config.learned_positions:
            self.positions = Embedding(config.max_position_embeddings, config.hidden_size)
        self.inputs = PerLayerEmbeddings(config, kernels) if config.layer_inputs else None
        tables = nn.ModuleList(RotaryEmbedding(*rope, config, kernels) for rope in config.ropes)
        self.rotary = cast(Sequence[RotaryEmbedding], tables)
        layers = nn.ModuleList(
            (ParallelLayer if spec.parallel else DecoderLayer)(config, i, kernels)
            for i, spec in enumerate(config.layers)
        )
        self.layers = cast(Sequence[DecoderLayer], layers)
        # Later layers read earlier layers' K and V, so they run for output rows only.
        self.last_kv = max(i for i, spec in enumerate(config.layers) if spec.attention.has_kv)
        self.norm = new_norm(config.residual_norm, config.hidden_size, kernels)
        self.head = Linear(config.hidden_size, config.vocab_size, bias=False)
        # The residual is kept divided by the multiplier of what is added to it: see residual_eps.
        multiplier = torch.tensor(
            config.embedding_multiplier, dtype=self.embedding.weight.dtype, device="cpu"
        )
        self.embedding_factor = float(multiplier) / config.residual_multiplier
        if config.tie_word_embeddings:
            del self.head.weight  # the head shares the embedding's form

    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        """Compute the batch's new tokens, and write their K and V into the cache.

        Returns [num_output_rows, hidden_size]: the hidden states of `batch.output_rows` after the final norm.
        """
        return self.attend_last(self.compute_kv(batch, kv_cache), batch, kv_cache)

    def compute_kv(self, batch: Batch, kv_cache: KVCache) -> tuple[Tensor, ...]:
        """Run the model up to the last K and V, which is all that later tokens need.

        Returns the queries of the last layer with K and V of its own [num_tokens, num_heads, head_dim], the
        residual [num_tokens, hidden_size], and the inputs of layers, if there are any.
        """
        residual: Tensor = self.embedding(batch.token_ids)
        if self.embedding_factor != 1.0:
            self.kernels.scale_and_cap(residual, self.embedding_factor)
        inputs = self.inputs(batch.token_ids, residual) if self.inputs is not None else None
        rows = TokenRows([rotary(batch) for rotary in self.rotary], inputs)
        # Added to the embeddings by the first norm.
        hidden: Tensor | None = None if self.positions is None else self.positions(batch.positions)
        for layer in islice(self.layers, self.last_kv):
            query = layer.project(hidden, residual, rows, batch, kv_cache)
            hidden = layer.attend(query, residual, rows, batch.queries, kv_cache)
        query = self.layers[self.last_kv].project(hidden, residual, rows, batch, kv_cache)
        return (query, residual) if inputs is None else (query, residual, inputs)

    def attend_last(self, state: tuple[Tensor, ...], batch: Batch, kv_cache: KVCache) -> Tensor:
        """Run what remains after `compute_kv`, for `batch.output_rows` only: few tokens of most prompts."""
        query, residual, *rest = state
        queries = batch.output_queries
        if queries is None:
            return residual[:0]
        last, *readers = islice(self.layers, self.last_kv, None)
        angles = [rotary(batch) for rotary in self.rotary] if readers else []
        rows = TokenRows(angles, rest[0] if rest else None)
        if not batch.is_decode:
            # Not torch's indexing, whose threads go on looking for work for milliseconds.
            taken = batch.output_rows
            kernels = self.kernels
            query = kernels.take_rows(query.flatten(1), taken).view(-1, *query.shape[1:])
            residual = kernels.take_rows(residual, taken)
            rows = rows.take(taken, kernels)
        hidden = last.attend(query, residual, rows, queries, kv_cache)
        for layer in readers:
            query = layer.project(hidden, residual, rows, batch, kv_cache)
            hidden = layer.attend(query, residual, rows, queries, kv_cache)
        return add_and_norm(hidden, residual, self.norm)

    def logits(self, hidden: Tensor) -> Tensor:  # [n, hidden_size], from `forward` -> f32[n, vocab_size]
        """Apply the output head."""
        logits: Tensor = self.head(hidden).float()
        if self.config.logits_divisor != 1.0 or self.config.logits_softcap is not None:
            self.kernels.scale_and_cap(logits, 1 / self.config.logits_divisor, self.config.logits_softcap)
        return logits

    def load(
        self, device: torch.device, forms: Forms, read_into: Callable[[Mapping[str, Tensor]], None]
    ) -> None:
        """Load the weights of a model that was made on the meta device.

        Each part is allocated, read and converted to its forms before the next, so that only one part at a
        time is in memory twice. read_into: copies the checkpoint's tensors of these names into these tensors.
        """
        for rotary in self.rotary:
            rotary.to(device)
        for prefix, part in self._parts().items():
            _allocate(part, device)
            read_into(_with_prefix(prefix, part))
            if isinstance(part, DecoderLayer):
                part.finish_loading()
            for module in part.modules():
                if isinstance(module, Embedding):
                    module.take_form(forms.embedding if module is self.embedding else forms.table)
                if isinstance(module, Linear):
                    form = forms.gated if module.gated else forms.layers
                    module.take_form(forms.head if module is self.head else form)
        if self.config.tie_word_embeddings:
            self.head.form = self.embedding.form

    def prepare(self, num_positions: int) -> None:
        """Tabulate the rotary embeddings of so many positions; 0: each step computes them."""
        if num_positions:
            for rotary in self.rotary:
                rotary.tabulate(num_positions)

    @property
    def obstacle_to_recording(self) -> str | None:
        """What torch computes in a step, so that its launches cannot be recorded."""
        if not all(rotary.is_tabulated for rotary in self.rotary):
            return "torch computes the angles of its rotary embedding in each step"
        linear = [module for module in self.modules() if isinstance(module, Linear)]
        if not all(module.form.is_recordable for module in linear):
            return f"torch computes a part of its linear layers in {self.norm.weight.dtype}"
        return None

    def hf_tensors(self) -> dict[str, Tensor]:
        """Return the destination of each tensor of a Hugging Face checkpoint, by name. Call before `load`.

        The destinations are views that cover the parameters, but for what `finish_loading` fills.
        """
        tensors: dict[str, Tensor] = {}
        for prefix, part in self._parts().items():
            tensors |= _with_prefix(prefix, part)
        return tensors

    def _parts(self) -> dict[str, nn.Module]:
        """Return the parts that are loaded one by one, by the prefix of their Hugging Face names."""
        parts: dict[str, nn.Module] = {"model.embed_tokens.": self.embedding, "model.norm.": self.norm}
        if self.inputs is not None:
            parts["model."] = self.inputs
        if not self.config.tie_word_embeddings:
            parts["lm_head."] = self.head
        if self.positions is not None:
            parts["model.embed_positions."] = self.positions
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
