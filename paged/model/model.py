"""Model: what the runner asks of a model. `Decoder` is the native implementation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from .batch import Batch
from .cache.kv_cache import KVCache
from .stream import Stream
from .weights.loading import Loadable, Loader, StoredWeights

if TYPE_CHECKING:
    from ..kernels.operations import Kernels
    from .towers.vit import Vit
    from .weights.kept import KeepsWeights


class Model(Protocol):
    """A model that computes ragged batches over the paged cache.

    A step is `forward`: first `compute_kv`, then `attend_last`. The shapes in `compute_kv` depend only on the
    number of tokens, so only `compute_kv` can be recorded and replayed.
    """

    kernels: Kernels
    stored_weights: StoredWeights | None  # what it was loaded from
    kept_weights: KeepsWeights | None  # the cache of packed weights, if they are to be kept
    tower: Vit | None  # makes embeddings of images

    def loadables(self) -> Iterator[Loadable]:
        """Yield the modules whose parameters come from a checkpoint."""

    def load(self, loader: Loader) -> None:
        """Load the weights of a model that was made on the meta device."""

    def prepare(self, num_positions: int) -> None:
        """Precompute the rotary embeddings of this many positions; 0 for none. Call once, after `load`."""

    @property
    def obstacle_to_recording(self) -> str | None:
        """The reason why steps cannot be recorded; None if they can. It is known after `prepare`."""

    def forward(self, batch: Batch, kv_cache: KVCache, stream: Stream | None = None) -> Tensor:
        """Compute the batch's new tokens, and write their K and V into the cache.

        stream: the output of the previous part; None in the first part, or if the model is not divided.

        Returns [num_output_rows, hidden_size]: the final hidden states of `batch.output_rows`.
        """

    def compute_part(self, batch: Batch, kv_cache: KVCache, stream: Stream | None = None) -> Stream:
        """Compute the new tokens in a part that is not the last. Return the stream for the next part."""

    def compute_kv(self, batch: Batch, kv_cache: KVCache, stream: Stream | None = None) -> tuple[Tensor, ...]:
        """Compute K and V of all layers. Return the input of `attend_last`, with a row for each token."""

    def attend_last(self, state: tuple[Tensor, ...], batch: Batch, kv_cache: KVCache) -> Tensor:
        """Compute the rest of `forward` for `batch.output_rows` only.

        state: the result of `compute_kv`.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the output head to hidden states from `forward`: [n, hidden_size] -> f32[n, vocab_size]."""
