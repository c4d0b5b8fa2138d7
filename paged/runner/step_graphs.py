"""StepGraphs: like CUDA graphs, but on a CPU. Steps are recorded per number of tokens, and replayed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..base.interrupts import HeldInterrupts
from ..kernels.cpu.attention.kernel import ATTEND, MERGE
from ..kernels.cpu.attention.paged_attention import Plan, plan_units
from ..kernels.cpu.attention.units import SPLIT_KEYS
from ..kernels.cpu.launch.graph import Graph, NotRecordableError, Recorder
from ..kernels.cpu.simd.memory import LINE
from ..model.batch import Batch
from ..model.cache.kv_cache import KVCache

logger = logging.getLogger(__name__)

Compute = Callable[[Batch, KVCache], tuple[Tensor, ...]]

MOST_GRAPHS = 256  # about 10 KiB each, 100 KiB for a model of 32 layers
MOST_TOKENS = 512  # in a recorded step; in a larger one, the time between kernels does not matter


class StepGraphs:
    """Recorded steps, whose replay is bitwise equal to the model's forward, without Python between kernels.

    num_kv_heads: in the layers of each layer group.
    """

    # The largest decode step to record including its logits, which stay in memory.
    max_decodes = 64

    def __init__(self, num_heads: int, num_kv_heads: Sequence[int]) -> None:
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._graphs: dict[tuple[object, ...], _StepGraph | None] = {}
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._last: _Last | None = None
        self._has_said_why = False

    def run(self, compute: Compute, batch: Batch, kv_cache: KVCache) -> tuple[Tensor, ...]:
        """Return compute(batch, kv_cache), in memory that the next step overwrites.

        compute: its launches may depend only on the batch's `is_decode` and number of tokens, and on
            attention's plan for the lengths.
        """
        if batch.num_tokens > MOST_TOKENS:
            return compute(batch, kv_cache)
        last = self._last
        num_threads = torch.get_num_threads()
        where = (num_threads, *(tensor.data_ptr() for tensor in kv_cache.tensors.values()))
        if last is not None and batch is last.batch and where == last.where and batch.age < last.end:
            return last.graph.replay()
        seq_lens = batch.queries.seq_lens.numpy()
        starts = batch.queries.cu_seqlens_q.numpy()
        by_heads = {
            num_kv_heads: plan_units(seq_lens, starts, self._num_heads, num_kv_heads, num_threads)
            for num_kv_heads in dict.fromkeys(self._num_kv_heads)
        }
        sizes = [(plan.num_parts, plan.max_rows, len(plan.merges)) for plan in by_heads.values()]
        key = (batch.is_decode, batch.num_tokens, *where, *sizes)
        if key in self._graphs:
            graph = self._graphs.pop(key)
        else:  # Record at first use: in a model of some size, one replay already saves more than this takes.
            graph = self._record(compute, batch, kv_cache)
            if len(self._graphs) == MOST_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
        self._graphs[key] = graph  # now the most recently used
        if graph is None:
            return compute(batch, kv_cache)
        graph.use([by_heads[num_kv_heads] for num_kv_heads in self._num_kv_heads], batch)
        # A plan stays valid until a sequence needs one more split.
        self._last = _Last(batch, batch.age + 1 + int((-seq_lens % SPLIT_KEYS).min()), where, graph)
        return graph.replay()

    def _record(self, compute: Compute, batch: Batch, kv_cache: KVCache) -> _StepGraph | None:
        """Record a step, or return None if torch computes a part of it or memory is short."""
        try:
            # An interrupt between its parts would leave the recorder on, which refuses torch's operations.
            with HeldInterrupts(), Recorder() as recorder:
                outputs = compute(batch, kv_cache)
            graph = _StepGraph(recorder, batch, outputs)
            if graph.num_bytes > len(self._memory):
                self._graphs.clear()
                memory = torch.empty(2 * graph.num_bytes + LINE, dtype=torch.uint8)
                self._memory = memory[-memory.data_ptr() % LINE :]
        except (NotRecordableError, RuntimeError) as error:  # torch has no narrower one for a CPU
            if not self._has_said_why:
                self._has_said_why = True
                logger.warning(
                    "a step of few tokens is slower than if it were recorded, which failed: %s", error
                )
            return None
        graph.use_memory(self._memory)
        return graph


class _Last(NamedTuple):
    """The last step. It also holds for the next one, if that is the same batch, advanced in place."""

    batch: Batch
    end: int  # the age of the batch at which it needs a new plan
    where: tuple[int, ...]
    graph: _StepGraph


class _StepGraph(Graph):
    """A recorded step, for any sequences with the same number of tokens."""

    def __init__(self, recorder: Recorder, batch: Batch, outputs: tuple[Tensor, ...]) -> None:
        super().__init__(recorder, _inputs(batch), outputs, torch.get_num_threads())
        tables = [table.data_ptr() for table in batch.queries.block_tables]
        self._attends = [self.launches_of(ATTEND, block_tables=table) for table in tables]
        merges = {*self.launches_of(MERGE).tolist()}
        # Not np.intersect1d, whose first call imports numpy.ma for 5 ms.
        self._merges = [
            np.array([at for at in (attends + 1).tolist() if at in merges], np.intp)
            for attends in self._attends
        ]

    def use(self, plans: list[Plan], batch: Batch) -> None:  # one plan per layer group
        """Replay with these plans and this batch from now on."""
        of_groups = zip(plans, self._attends, self._merges, batch.queries.block_tables, strict=True)
        for plan, attends, merges, table in of_groups:
            self.set(
                attends,
                ATTEND,
                num_units=len(plan.units),
                units=plan.units.ctypes.data,
                table_stride=table.stride(0) * table.itemsize,
            )
            self.set(merges, MERGE, merges=plan.merges.ctypes.data)
        self._plans = plans  # keeps the memory that the replay reads
        self.use_inputs(_inputs(batch))


def _inputs(batch: Batch) -> list[Tensor]:
    queries = batch.queries
    by_token = (batch.token_ids, batch.positions)
    lengths = (queries.seq_lens, queries.cu_seqlens_q)
    return [*by_token, *lengths, *batch.slot_mapping, *queries.block_tables]
