"""Stage: the place of a rank in the pipeline, and the streams that it receives and sends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..architectures.config import ModelConfig
from ..base.errors import RankError
from ..model.part import ModelPart, Shard
from ..model.stream import Stream
from ..model.stream_shape import StreamShape
from .layout import RankLayout
from .transport import ShardGroup, Transport

if TYPE_CHECKING:
    from ..runner.part_runner import PartRunner
    from ..runner.stage_graphs import StageGraphs

_HEADER = 16  # bytes before a stream: the number of its step


def part_of(layout: RankLayout, rank: int, num_layers: int, transport: Transport) -> ModelPart:
    """Return the part of the model that a rank computes."""
    stage = layout.stage_of(rank)
    shard = Shard()
    if layout.num_shards > 1:
        group = ShardGroup(transport, rank, layout.ranks_of_stage(stage))
        shard = Shard(layout.shard_of(rank), layout.num_shards, group)
    return ModelPart(layout.layers[stage], num_layers, shard)


def new_graphs(runner: PartRunner, receive: Callable[[], Stream | None]) -> StageGraphs | None:
    """Return the CUDA graphs of a rank's decodes; None on a CPU.

    receive: returns the stream of the step that is to be computed.
    """
    if runner.device.type != "cuda":
        return None
    from ..runner.stage_graphs import new_stage_graphs

    return new_stage_graphs(runner.sizes, runner.model, runner.batches, runner.device, receive)


class Stage:
    """One stage of a pipeline: receives streams from the previous stage, and sends streams to the next."""

    def __init__(
        self, layout: RankLayout, rank: int, config: ModelConfig, dtype: torch.dtype, transport: Transport
    ) -> None:
        stage = layout.stage_of(rank)
        shard = layout.shard_of(rank)
        self._transport = transport
        self._dtype = dtype
        self._before = layout.rank_of(stage - 1, shard) if stage else None
        self._next = layout.rank_of(stage + 1, shard) if stage + 1 < layout.num_stages else None
        layers = layout.layers[stage]
        self._shape = StreamShape.before(layers.start, config) if stage else None
        self._next_shape = None if self._next is None else StreamShape.before(layers.stop, config)
        self._due: deque[tuple[int, int]] = deque()  # the number and the tokens of steps whose streams come

    def expect(self, number: int, num_tokens: int) -> None:
        """Record that a step begins, so that `receive` can later return its stream."""
        if self._before is not None and num_tokens:
            self._due.append((number, num_tokens))

    def receive(self, number: int, device: torch.device) -> Stream | None:
        """Return the stream of a step; None in the first stage.

        Streams of earlier steps are dropped, because those steps were given up.
        """
        if self._before is None or self._shape is None:
            return None
        packed: Tensor | None = None
        while packed is None:
            due, num_tokens = self._due.popleft()
            size = _HEADER + num_tokens * sum(self._shape) * self._dtype.itemsize
            found = self._transport.receive((size,), torch.uint8, self._before)
            sent = int(found[:_HEADER].view(torch.int64)[0])
            if sent != due:
                raise RankError(f"the activations of step {sent} came where those of step {due} were due")
            if due == number:
                packed = found[_HEADER:].view(self._dtype)
        return self._shape.unpack(packed.to(device))

    def send(self, number: int, tensors: tuple[Tensor, ...]) -> None:
        """Send the stream of a step to the next stage."""
        assert self._next is not None, "the last stage has no next one"
        assert self._next_shape is not None, "the next stage takes a stream"
        packed = self._next_shape.pack(self._next_shape.stream(tensors)).view(torch.uint8)
        header = torch.tensor([number, 0], device=packed.device).view(torch.uint8)
        self._transport.send(torch.cat([header, packed]), self._next)
