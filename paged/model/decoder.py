"""Decoder: the transformer that computes every supported architecture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from ..architectures.config import LAYERS, ModelConfig
from ..architectures.spec import FeedForwardSpec
from ..base.errors import CheckpointError
from ..base.validation import check_number
from ..checkpoints.stored import StoredRows
from .batch import Batch, Queries
from .cache.kv_cache import KVCache
from .exchanges import collect_logits
from .layers.attention import Attention
from .layers.linear import Embedding, Linear
from .layers.mlp import MLP, ManyExperts, PlainMLP, new_mlp
from .layers.norms import LayerNorm, RMSNorm, new_norm
from .layers.rotary import RotaryEmbedding, TokenRows
from .part import ModelPart, Shard
from .stream import Stream
from .weights.loading import Loadable, Loader, StoredWeights

if TYPE_CHECKING:
    from ..kernels.operations import Kernels
    from .layers.experts import Experts, ExpertsBeside
    from .layers.layer_inputs import PerLayerEmbeddings, PerLayerGate
    from .layers.states import StateLayer
    from .towers.vit import Vit
    from .weights.kept import KeepsWeights

MAX_SCALAR = 1e6  # of a layer


class DecoderLayer(Loadable):
    """One layer: x + attention(x), then x + mlp(x), with norms before or after each; see NormNames.

    The additions are fused into the norms.
    """

    before_attention: RMSNorm | LayerNorm | None
    after_attention: RMSNorm | None
    before_mlp: RMSNorm | LayerNorm | None
    after_mlp: RMSNorm | None

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels, part: ModelPart) -> None:
        super().__init__(StoredRows({f"{LAYERS}{layer}": 1}))  # of the scalar
        spec = config.layers[layer]
        self.kernels = kernels
        for place, name in asdict(spec.norms).items():
            norm = None
            if name:
                kind = config.residual_norm if place.startswith("before") else config.norm
                norm = new_norm(kind, config.hidden_size, kernels, f"{LAYERS}{layer}.{name}")
            self.register_module(place, norm)
        self.index = layer
        self.mixer = _new_mixer(config, layer, kernels, part.shard)
        # Heads with a state, which read what attention reads, and are added with it.
        self.state_heads: StateLayer | None = None
        if spec.attention is not None and spec.state is not None:
            from .layers.states import new_state_layer

            self.state_heads = new_state_layer(config, layer, kernels, part.shard)
        self.mlp = _new_feed_forward(config, layer, kernels, part.shard)
        self.beside: ExpertsBeside | None = None
        if spec.experts is not None:
            from .layers.experts import ExpertsBeside

            self.beside = ExpertsBeside(config, layer, kernels, spec.experts)
        self.input: PerLayerGate | None = None
        if config.layer_inputs:
            from .layers.layer_inputs import PerLayerGate

            self.input = PerLayerGate(config, layer, kernels, part)
        # Multiplies the residual after the layer.
        self.layer_scalar = nn.Parameter(torch.empty(1), requires_grad=False) if spec.scaled else None
        self.factor = 1.0

    def project(
        self,
        hidden: Tensor | None,  # the previous layer's output, to be added to the residual
        residual: Tensor,  # [num_tokens, hidden_size], updated in place
        rows: TokenRows,
        batch: Batch,
        kv_cache: KVCache,
    ) -> Tensor:  # [num_tokens, num_heads, head_dim]
        """Write K and V of the new tokens into the cache. Return the tokens' queries."""
        if self.mixer is None:  # what the feed-forward part reads takes the place of queries
            return add_and_norm(hidden, residual, self.before_mlp)
        hidden = add_and_norm(hidden, residual, self.before_attention)
        if self.state_heads is not None:
            made = self.state_heads.project(hidden, rows, batch, kv_cache)
            self.kernels.add(self.state_heads.attend(made, batch.queries, kv_cache, rows.adapters), residual)
        return self.mixer.project(hidden, rows, batch, kv_cache)

    def attend(
        self, query: Tensor, residual: Tensor, rows: TokenRows, queries: Queries, kv_cache: KVCache
    ) -> Tensor | None:
        """Run the layer from attention on. Update the residual in place.

        Return the last sublayer's output, if it is not added to the residual yet; None otherwise.
        """
        if self.mixer is None:
            return self._feed_forward(query, rows)
        hidden = self._attend(query, rows, queries, kv_cache)
        if self.mlp is None:
            return hidden
        hidden = add_and_norm(self._normed(hidden, residual, self.after_attention), residual, self.before_mlp)
        out = self._feed_forward(hidden, rows)
        if self.beside is not None:
            out = self.beside(out, residual, rows.real_count, rows.adapters)
        left = self._normed(out, residual, self.after_mlp)
        if self.input is not None:
            assert left is None, "a sublayer follows one whose output is not normalised"
            self.input(rows.inputs, residual, rows.adapters)
        if self.factor != 1.0:
            assert left is None, "the residual is multiplied after the addition of an output"
            self.kernels.scale_and_cap(residual, self.factor)
        return left

    def _attend(self, query: Tensor, rows: TokenRows, queries: Queries, kv_cache: KVCache) -> Tensor:
        assert self.mixer is not None, "the layer has attention or a state"
        return self.mixer.attend(query, queries, kv_cache, rows.adapters)

    def _feed_forward(self, hidden: Tensor, rows: TokenRows) -> Tensor:
        assert self.mlp is not None, "the layer has a feed-forward part"
        more = {"count": rows.real_count} if isinstance(self.mlp, ManyExperts) else {}
        out: Tensor = self.mlp(hidden, adapters=rows.adapters, **more)
        return out

    def _normed(self, hidden: Tensor, residual: Tensor, norm: RMSNorm | None) -> Tensor | None:
        """Add the norm of a sublayer's output to the residual; return the output if there is no norm."""
        if norm is None:
            return hidden
        norm.into(hidden, residual, add=True)
        return None

    def finish_loading(self) -> None:
        """Join the weights of experts, and read the factor. Raises CheckpointError for a wrong factor."""
        for module in self.modules():
            if isinstance(module, ManyExperts):
                module.finish_loading()
        if self.layer_scalar is not None:
            factor = self.layer_scalar.item()
            name = f"layer_scalar of layer {self.index}"
            self.factor = check_number(CheckpointError, name, factor, 0, MAX_SCALAR, above=True)


def _new_mixer(
    config: ModelConfig, layer: int, kernels: Kernels, shard: Shard
) -> Attention | StateLayer | None:
    """Make the part of a layer in which tokens see each other; where it has both kinds, attention."""
    if config.layers[layer].attention is not None:
        return Attention(config, layer, kernels, shard)
    if config.layers[layer].state is None:
        return None
    from .layers.states import new_state_layer

    return new_state_layer(config, layer, kernels, shard)


def _new_feed_forward(
    config: ModelConfig, layer: int, kernels: Kernels, shard: Shard
) -> MLP | PlainMLP | Experts | None:
    """Make the feed-forward part of a layer, if it has one."""
    spec = config.layers[layer].feed_forward
    if spec is None:
        return None
    if isinstance(spec, FeedForwardSpec):
        return new_mlp(config, layer, kernels, spec, shard)
    assert shard.is_whole, "experts are not divided: see check_shards"
    from .layers.experts import Experts

    return Experts(config, layer, kernels, spec)


class ParallelLayer(DecoderLayer):
    """x + attention(norm(x)) + mlp(norm(x)), with a norm of its own for each sublayer."""

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels, part: ModelPart) -> None:
        super().__init__(config, layer, kernels, part)
        others = self.after_attention, self.after_mlp, self.layer_scalar, self.beside
        assert all(other is None for other in others), "a parallel layer normalises inputs, and no more"

    def attend(
        self, query: Tensor, residual: Tensor, rows: TokenRows, queries: Queries, kv_cache: KVCache
    ) -> Tensor:
        """Run both sublayers on the same residual; see `DecoderLayer.attend`."""
        assert rows.inputs is None, "only layers whose outputs are normalised have inputs"
        normed = add_and_norm(None, residual, self.before_mlp)
        assert self.mixer is not None, "a parallel layer has attention"
        self.kernels.add(self._attend(query, rows, queries, kv_cache), residual)
        return self._feed_forward(normed, rows)


def add_and_norm(hidden: Tensor | None, residual: Tensor, norm: RMSNorm | LayerNorm | None) -> Tensor:
    """Add `hidden` to the residual in place. Return the norm of the sum, or the sum if there is no norm."""
    if norm is None:
        assert hidden is None, "a sublayer whose input is not normalised follows one whose output is"
        return residual
    out: Tensor = norm(residual) if hidden is None else norm(hidden, residual)
    return out


class Decoder(nn.Module):
    """Embedding, decoder layers, final norm and output head, over one ragged batch.

    part: the part of the model that this process computes; None computes all of it.
    """

    def __init__(self, config: ModelConfig, kernels: Kernels, part: ModelPart | None = None) -> None:
        super().__init__()
        self.config = config
        self.kernels = kernels
        self.part = part = ModelPart.whole(config.num_layers) if part is None else part
        self.stored_weights: StoredWeights | None = None
        self.kept_weights: KeepsWeights | None = None
        self.dtype = torch.empty(0).dtype  # of parameters that are made here
        self.embedding: Embedding | None = None
        self.head: Linear | None = None
        self.positions: Embedding | None = None
        self.inputs: PerLayerEmbeddings | None = None
        self.norm: RMSNorm | LayerNorm | None = None
        # The largest weights are loaded first, while there is most memory for what converts them.
        if part.is_first or (part.is_last and config.tie_word_embeddings):
            table = StoredRows({"model.embed_tokens": config.vocab_size})
            self.embedding = Embedding(table, config.hidden_size, "embedding", kernels, part.shard)
        if part.is_last:
            head = StoredRows({"lm_head": config.vocab_size})
            if not part.shard.is_whole:
                head = head.take(part.shard.tokens(config.vocab_size))
            self.head = Linear(config.hidden_size, head, bias=False, role="head")
        if part.is_first and config.learned_positions:
            table = StoredRows({"model.embed_positions": config.max_position_embeddings})
            self.positions = Embedding(table, config.hidden_size, "table", kernels)
        if part.is_first and config.layer_inputs:
            from .layers.layer_inputs import PerLayerEmbeddings

            self.inputs = PerLayerEmbeddings(config, kernels, part.shard)
        tables = nn.ModuleList(RotaryEmbedding(*rope, config, kernels) for rope in config.ropes)
        self.rotary = cast(Sequence[RotaryEmbedding], tables)
        layers = nn.ModuleList(
            (ParallelLayer if config.layers[i].parallel else DecoderLayer)(config, i, kernels, part)
            for i in part.layers
        )
        self.layers = cast(Sequence[DecoderLayer], layers)
        # Later layers read earlier layers' K and V, so they run for output rows only.
        # A state must see every token.
        last_kv = max(i for i, spec in enumerate(config.layers) if spec.keeps)
        self.last_kv = last_kv - part.layers.start  # within `layers`, if it is the last part
        if part.is_last:
            assert self.last_kv >= 0, "a part has layers whose K and V another one has"
            self.norm = new_norm(config.residual_norm, config.hidden_size, kernels, "model.norm")
        # The residual is kept divided by the multiplier of what is added to it: see residual_eps.
        multiplier = torch.tensor(config.embedding_multiplier, dtype=self.dtype, device="cpu")
        self.embedding_factor = float(multiplier) / config.residual_multiplier
        if self.head is not None and config.tie_word_embeddings:
            del self.head.weight  # the head shares the embedding's form
        self.tower: Vit | None = None
        if part.is_first and config.vision is not None:
            from .towers.vit import Vit

            self.tower = Vit(config.vision, config.hidden_size, kernels, part.shard)

    def forward(self, batch: Batch, kv_cache: KVCache, stream: Stream | None = None) -> Tensor:
        """Compute the batch's new tokens, and write their K and V into the cache.

        stream: the output of the previous part of the model; None in the first part.

        Returns [num_output_rows, hidden_size]: the hidden states of `batch.output_rows` after the final norm.
        """
        return self.attend_last(self.compute_kv(batch, kv_cache, stream), batch, kv_cache)

    def compute_part(self, batch: Batch, kv_cache: KVCache, stream: Stream | None = None) -> Stream:
        """Run all layers of a part that is not the last. Return the stream for the next part.

        The per-layer inputs in the stream still include those of this part.
        """
        stream, rows = self._begin(batch, stream)
        hidden = self._run_layers(len(self.layers), stream, rows, batch, kv_cache)
        return stream._replace(hidden=hidden)

    def compute_kv(self, batch: Batch, kv_cache: KVCache, stream: Stream | None = None) -> tuple[Tensor, ...]:
        """Run the model for all tokens, up to the last layer that writes K and V.

        Returns the queries of that layer [num_tokens, num_heads, head_dim], the residual [num_tokens,
        hidden_size], and the per-layer inputs, if the model has them.
        """
        stream, rows = self._begin(batch, stream)
        residual, _, inputs = stream
        hidden = self._run_layers(self.last_kv, stream, rows, batch, kv_cache)
        query = self.layers[self.last_kv].project(hidden, residual, rows, batch, kv_cache)
        return (query, residual) if inputs is None else (query, residual, inputs)

    def _begin(self, batch: Batch, stream: Stream | None) -> tuple[Stream, TokenRows]:
        """Return the stream at the first layer, by default from the tokens, and what layers get of it."""
        if stream is None:
            assert self.embedding is not None, "only the first part makes a stream of tokens"
            residual: Tensor = self.embedding(batch.token_ids)
            if self.embedding_factor != 1.0:
                self.kernels.scale_and_cap(residual, self.embedding_factor)
            if batch.given is not None:
                residual.index_copy_(0, *batch.given)
            inputs = None
            if self.inputs is not None:
                token_ids = batch.token_ids
                if batch.given is not None:
                    assert self.config.vision is not None, "embeddings are given of images"
                    token_ids = token_ids.index_fill(0, batch.given[0], self.config.vision.padding_id)
                inputs = self.inputs(token_ids, residual, batch.adapters)
            stream = Stream(residual, None, inputs)
        angles = [rotary(batch) for rotary in self.rotary]
        rows = TokenRows(angles, stream.inputs, batch.real_count, batch.adapters)
        if self.positions is not None:  # added to the embeddings by the first norm
            stream = stream._replace(hidden=self.positions(batch.positions))
        return stream, rows

    def _run_layers(
        self, num_layers: int, stream: Stream, rows: TokenRows, batch: Batch, kv_cache: KVCache
    ) -> Tensor | None:
        """Run the first layers. Return what is left to add to the residual."""
        residual, hidden, _ = stream
        for number, layer in enumerate(islice(self.layers, num_layers)):
            query = layer.project(hidden, residual, rows, batch, kv_cache)
            hidden = layer.attend(query, residual, rows, batch.queries, kv_cache)
            if number < len(batch.features):
                assert batch.given is not None, "features are of rows with embeddings"
                residual.index_add_(0, batch.given[0], batch.features[number])
        return hidden

    def attend_last(self, state: tuple[Tensor, ...], batch: Batch, kv_cache: KVCache) -> Tensor:
        """Run the rest of the model after `compute_kv`, for `batch.output_rows` only."""
        query, residual, *rest = state
        queries = batch.output_queries
        if queries is None:
            return residual[:0]
        last, *readers = islice(self.layers, self.last_kv, None)
        angles = [rotary(batch) for rotary in self.rotary] if readers else []
        rows = TokenRows(angles, rest[0] if rest else None, batch.real_count, batch.adapters)
        if not batch.is_decode:
            # Not torch's indexing, whose threads go on looking for work for milliseconds.
            taken = batch.output_rows
            kernels = self.kernels
            query = kernels.take_rows(query.flatten(1), taken).view(-1, *query.shape[1:])
            residual = kernels.take_rows(residual, taken)
            rows = rows.take(taken, kernels)._replace(adapters=batch.output_adapters)
        hidden = last.attend(query, residual, rows, queries, kv_cache)
        for layer in readers:
            query = layer.project(hidden, residual, rows, batch, kv_cache)
            hidden = layer.attend(query, residual, rows, queries, kv_cache)
        assert self.norm is not None, "only the last part has the final norm"
        return add_and_norm(hidden, residual, self.norm)

    def logits(self, hidden: Tensor) -> Tensor:  # [n, hidden_size], from `forward` -> f32[n, vocab_size]
        """Apply the output head. With shards, only the first one gets all logits."""
        assert self.head is not None, "only the last part has a head"
        own: Tensor = self.head(hidden)
        logits = collect_logits(own, self.part.shard, self.config.vocab_size).float()
        if self.config.logits_divisor != 1.0 or self.config.logits_softcap is not None:
            self.kernels.scale_and_cap(logits, 1 / self.config.logits_divisor, self.config.logits_softcap)
        return logits

    def loadables(self) -> Iterator[Loadable]:
        """Yield the modules whose parameters come from a checkpoint."""
        for module in self.modules():
            is_tied = self.config.tie_word_embeddings and module is self.head
            if isinstance(module, Loadable) and not is_tied:
                yield module

    def load(self, loader: Loader) -> None:
        """Load the weights of a model that was made on the meta device.

        Weights are read and converted one at a time, so that only one weight is in memory twice.
        """
        for rotary in self.rotary:
            rotary.to(loader.device)
        for module in self.loadables():
            module.load(loader)
        for layer in self.layers:
            layer.finish_loading()
        if self.head is not None and self.embedding is not None and self.config.tie_word_embeddings:
            self.head.form = self.embedding.form

    def prepare(self, num_positions: int) -> None:
        """Precompute the rotary embeddings of this many positions; with 0, each step computes them."""
        if num_positions:
            for rotary in self.rotary:
                rotary.tabulate(num_positions)

    @property
    def obstacle_to_recording(self) -> str | None:
        """The reason why steps cannot be recorded, such as a torch operation; None if they can."""
        if not all(rotary.is_tabulated for rotary in self.rotary):
            return "torch computes the angles of its rotary embedding in each step"
        linear = [each for each in self.modules() if isinstance(each, Linear) and not each.stays_float]
        experts = [module for module in self.modules() if isinstance(module, ManyExperts)]
        if not all(module.form.is_recordable for module in linear):
            return f"torch computes a part of its linear layers in {self.dtype}"
        if not all(module.is_recordable for module in experts):
            return "torch computes the products of its experts one by one"
        return None
