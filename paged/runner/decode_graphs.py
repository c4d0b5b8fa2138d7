"""DecodeGraphs: CUDA graphs of decodes and runs of drafts, from the embedding to the drawn tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..device.transfers import Download
from ..model.model import Model
from ..sampling.row_penalties import RowPenalties
from ..sampling.sampler import Draw, Sampler
from ..sampling.seat_parameters import FILTERS, SeatParameters, draw
from .batches.batches import Batches
from .batches.seats import SeatedBatches, places_in
from .graph_store import GraphKey, GraphStore, Way, find_sizes
from .sizes import Sizes

if TYPE_CHECKING:
    from ..sampling.structured_outputs import GrammarMasks

CAPTURED_AT_START: tuple[Way, ...] = ("greedy", "drawn")


class DecodeGraph(NamedTuple):
    """A captured step, with a row for each token. Its tensors hold the results of the last replay.

    logits: None if the graph also draws and records the tokens.
    """

    graph: torch.cuda.CUDAGraph
    tokens: Tensor  # i64[num_tokens]; those of the highest logits, if there are logits
    highest: Tensor  # f32[num_tokens], the model's highest logits
    logits: Tensor | None  # f32[num_tokens, vocab_size]


class Replayed(NamedTuple):
    """The results of a replay for the tokens of a step, valid until the next replay; see `DecodeGraph`."""

    tokens: Tensor
    highest: Tensor
    logits: Tensor | None


class DecodeGraphs(GraphStore[DecodeGraph]):
    """CUDA graphs of steps of a whole model, in which every token is followed by a sampled one.

    logits: computes logits from final hidden states; None uses the model's method.
    """

    def __init__(
        self,
        model: Model,
        batches: SeatedBatches,
        of_seats: SeatParameters,
        penalties: RowPenalties,
        device: torch.device,
        sizes: Sequence[int],
        vocab_size: int,
        *,
        is_always_short: bool,
        logits: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._model = model
        self._of_seats = of_seats
        self._penalties = penalties
        self._head = logits or model.logits
        super().__init__(
            batches, device, sizes, vocab_size, CAPTURED_AT_START, is_always_short=is_always_short
        )

    def run(self, step: Any, draw: Draw, masks: GrammarMasks | None, download: Download) -> bool:
        """Compute a step that `SeatedBatches.put` returned, if there is a graph for it.

        If the graph does not draw tokens itself, draw them from the graph's logits. Return False for a step
        without a graph.
        """
        replayed = self.replay(step, draw)
        if replayed is None:
            return False
        best = replayed.tokens, replayed.highest
        if replayed.logits is None:
            draw.take(*best, download)
            return True
        batches = self._batches
        drawn = draw.run(replayed.logits, download, masks, best, batches.places(step))
        if drawn is not None:
            batches.record(step, drawn)
        return True

    def replay(self, step: Any, draw: Draw) -> Replayed | None:
        """Compute a step that `SeatedBatches.put` returned; None if there is no graph for it."""
        if not step.is_padded:
            return None
        way = way_of(draw)
        graph = self.find(step, way)
        if graph is None:
            return None
        self._batches.unpack(step)
        if way == "penalized":
            draw.count_history()
        graph.graph.replay()
        num_tokens = step.num_tokens
        logits = None if graph.logits is None else graph.logits[:num_tokens]
        return Replayed(graph.tokens[:num_tokens], graph.highest[:num_tokens], logits)

    def _capture(self, key: GraphKey) -> DecodeGraph:
        logits = self._logits_of(key.num_tokens) if key.way == "logits" else None
        with self._penalties.set_aside():  # the step that is captured draws for no request
            graph, (tokens, highest) = self._pool.capture(lambda: self._compute(key, logits))
        return DecodeGraph(graph, tokens, highest, logits)

    def _compute(self, key: GraphKey, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute a step, in the tensors that it is unpacked into. Return tokens and the highest logits.

        kept: gets the logits if the graph ends with them.
        """
        assert self._kv_cache is not None, "graphs are captured over a cache"
        model = self._model
        kernels = model.kernels
        batches = self._batches
        num_tokens = key.num_tokens
        kind = {"is_short": key.is_short, "has_adapters": key.has_adapters}
        batch = batches.padded_batch(key.num_rows, num_tokens, **kind)
        logits = self._head(model.forward(batch, self._kv_cache))
        if kept is not None:
            kept.copy_(logits)
            return kernels.greedy(logits)
        places = places_in(batches.static(key.num_rows, num_tokens), num_tokens)
        if key.way == "greedy":
            tokens, highest = kernels.greedy(logits)
        elif key.way == "penalized":
            _, highest = kernels.greedy(logits)
            self._penalties.apply(kernels, logits)
            tokens = draw(kernels, logits, self._of_seats.take(places.seats), FILTERS, places, None)
            self._penalties.record(tokens)
        else:
            taken = self._of_seats.take(places.seats)
            highest = torch.empty(num_tokens, dtype=torch.float32, device=self._device)
            filters = FILTERS if key.way == "filtered" else ()
            tokens = draw(kernels, logits, taken, filters, places, highest)
        batches.last_tokens.index_copy_(0, places.seats, tokens)
        return tokens, highest


def way_of(draw: Draw) -> Way:
    """Return how a draw chooses tokens, such as "greedy" or "filtered": a part of a graph's key."""
    batch = draw.batch
    if batch.with_grammar or batch.asked:
        return "logits"
    if batch.edits is not None:
        return "penalized" if draw.only_penalizes else "logits"
    if batch.parameters is None:
        return "greedy"
    return "filtered" if batch.parameters.filters else "drawn"


def new_decode_graphs(
    sizes: Sizes,
    model: Model,
    batches: Batches[Any],
    sampler: Sampler,
    device: torch.device,
    vocab_size: int,
    logits: Callable[[Tensor], Tensor] | None = None,
) -> DecodeGraphs | None:
    """Return the decode graphs of a GPU; None if graphs are impossible or turned off.

    vocab_size: number of logits per row. logits: see `DecodeGraphs`.
    """
    captured = find_sizes(sizes, model, batches)
    of_seats = sampler.of_seats
    if not captured or not isinstance(batches, SeatedBatches) or of_seats is None:
        return None
    is_always_short = sizes.max_model_len <= model.kernels.split_keys
    sampler.row_penalties = RowPenalties(sampler.history, batches.capacity, device)
    return DecodeGraphs(
        model,
        batches,
        of_seats,
        sampler.row_penalties,
        device,
        captured,
        vocab_size,
        is_always_short=is_always_short,
        logits=logits,
    )
