"""StageGraphs: CUDA graphs of decodes in one stage of a model over several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..device.transfers import Download
from ..model.model import Model
from ..model.stream import Stream, tensors_of
from ..model.stream_shape import StreamShape
from ..sampling.sampler import Draw
from .batches.batches import Batches
from .batches.seats import SeatedBatches
from .graph_store import GraphKey, GraphStore, Way, find_sizes
from .sizes import Sizes

if TYPE_CHECKING:
    from ..sampling.structured_outputs import GrammarMasks


class StageGraph(NamedTuple):
    """A captured step of a stage. Its tensors have a row for each token and hold what the last replay made.

    out: the tensors of the stream to send; in the last stage, greedy tokens and the highest logits.
    logits: None but in the last stage.
    """

    graph: torch.cuda.CUDAGraph
    out: tuple[Tensor, ...]
    logits: Tensor | None  # f32[num_tokens, vocab_size]


class StageGraphs(GraphStore[StageGraph]):
    """CUDA graphs of a stage, from the stream that it has received to the stream that it sends.

    A received stream is copied into tensors at fixed addresses. In the last stage, a graph ends with the
    logits: the steps in flight are of different requests, with a sampler each, so tokens are drawn outside.

    shape: of the stream that the stage receives; None in the first stage.
    receive: returns the stream of the step that is to be computed.
    """

    def __init__(
        self,
        model: Model,
        batches: SeatedBatches,
        device: torch.device,
        sizes: Sequence[int],
        vocab_size: int,
        *,
        is_last: bool,
        is_always_short: bool,
        shape: StreamShape | None,
        dtype: torch.dtype,
        receive: Callable[[], Stream | None],
    ) -> None:
        self._model = model
        self._receive = receive
        way: Way = "logits" if is_last else "stream"
        num_logits = vocab_size if is_last else 0
        super().__init__(batches, device, sizes, num_logits, [way], is_always_short=is_always_short)
        self._stream: Stream | None = None
        if shape is not None:
            columns = [each for each in shape if each]
            rows = self.max_tokens
            self._stream = shape.stream(
                torch.zeros(rows, each, dtype=dtype, device=device) for each in columns
            )

    def run(self, step: Any, draw: Draw, masks: GrammarMasks | None, download: Download) -> bool:
        """Compute a step of the last stage, and draw its tokens. Return False for a step without a graph."""
        graph = self._replay(step)
        if graph is None or graph.logits is None:
            return False
        num_tokens = step.num_tokens
        tokens, highest = (each[:num_tokens] for each in graph.out)
        places = self._batches.places(step)
        draw.run(graph.logits[:num_tokens], download, masks, (tokens, highest), places)
        return True

    def compute(self, step: Any) -> tuple[Tensor, ...] | None:
        """Compute a step of a stage that is not the last. Return None for a step without a graph.

        Returns the tensors of the stream to send. The next step overwrites their memory.
        """
        graph = self._replay(step)
        return None if graph is None else tuple(each[: step.num_tokens] for each in graph.out)

    def _replay(self, step: Any) -> StageGraph | None:
        """Receive the stream of a step and compute the step; do neither if there is no graph for it."""
        if not step.is_padded:
            return None
        graph = self.find(step, self._ways[0])
        if graph is None:
            return None
        received = tensors_of(self._receive())
        self._batches.unpack(step)
        for static, own in zip(tensors_of(self._stream), received, strict=True):
            static[: step.num_tokens].copy_(own)
        graph.graph.replay()
        return graph

    def _capture(self, key: GraphKey) -> StageGraph:
        logits = self._logits_of(key.num_tokens) if key.way == "logits" else None
        graph, out = self._pool.capture(lambda: self._compute(key, logits))
        return StageGraph(graph, out, logits)

    def _compute(self, key: GraphKey, kept: Tensor | None) -> tuple[Tensor, ...]:
        assert self._kv_cache is not None, "graphs are captured over a cache"
        num_tokens = key.num_tokens
        kind = {"is_short": key.is_short, "has_adapters": key.has_adapters}
        batch = self._batches.padded_batch(key.num_rows, num_tokens, **kind)
        stream = None if self._stream is None else _first_rows(self._stream, num_tokens)
        model = self._model
        if kept is None:
            return tensors_of(model.compute_part(batch, self._kv_cache, stream))
        logits = model.logits(model.forward(batch, self._kv_cache, stream))
        kept.copy_(logits)
        return model.kernels.greedy(logits)


def _first_rows(stream: Stream, num_rows: int) -> Stream:
    residual, hidden, inputs = stream
    return Stream(
        residual[:num_rows],
        None if hidden is None else hidden[:num_rows],
        None if inputs is None else inputs[:num_rows],
    )


def new_stage_graphs(
    sizes: Sizes,
    model: Model,
    batches: Batches[Any],
    device: torch.device,
    receive: Callable[[], Stream | None],
) -> StageGraphs | None:
    """Return the graphs of a stage on a GPU; None if graphs are impossible or turned off."""
    captured = find_sizes(sizes, model, batches)
    part = sizes.part
    if not captured or not isinstance(batches, SeatedBatches) or part is None:
        return None
    return StageGraphs(
        model,
        batches,
        device,
        captured,
        sizes.model.vocab_size,
        is_last=part.is_last,
        is_always_short=sizes.max_model_len <= model.kernels.split_keys,
        shape=None if part.is_first else StreamShape.before(part.layers.start, sizes.model),
        dtype=getattr(torch, sizes.dtype),
        receive=receive,
    )
