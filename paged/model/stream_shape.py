"""The shape of what one part of a model hands on to the next."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Self

from ..architectures.config import ModelConfig
from .stream import Stream, tensors_of

if TYPE_CHECKING:
    from torch import Tensor


class StreamShape(NamedTuple):
    """The number of columns of each tensor in a stream; 0 for an absent tensor."""

    residual: int
    hidden: int
    inputs: int

    @classmethod
    def before(cls, layer: int, config: ModelConfig) -> Self:
        """Return the shape of the stream that enters this layer."""
        spec = config.layers[layer - 1]
        has_hidden = spec.parallel or spec.norms.after_mlp is None
        inputs = config.layer_inputs
        size = config.hidden_size
        num_inputs = 0 if inputs is None else inputs.size * (config.num_layers - layer)
        return cls(size, size * has_hidden, num_inputs)

    def stream(self, tensors: Iterable[Tensor]) -> Stream:
        """Make a stream of these tensors. It has the per-layer vectors of the layers to come."""
        own = iter(tensors)
        residual, hidden, inputs = (next(own) if columns else None for columns in self)
        assert residual is not None, "there is always a residual"
        return Stream(residual, hidden, None if inputs is None else inputs[:, -self.inputs :])

    def pack(self, stream: Stream) -> Tensor:
        """Copy the tensors of a stream into one tensor, f[num_tokens * columns]."""
        import torch  # only here, as the simulator asks for shapes alone

        return torch.cat([tensor.reshape(-1) for tensor in tensors_of(stream)])

    def unpack(self, packed: Tensor) -> Stream:
        """Return the stream that `pack` has packed. Its tensors share the memory of `packed`."""
        num_tokens = len(packed) // sum(self)
        parts = packed.split_with_sizes([num_tokens * columns for columns in self])
        return self.stream(part.view(num_tokens, -1) for part in parts if len(part))
