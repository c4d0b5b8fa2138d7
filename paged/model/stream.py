"""Stream: what the layers of a model hand on to each other, and one part of a model to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Stream(NamedTuple):
    """The tensors that one part of a model passes to the next: a row for each token.

    residual: updated in place by the layers.
    hidden: the output of the last sublayer, still to be added to the residual; None if nothing is left to
        add.
    inputs: the per-layer vectors of the layers that follow, see PerLayerEmbeddings; None if the model has
        none.
    """

    residual: Tensor
    hidden: Tensor | None = None
    inputs: Tensor | None = None


def tensors_of(stream: Stream | None) -> tuple[Tensor, ...]:
    """Return the tensors of a stream, without those that are None."""
    return () if stream is None else tuple(tensor for tensor in stream if tensor is not None)
