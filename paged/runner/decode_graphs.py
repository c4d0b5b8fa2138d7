"""DecodeGraphs: CUDA graphs of decodes and runs of drafts, from the embedding to the drawn tokens."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..base.errors import ResourceError
from ..device.cuda_graphs import Cost, GraphPool
from ..device.devices import is_shortage
from ..device.transfers import Download
from ..kernels.checks import TrustedContents, in_debug_mode
from ..model.cache.kv_cache import KVCache
from ..model.model import Model
from ..sampling.row_penalties import RowPenalties
from ..sampling.sampler import Draw, Sampler
from ..sampling.seat_parameters import FILTERS, SeatParameters, draw
from .batches.batches import Batches
from .batches.seats import SeatedBatches, places_in
from .graph_memory import RESERVE, capture_sizes, most_graph_tokens
from .sizes import Sizes

if TYPE_CHECKING:
    from ..sampling.structured_outputs import GrammarMasks

logger = logging.getLogger(__name__)

# How a step draws its tokens; "penalized": with all filters as well; "logits": by more than the parameters
# and penalties that a device keeps.
Way = Literal["greedy", "drawn", "filtered", "penalized", "logits"]
CAPTURED_AT_START: tuple[Way, ...] = ("greedy", "drawn")
MOST_LATE = 64  # graphs that are captured later: the least recently used goes


class _Key(NamedTuple):
    """What the launches of a step follow from.

    num_tokens: as many as num_rows, or as many as rows that all have the longest run of drafts.
    is_short: whether no context is split, so that nothing is merged.
    has_adapters: whether a token has a LoRA adapter, so that what adapters add is computed.
    """

    num_rows: int
    num_tokens: int
    is_short: bool
    way: Way
    has_adapters: bool


class DecodeGraph(NamedTuple):
    """A captured step. Its tensors have a row for each token and hold the results of the last replay.

    logits: None if the graph itself draws and records the tokens.
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


class DecodeGraphs:
    """CUDA graphs of steps that sample after each of their tokens: decodes, and runs of drafts.

    Steps are padded to a few sizes. Graphs read what `SeatedBatches.unpack` has written.

    The engine captures the graphs that most steps need at its start, the largest first. Other graphs, such as
    graphs for runs of drafts, are captured by the first step that needs them, as long as the memory reserved
    for this suffices. A step whose graph cannot be captured runs without a graph.

    sizes: numbers of rows, in ascending order.
    cost: the time and memory that the graphs captured at the start took.
    logits: computes logits from final hidden states; None: the method of the model is used.
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
        self.sizes = sizes
        self.cost = Cost(0, 0.0)
        self._model = model
        self._batches = batches
        self._of_seats = of_seats
        self._penalties = penalties
        self._device = device
        self._logits_of = logits or model.logits
        self._logits_shape = most_graph_tokens(sizes, batches.max_run, batches.capacity), vocab_size
        self._lengths = (True,) if is_always_short else (False, True)
        self._has_said_why = False
        self.forget()

    @property
    def reserve(self) -> int:
        """The bytes reserved for graphs that are captured after the start."""
        num_tokens, vocab_size = self._logits_shape
        return RESERVE + 4 * num_tokens * vocab_size

    @property
    def num_graphs(self) -> int:
        """The number of captured graphs."""
        return sum(graph is not None for graph in (*self._graphs.values(), *self._late.values()))

    def forget(self) -> None:
        """Drop all graphs. Call this before freeing the KV cache that they read."""
        self._graphs: dict[_Key, DecodeGraph | None] = {}
        self._late: dict[_Key, DecodeGraph | None] = {}  # the most recently used at the end
        self._late_bytes: dict[_Key, int] = {}
        self._logits: Tensor | None = None
        self._kv_cache: KVCache | None = None
        self._pool = GraphPool(self._device)
        self._batches.padded_sizes = ()

    def capture(self, kv_cache: KVCache, captured: Callable[[], object] | None = None) -> Cost:
        """Capture the graphs that the start captures, over this cache.

        captured: called after each graph.

        Raises torch.OutOfMemoryError if memory does not suffice.
        """
        self.forget()
        self._kv_cache = kv_cache
        adapters = self._batches.has_adapters
        kinds = product(reversed(self.sizes), self._lengths, CAPTURED_AT_START, adapters)
        keys = [_Key(num_rows, num_rows, *others) for num_rows, *others in kinds]

        def capture() -> None:
            for key in keys:
                self._graphs[key] = self._captured(key, is_late=False)
                if captured is not None:
                    captured()

        self.cost = self._pool.measure(capture)
        self._batches.padded_sizes = self.sizes
        return self.cost

    def capture_for_good(self, kv_cache: KVCache) -> None:
        """Capture the graphs that the start captures, over the engine's own cache.

        Raises ResourceError if memory does not suffice.
        """
        expected = self.cost.num_bytes
        with torch.cuda.device(self._device), TrustedContents():
            try:
                cost = self.capture(kv_cache)
            except torch.OutOfMemoryError as error:
                raise ResourceError(
                    f"no memory for CUDA graphs of {self.sizes[-1]} decodes beside the KV cache on "
                    f"{self._device}: lower max_cudagraph_capture_size or num_blocks, or set "
                    f"enforce_eager=True; {error}"
                ) from error
        mib = 2**20
        logger.info(
            "%d CUDA graphs in %.1f s and %.0f MiB (%+.0f MiB against their profile)",
            *(self.num_graphs, cost.seconds, cost.num_bytes / mib, (cost.num_bytes - expected) / mib),
        )

    def profile(self, kv_cache: KVCache) -> int:
        """Capture the graphs that the start captures, over a temporary cache, and drop them.

        Returns the bytes that graphs will take, including graphs that are captured later.
        """
        with torch.cuda.device(self._device), TrustedContents():
            cost = self.capture(kv_cache)
        self.forget()
        return cost.num_bytes + self.reserve

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
        out = step.out
        way = way_of(draw)
        shape = len(out.seq_lens), out.by_token.shape[1]
        graph = self.find(*shape, step.max_seq_len, way, has_adapters=step.adapters is not None)
        if graph is None:
            return None
        self._batches.unpack(step)
        if way == "penalized":
            draw.count_history()
        graph.graph.replay()
        num_tokens = step.num_tokens
        logits = None if graph.logits is None else graph.logits[:num_tokens]
        return Replayed(graph.tokens[:num_tokens], graph.highest[:num_tokens], logits)

    def find(
        self,
        num_rows: int,
        num_tokens: int,
        max_seq_len: int | None,
        way: Way,
        *,
        has_adapters: bool = False,
    ) -> DecodeGraph | None:
        """Return the graph for a padded step; None if the step must run without one.

        The graph may be captured by this call. Call this before the step is unpacked.

        num_rows, num_tokens: of the padded step. max_seq_len: None if attention may split a context.
        """
        key = _Key(num_rows, num_tokens, max_seq_len is not None, way, has_adapters)
        if key in self._graphs:
            return self._graphs[key]
        graph = self._late.pop(key) if key in self._late else self._capture_late(key)
        self._late[key] = graph  # now the most recently used
        return graph

    def _capture_late(self, key: _Key) -> DecodeGraph | None:
        while len(self._late) >= MOST_LATE or sum(self._late_bytes.values()) > RESERVE:
            oldest = next(iter(self._late))
            del self._late[oldest]
            self._late_bytes.pop(oldest, None)
        made: list[DecodeGraph | None] = []
        cost = self._pool.measure(lambda: made.append(self._captured(key, is_late=True)))
        self._late_bytes[key] = cost.num_bytes
        return made[0]

    def _captured(self, key: _Key, *, is_late: bool) -> DecodeGraph | None:
        """Capture a step without a row, padded to all of them; None, and say so once, if that fails."""
        self._batches.clear(key.num_rows, key.num_tokens)
        try:
            if key.way == "logits" and self._logits is None:
                self._logits = torch.empty(self._logits_shape, dtype=torch.float32, device=self._device)
            with self._penalties.set_aside():  # the step that is captured draws for no request
                graph, (tokens, highest) = self._pool.capture(lambda: self._compute(key))
        except Exception as error:
            if is_shortage(error) and not is_late:
                raise
            self._explain(key, error)
            return None
        logits = self._logits[: key.num_tokens] if key.way == "logits" and self._logits is not None else None
        return DecodeGraph(graph, tokens, highest, logits)

    def _compute(self, key: _Key) -> tuple[Tensor, Tensor]:
        """Compute a step, in the tensors that it is unpacked into. Return tokens and the highest logits."""
        assert self._kv_cache is not None, "graphs are captured over a cache"
        model = self._model
        kernels = model.kernels
        batches = self._batches
        num_tokens = key.num_tokens
        kind = {"is_short": key.is_short, "has_adapters": key.has_adapters}
        batch = batches.padded_batch(key.num_rows, num_tokens, **kind)
        logits = self._logits_of(model.forward(batch, self._kv_cache))
        if key.way == "logits":
            assert self._logits is not None, "there is memory for logits"
            self._logits[:num_tokens].copy_(logits)
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

    def _explain(self, key: _Key, error: Exception) -> None:
        """Say once why a step runs without a graph."""
        if self._has_said_why:
            return
        self._has_said_why = True
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        drafts = "" if key.num_tokens == key.num_rows else f" with drafts, {key.num_tokens} tokens,"
        logger.warning(
            "decodes of %d rows%s (%s) run without a CUDA graph, because %s could not be captured: %s",
            key.num_rows,
            drafts,
            key.way,
            _place_of(error.__traceback__),
            reason,
        )


def way_of(draw: Draw) -> Way:
    """Return how a draw chooses tokens, as the key of a graph."""
    batch = draw.batch
    if batch.with_grammar or batch.asked:
        return "logits"
    if batch.edits is not None:
        return "penalized" if draw.only_penalizes else "logits"
    if batch.parameters is None:
        return "greedy"
    return "filtered" if batch.parameters.filters else "drawn"


def _place_of(traceback: TracebackType | None) -> str:
    """Return the innermost line of this package that an error came through."""
    package = Path(sys.modules[__package__.partition(".")[0]].__file__ or "").parent
    found = "a step"
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if Path(code.co_filename).is_relative_to(package):
            name = Path(code.co_filename).relative_to(package)
            found = f"{name}:{traceback.tb_lineno} ({code.co_qualname})"
        traceback = traceback.tb_next
    return found


def new_decode_graphs(
    sizes: Sizes,
    model: Model,
    batches: Batches[Any],
    sampler: Sampler,
    device: torch.device,
    vocab_size: int,
    logits: Callable[[Tensor], Tensor] | None = None,
) -> DecodeGraphs | None:
    """Return the decode graphs of a GPU; None if graphs are impossible or turned off. Log why they are
    impossible.

    vocab_size: number of logits per row. logits: see `DecodeGraphs`.
    """
    config = sizes.config
    # Debug mode reads what tensors hold.
    if config.enforce_eager or in_debug_mode():
        return None
    captured = capture_sizes(config)
    of_seats = sampler.of_seats
    obstacle = None
    if sizes.part is not None:
        obstacle = "processes of a model exchange tensors by calls of the host"
    elif not isinstance(batches, SeatedBatches) or of_seats is None:
        obstacle = f"attention_backend {model.kernels.name!r} makes batches on the host"
    elif not captured:
        obstacle = f"none of cudagraph_capture_sizes is within max_num_seqs {config.num_seats}"
    if obstacle is not None or not isinstance(batches, SeatedBatches) or of_seats is None:
        logger.warning("there are no CUDA graphs, because %s: decodes of few requests take longer", obstacle)
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
