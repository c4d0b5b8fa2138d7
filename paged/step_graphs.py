"""StepGraphs: the layers of a decode step on a CPU, recorded once for each number of sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from .batch import Batch
from .kernels.numba_attention import ATTEND, MERGE
from .kernels.numba_graph import LINE, Graph, Recorder
from .kernels.numba_paged_attention import Plan, plan_units
from .kv_cache import KVCache
from .models.decoder import RunLayers

MOST_GRAPHS = 512  # some ten KiB each

CosSin = tuple[Tensor, Tensor]


class StepGraphs:
    """Runs the layers of decode steps with the same bits, and without Python between their kernels.

    num_heads, num_kv_heads: of every layer.
    """

    def __init__(self, num_heads: int, num_kv_heads: int) -> None:
        self._num_heads, self._num_kv_heads = num_heads, num_kv_heads
        self._graphs: dict[tuple[int, ...], _Decodes | None] = {}
        self._memory = torch.empty(0, dtype=torch.uint8)

    def run(
        self, run_layers: RunLayers, residual: Tensor, cos_sin: CosSin, batch: Batch, kv_cache: KVCache
    ) -> Tensor:
        """See `Decoder.run_layers`; what it returns is good until the next step."""
        num_threads = torch.get_num_threads()
        plan = plan_units(
            batch.seq_lens.numpy(),
            batch.cu_seqlens_q.numpy(),
            self._num_heads,
            self._num_kv_heads,
            num_threads,
        )
        key = (
            batch.num_tokens, num_threads, plan.num_parts, plan.max_rows, len(plan.merges),
            *(tensor.data_ptr() for tensor in kv_cache.tensors.values()),
        )  # fmt: skip
        graph = self._graphs.get(key, _Decodes)
        if isinstance(graph, _Decodes):
            return graph.run(plan, residual, cos_sin, batch)
        if graph is None:
            return run_layers(residual, cos_sin, batch, kv_cache)
        with Recorder() as recorder:
            hidden = run_layers(residual, cos_sin, batch, kv_cache)
        self._keep(key, None if recorder.failure else _Decodes(recorder, residual, cos_sin, batch, hidden))
        return hidden

    def _keep(self, key: tuple[int, ...], graph: _Decodes | None) -> None:
        """None where the layers do what only torch can: they go on doing it."""
        if graph is not None and graph.num_bytes > len(self._memory):
            self._graphs.clear()
            memory = torch.empty(2 * graph.num_bytes + LINE, dtype=torch.uint8)
            self._memory = memory[-memory.data_ptr() % LINE :]
        elif len(self._graphs) == MOST_GRAPHS:
            self._graphs.clear()
        if graph is not None:
            graph.use_memory(self._memory)
        self._graphs[key] = graph


class _Decodes(Graph):
    """The layers for so many sequences of any lengths."""

    def __init__(
        self, recorder: Recorder, residual: Tensor, cos_sin: CosSin, batch: Batch, hidden: Tensor
    ) -> None:
        super().__init__(recorder, _inputs(residual, cos_sin, batch), hidden, torch.get_num_threads())
        tables = [table.data_ptr() for table in batch.block_tables]
        self._attends = [self.launches_of(ATTEND, block_tables=table) for table in tables]
        self._merges = self.launches_of(MERGE)

    def run(self, plan: Plan, residual: Tensor, cos_sin: CosSin, batch: Batch) -> Tensor:
        """Run them for this batch."""
        for attends, table in zip(self._attends, batch.block_tables, strict=True):
            self.set(
                attends,
                ATTEND,
                num_units=len(plan.units),
                units=plan.units.ctypes.data,
                table_stride=table.stride(0) * table.itemsize,
            )
        self.set(self._merges, MERGE, merges=plan.merges.ctypes.data)
        return self.replay(_inputs(residual, cos_sin, batch))


def _inputs(residual: Tensor, cos_sin: CosSin, batch: Batch) -> list[Tensor]:
    lengths = (batch.seq_lens, batch.cu_seqlens_q)
    return [residual, *cos_sin, *lengths, *batch.slot_mapping, *batch.block_tables]
