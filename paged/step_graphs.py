"""StepGraphs: decode steps of a model on a CPU, recorded once for each number of sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .batch import Batch
from .kernels.numba_attention import ATTEND, MERGE, SPLIT
from .kernels.numba_graph import Graph, Recorder
from .kernels.numba_memory import LINE
from .kernels.numba_paged_attention import Plan, plan_units
from .kv_cache import KVCache

Compute = Callable[[Batch, KVCache], tuple[Tensor, ...]]

MOST_GRAPHS = 256  # some ten KiB each, a hundred of a model of 32 layers
# Of a step that is recorded: of a larger one the kernels take longer than what is between them, and all that
# is recorded is in memory at once.
MOST_SEQUENCES = 64


class StepGraphs:
    """Computes decode steps with the same bits as the model's own way, without Python between its kernels.

    num_heads, num_kv_heads: of every layer.
    """

    def __init__(self, num_heads: int, num_kv_heads: int) -> None:
        self._num_heads, self._num_kv_heads = num_heads, num_kv_heads
        self._graphs: dict[tuple[int, ...], _DecodeGraph | None] = {}
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._seen: set[tuple[int, ...]] = set()
        self._last: _Last | None = None

    def run(self, compute: Compute, batch: Batch, kv_cache: KVCache) -> tuple[Tensor, ...]:
        """compute(batch, kv_cache), in memory that the next step overwrites."""
        if batch.num_tokens > MOST_SEQUENCES:
            return compute(batch, kv_cache)
        last, num_threads = self._last, torch.get_num_threads()
        where = (num_threads, *(tensor.data_ptr() for tensor in kv_cache.tensors.values()))
        if last is not None and batch is last.batch and where == last.where and batch.age < last.end:
            return last.graph.replay()
        seq_lens = batch.queries.seq_lens.numpy()
        plan = plan_units(
            seq_lens, batch.queries.cu_seqlens_q.numpy(), self._num_heads, self._num_kv_heads, num_threads
        )
        key = (batch.num_tokens, *where, plan.num_parts, plan.max_rows, len(plan.merges))
        graph = self._graphs.get(key)
        if graph is not None:
            graph.use(plan, batch)
            # A plan is good while no sequence needs one more split.
            self._last = _Last(batch, batch.age + 1 + int((-seq_lens % SPLIT).min()), where, graph)
            return graph.replay()
        if key in self._graphs:
            return compute(batch, kv_cache)
        if key not in self._seen:  # what comes once is not worth it, nor may all be made that is made once
            if len(self._seen) == 8 * MOST_GRAPHS:
                self._seen.clear()
            self._seen.add(key)
            return compute(batch, kv_cache)
        with Recorder() as recorder:
            outputs = compute(batch, kv_cache)
        self._keep(key, None if recorder.failure else _DecodeGraph(recorder, batch, outputs))
        return outputs

    def _keep(self, key: tuple[int, ...], graph: _DecodeGraph | None) -> None:
        """None where the model does what only torch can: it goes on doing it."""
        if graph is not None and graph.num_bytes > len(self._memory):
            self._graphs.clear()
            memory = torch.empty(2 * graph.num_bytes + LINE, dtype=torch.uint8)
            self._memory = memory[-memory.data_ptr() % LINE :]
        elif len(self._graphs) == MOST_GRAPHS:
            self._graphs.clear()
            self._seen.clear()
        if graph is not None:
            graph.use_memory(self._memory)
        self._graphs[key] = graph


class _Last(NamedTuple):
    """The last step. Where the same batch, brought up to date in place, is the next one, all holds for it."""

    batch: Batch
    end: int  # the age of the batch that needs another plan
    where: tuple[int, ...]
    graph: _DecodeGraph


class _DecodeGraph(Graph):
    """A step of so many sequences of any lengths."""

    def __init__(self, recorder: Recorder, batch: Batch, outputs: tuple[Tensor, ...]) -> None:
        super().__init__(recorder, _inputs(batch), outputs, torch.get_num_threads())
        tables = [table.data_ptr() for table in batch.queries.block_tables]
        self._attends = [self.launches_of(ATTEND, block_tables=table) for table in tables]
        self._merges = self.launches_of(MERGE)

    def use(self, plan: Plan, batch: Batch) -> None:
        """Compute this one from now on."""
        for attends, table in zip(self._attends, batch.queries.block_tables, strict=True):
            self.set(
                attends,
                ATTEND,
                num_units=len(plan.units),
                units=plan.units.ctypes.data,
                table_stride=table.stride(0) * table.itemsize,
            )
        self.set(self._merges, MERGE, merges=plan.merges.ctypes.data)
        self._plan = plan  # whose memory it reads
        self.use_inputs(_inputs(batch))


def _inputs(batch: Batch) -> list[Tensor]:
    queries = batch.queries
    by_token, lengths = (batch.token_ids, batch.positions), (queries.seq_lens, queries.cu_seqlens_q)
    return [*by_token, *lengths, *batch.slot_mapping, *queries.block_tables]
