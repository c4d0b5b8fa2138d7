"""StepGraphs: like CUDA graphs, but on a CPU. Steps are recorded per number of tokens, and replayed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..base.interrupts import HeldInterrupts
from ..kernels.steps import NotRecordableError, RecordedStep, StepRecorder
from ..model.batch import Batch
from ..model.cache.kv_cache import KVCache

logger = logging.getLogger(__name__)

Compute = Callable[[Batch, KVCache], tuple[Tensor, ...]]

MOST_GRAPHS = 256  # about 10 KiB each, 100 KiB for a model of 32 layers
MOST_TOKENS = 512  # in a recorded step; in a larger one, the time between kernels does not matter


class StepGraphs:
    """Recorded steps. A replay equals the model's forward bitwise, but runs no Python between kernels."""

    # The largest decode step to record including its logits, which stay in memory.
    max_decodes = 64

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder
        self._graphs: dict[tuple[object, ...], _Recorded | None] = {}
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._last: _Last | None = None
        self._has_said_why = False

    def run(
        self, compute: Compute, batch: Batch, kv_cache: KVCache, given: Sequence[Tensor] = ()
    ) -> tuple[Tensor, ...]:
        """Replay the recorded launches of compute(batch, kv_cache), or record them first. Return the result.

        The next step overwrites the memory of the result.

        compute: the function to record. Its launches may depend only on the batch's `is_decode`, its number
            of tokens, and attention's plan for the lengths.
        given: further tensors that `compute` reads, changes or returns. They may differ from step to step.
        """
        if batch.num_tokens > MOST_TOKENS:
            return compute(batch, kv_cache)
        last = self._last
        where = (torch.get_num_threads(), *(tensor.data_ptr() for tensor in kv_cache.tensors.values()))
        if (
            last is not None
            and not given
            and batch is last.batch
            and where == last.where
            and batch.age < last.end
        ):
            return last.step.replay()
        queries = batch.queries
        plan = self._recorder.plan(queries.seq_lens, queries.cu_seqlens_q)
        key = (batch.is_decode, batch.num_tokens, batch.adapters is None, *where, *plan.sizes)
        if key in self._graphs:
            graph = self._graphs.pop(key)
        else:  # Record at first use: in a model of some size, one replay already saves more than this takes.
            graph = self._record(compute, batch, kv_cache, given)
            if len(self._graphs) == MOST_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
        self._graphs[key] = graph  # now the most recently used
        if graph is None:
            return compute(batch, kv_cache)
        graph.step.use(plan, [*_inputs(batch), *given], queries.block_tables)
        self._last = _Last(batch, batch.age + plan.num_steps, where, graph.step)
        made = iter(graph.step.replay())
        return tuple(next(made) if place is None else given[place] for place in graph.places)

    def _record(
        self, compute: Compute, batch: Batch, kv_cache: KVCache, given: Sequence[Tensor]
    ) -> _Recorded | None:
        """Record a step, or return None if torch computes a part of it or memory is short."""
        places: list[int | None] = []

        def computed() -> tuple[Tensor, ...]:
            found = compute(batch, kv_cache)
            places.extend(next((i for i, own in enumerate(given) if own is each), None) for each in found)
            return tuple(each for each, place in zip(found, places, strict=True) if place is None)

        try:
            # An interrupt between its parts would leave the recorder on, which refuses torch's operations.
            with HeldInterrupts():
                graph = self._recorder.record(computed, [*_inputs(batch), *given], batch.queries.block_tables)
            if graph.num_bytes > len(self._memory):
                self._graphs.clear()
                self._memory = self._recorder.new_memory(2 * graph.num_bytes)
        except (NotRecordableError, RuntimeError) as error:  # torch has no narrower one for a CPU
            if not self._has_said_why:
                self._has_said_why = True
                logger.warning(
                    "a step of few tokens is slower than if it were recorded, which failed: %s", error
                )
            return None
        graph.use_memory(self._memory)
        return _Recorded(graph, places)


class _Recorded(NamedTuple):
    """A recorded step. places: which of the given tensors each result is; None: the replay makes it."""

    step: RecordedStep
    places: list[int | None]


class _Last(NamedTuple):
    """The last step. It also holds for the next one, if that is the same batch, advanced in place."""

    batch: Batch
    end: int  # the age of the batch at which it needs a new plan
    where: tuple[int, ...]
    step: RecordedStep


def _inputs(batch: Batch) -> list[Tensor]:
    queries = batch.queries
    by_token = (batch.token_ids, batch.positions)
    lengths = (queries.seq_lens, queries.cu_seqlens_q)
    others = (each for each in (batch.seats, batch.runs, batch.adapters) if each is not None)
    return [*by_token, *lengths, *batch.slot_mapping, *queries.block_tables, *others]
