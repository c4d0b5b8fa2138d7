"""Recorded steps: like CUDA graphs, but on a CPU; see `launch.graph`."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..steps import AttentionSchedule
from .attention.paged_attention import ATTEND, MERGE, SPLIT_KEYS, plan_units
from .launch.graph import Graph, Recorder
from .target import LINE


class CPUStepRecorder:
    """The `steps.StepRecorder` of the CPU backend.

    num_kv_heads: the number of KV heads of each layer group.
    """

    def __init__(self, num_heads: int, num_kv_heads: Sequence[int]) -> None:
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads

    def plan(self, seq_lens: Tensor, cu_seqlens_q: Tensor) -> AttentionSchedule:
        """Plan the attention of a step."""
        lengths = seq_lens.numpy()
        starts = cu_seqlens_q.numpy()
        num_threads = torch.get_num_threads()
        by_heads = {
            num_kv_heads: plan_units(lengths, starts, self._num_heads, num_kv_heads, num_threads)
            for num_kv_heads in dict.fromkeys(self._num_kv_heads)
        }
        sizes = tuple((plan.num_parts, plan.max_rows, len(plan.merges)) for plan in by_heads.values())
        # A plan stays valid until a sequence needs one more split.
        num_steps = 1 + int((-lengths % SPLIT_KEYS).min())
        return AttentionSchedule([by_heads[number] for number in self._num_kv_heads], sizes, num_steps)

    def record(
        self,
        compute: Callable[[], tuple[Tensor, ...]],
        inputs: Sequence[Tensor],
        block_tables: Sequence[Tensor],
    ) -> "_StepGraph":
        """Record the launches of compute(). Nothing is computed."""
        with Recorder() as recorder:
            outputs = compute()
        return _StepGraph(recorder, inputs, block_tables, outputs)

    def new_memory(self, num_bytes: int) -> Tensor:
        """Allocate memory for replays, aligned to a cache line."""
        memory = torch.empty(num_bytes + LINE, dtype=torch.uint8)
        return memory[-memory.data_ptr() % LINE :]


class _StepGraph(Graph):
    """A recorded step, see `steps.RecordedStep`."""

    def __init__(
        self,
        recorder: Recorder,
        inputs: Sequence[Tensor],
        block_tables: Sequence[Tensor],
        outputs: tuple[Tensor, ...],
    ) -> None:
        super().__init__(recorder, inputs, outputs, torch.get_num_threads())
        tables = [table.data_ptr() for table in block_tables]
        self._attends = [self.launches_of(ATTEND, block_tables=table) for table in tables]
        merges = {*self.launches_of(MERGE).tolist()}
        # Not np.intersect1d, whose first call imports numpy.ma for 5 ms.
        self._merges = [
            np.array([at for at in (attends + 1).tolist() if at in merges], np.intp)
            for attends in self._attends
        ]

    def use(self, plan: AttentionSchedule, inputs: Sequence[Tensor], block_tables: Sequence[Tensor]) -> None:
        """Replay with this plan and these tensors from now on."""
        of_groups = zip(plan.of_groups, self._attends, self._merges, block_tables, strict=True)
        for own, attends, merges, table in of_groups:
            self.set(
                attends,
                ATTEND,
                num_units=len(own.units),
                units=own.units.ctypes.data,
                table_stride=table.stride(0) * table.itemsize,
            )
            self.set(merges, MERGE, merges=own.merges.ctypes.data)
        self._plan = plan  # keeps the memory that the replay reads
        self.use_inputs(inputs)
