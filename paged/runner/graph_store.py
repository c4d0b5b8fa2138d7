"""GraphStore: captures CUDA graphs of padded steps, keeps them, and finds the graph of a step."""

from __future__ import annotations

import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from ..base.errors import ResourceError
from ..device.cuda_graphs import Cost, GraphPool
from ..device.devices import is_shortage
from ..kernels.checks import TrustedContents, in_debug_mode
from ..model.cache.kv_cache import KVCache
from ..model.model import Model
from .batches.batches import Batches
from .batches.seats import SeatedBatches
from .graph_memory import RESERVE, capture_sizes, most_graph_tokens
from .sizes import Sizes

logger = logging.getLogger(__name__)

# How a step draws its tokens; "penalized": with all filters as well; "logits": by more than the parameters
# and penalties that a device keeps; "stream": it draws none, because later layers are in another process.
Way = Literal["greedy", "drawn", "filtered", "penalized", "logits", "stream"]
MOST_LATE = 64  # graphs that are captured later: the least recently used goes
G = TypeVar("G")


class GraphKey(NamedTuple):
    """What the launches of a step follow from.

    num_tokens: as many as num_rows, or as many as rows that all have the longest run of drafts.
    is_short: whether no context is split, so that nothing is merged.
    has_adapters: whether a token has a LoRA adapter, so that the products with adapters are computed.
    """

    num_rows: int
    num_tokens: int
    is_short: bool
    way: Way
    has_adapters: bool


class GraphStore(ABC, Generic[G]):
    """Captures CUDA graphs of steps that sample after each of their tokens: decodes, and runs of drafts.

    Steps are padded to a few sizes. Graphs read what `SeatedBatches.unpack` has written.

    The engine captures the graphs that most steps need at its start, the largest first. Other graphs, such as
    graphs for runs of drafts, are captured by the first step that needs them, as long as the memory reserved
    for this suffices. A step whose graph cannot be captured runs without a graph.

    sizes: numbers of rows, in ascending order.
    cost: the time and memory that the graphs captured at the start took.
    max_tokens: maximum number of tokens in a graph.
    """

    def __init__(
        self,
        batches: SeatedBatches,
        device: torch.device,
        sizes: Sequence[int],
        vocab_size: int,
        ways: Sequence[Way],
        *,
        is_always_short: bool,
    ) -> None:
        """Keep no graphs yet.

        vocab_size: number of logits per row; 0 if steps have none. ways: of the graphs of the start.
        is_always_short: whether attention never splits a context.
        """
        self.sizes = sizes
        self.cost = Cost(0, 0.0)
        self.max_tokens = most_graph_tokens(sizes, batches.max_run, batches.capacity)
        self._batches = batches
        self._device = device
        self._vocab_size = vocab_size
        self._ways = ways
        self._lengths = (True,) if is_always_short else (False, True)
        self._has_said_why = False
        self._pool = GraphPool(device)
        self.forget()

    @abstractmethod
    def _capture(self, key: GraphKey) -> G:
        """Capture a step of this kind, in the tensors that it is unpacked into."""

    @property
    def reserve(self) -> int:
        """The bytes that are reserved for graphs captured after the start."""
        return RESERVE + 4 * self.max_tokens * self._vocab_size

    @property
    def num_graphs(self) -> int:
        """The number of captured graphs."""
        return sum(graph is not None for graph in (*self._graphs.values(), *self._late.values()))

    def forget(self) -> None:
        """Drop all graphs. Call this before freeing the KV cache that they read."""
        self._graphs: dict[GraphKey, G | None] = {}
        self._late: dict[GraphKey, G | None] = {}  # the most recently used at the end
        self._late_bytes: dict[GraphKey, int] = {}
        self._logits: Tensor | None = None
        self._kv_cache: KVCache | None = None
        self._pool.renew()
        self._batches.padded_sizes = ()

    def capture(self, kv_cache: KVCache, captured: Callable[[], object] | None = None) -> Cost:
        """Capture the graphs of the start over a cache.

        captured: called after each graph.

        Raises torch.OutOfMemoryError if memory does not suffice.
        """
        self.forget()
        self._kv_cache = kv_cache

        def capture() -> None:
            for key in self._keys_at_start():
                self._graphs[key] = self._captured(key, is_late=False)
                if captured is not None:
                    captured()

        self.cost = self._pool.measure(capture)
        self._batches.padded_sizes = self.sizes
        return self.cost

    def _keys_at_start(self) -> list[GraphKey]:
        kinds = product(reversed(self.sizes), self._lengths, self._ways, self._batches.adapter_choices)
        return [GraphKey(rows, rows, is_short, way, adapters) for rows, is_short, way, adapters in kinds]

    def capture_for_good(self, kv_cache: KVCache) -> None:
        """Capture the graphs of the start over the engine's own cache, and keep them.

        Raises ResourceError if memory does not suffice.
        """
        expected = self.cost.num_bytes
        num_graphs = len(self._keys_at_start())
        bar = tqdm(total=num_graphs, desc="Capturing CUDA graphs", unit="graph", delay=1.0)
        with torch.cuda.device(self._device), TrustedContents(), bar:
            try:
                cost = self.capture(kv_cache, bar.update)
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
        """Capture the graphs of the start over a temporary cache, and drop them.

        Returns the bytes that graphs will take, including graphs that are captured later.
        """
        with torch.cuda.device(self._device), TrustedContents():
            cost = self.capture(kv_cache)
        self.forget()
        return cost.num_bytes + self.reserve

    def find(self, step: Any, way: Way) -> G | None:
        """Return the graph for a padded step; None if the step must run without one.

        The graph may be captured by this call. Call this before the step is unpacked.

        step: what `SeatedBatches.put` returned.
        """
        num_rows = len(step.out.seq_lens)
        num_tokens = step.out.by_token.shape[1]
        is_short = step.max_seq_len is not None  # attention splits no context
        key = GraphKey(num_rows, num_tokens, is_short, way, has_adapters=step.adapters is not None)
        if key in self._graphs:
            return self._graphs[key]
        graph = self._late.pop(key) if key in self._late else self._capture_late(key)
        self._late[key] = graph  # now the most recently used
        return graph

    def _capture_late(self, key: GraphKey) -> G | None:
        while len(self._late) >= MOST_LATE or sum(self._late_bytes.values()) > RESERVE:
            oldest = next(iter(self._late))
            del self._late[oldest]
            self._late_bytes.pop(oldest, None)
        made: list[G | None] = []
        cost = self._pool.measure(lambda: made.append(self._captured(key, is_late=True)))
        self._late_bytes[key] = cost.num_bytes
        return made[0]

    def _captured(self, key: GraphKey, *, is_late: bool) -> G | None:
        """Capture a step without a row, padded to all of them; None, and say so once, if that fails."""
        self._batches.clear(key.num_rows, key.num_tokens)
        try:
            return self._capture(key)
        except Exception as error:
            if is_shortage(error) and not is_late:
                raise
            self._explain(key, error)
            return None

    def _logits_of(self, num_tokens: int) -> Tensor:
        """Return memory for the logits of so many tokens, f32[num_tokens, vocab_size]."""
        if self._logits is None:
            shape = self.max_tokens, self._vocab_size
            self._logits = torch.empty(shape, dtype=torch.float32, device=self._device)
        return self._logits[:num_tokens]

    def _explain(self, key: GraphKey, error: Exception) -> None:
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


def find_sizes(sizes: Sizes, model: Model, batches: Batches[Any]) -> list[int]:
    """Return the numbers of rows to capture; none if graphs are turned off or impossible.

    Log why graphs are impossible, in one process of a model.
    """
    config = sizes.config
    # Debug mode reads what tensors hold.
    if config.enforce_eager or in_debug_mode():
        return []
    captured = capture_sizes(config)
    if not sizes.shard.is_whole:
        obstacle = "shards of a model exchange tensors by calls of the host"
    elif not isinstance(batches, SeatedBatches):
        obstacle = f"attention_backend {model.kernels.name!r} makes batches on the host"
    elif "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:
        obstacle = "PYTORCH_NO_CUDA_MEMORY_CACHING is set, without which torch keeps memory for graphs"
    elif not captured:
        obstacle = f"none of cudagraph_capture_sizes is within max_num_seqs {config.num_seats}"
    else:
        return captured
    if sizes.part is None or (sizes.part.is_last and sizes.shard.index == 0):
        logger.warning("there are no CUDA graphs, because %s: decodes of few requests take longer", obstacle)
    return []
