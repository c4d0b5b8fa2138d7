"""Executor: what an engine asks of whatever computes its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..base.errors import EngineDeadError
from ..blocks.pool import BlockId
from ..scheduler.schedule import Schedule, StepOutput
from .plan import StepPlan


class PendingStep(Protocol):
    """A step that was launched."""

    def result(self) -> StepOutput:
        """Wait for the step. Return a token for each of the plan's sampled rows."""


class Executor(Protocol):
    """Computes steps. `ModelRunner` does so in one process, `DriverRunner` with several.

    num_in_flight: how many steps may be in flight: this many are launched before the results of the first are
        taken. Results are taken in order.
    device: the device of this process.
    """

    num_in_flight: int
    device: torch.device

    def plan(self, schedule: Schedule) -> StepPlan:
        """Make the plan of a step. Only here requests are read."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Launch a step without waiting for it. Steps are launched in the order of their plans."""

    def execute(self, schedule: Schedule) -> StepOutput:
        """Run one step at once, while none is in flight."""

    def discard(self) -> None:
        """Give up the steps in flight, whose results are not taken."""

    def check(self) -> None:
        """Raise RankError if a process of the model has ended, which may happen while no step runs."""

    def recover(self, error: BaseException) -> EngineDeadError | None:
        """Prepare for the next step after one has raised. Return why no step can run any more; None if steps
        can.
        """

    def watch(self, on_loss: Callable[[], object]) -> None:
        """Call a function, from another thread, when `check` may raise."""

    def close(self) -> None:
        """End the other processes of the model."""

    @property
    def exchange_s(self) -> float:
        """The seconds that steps have waited for other processes of the model."""

    @property
    def graph_costs(self) -> tuple[int, int, float]:
        """The number of CUDA graphs, and the bytes and seconds that those of the start took."""

    def describe(self) -> str:
        """Return dtype, device, threads and attention backend as one phrase."""

    @property
    def weight_bytes(self) -> dict[str, int]:
        """The bytes of the weights in their files, by what their format is called."""

    def read_blocks(self, blocks: Sequence[BlockId], groups: Sequence[int]) -> dict[str, Tensor]:
        """Return a copy of blocks on the host: [num_planes, num_blocks, size] by the names of `KVCache`.

        groups: the layer group of each block.
        """

    def write_block(self, block: BlockId, group: int, contents: Mapping[str, Tensor]) -> None:
        """Write into a block what `read_blocks` has returned of one; tensors that are left out stay."""

    def read_states(self, slots: Sequence[int]) -> dict[str, Tensor]:
        """Return a copy of snapshots on the host: [num_layers, num_slots, size] by the names of `StateCache`.

        slots: counted from the first one behind the seats.
        """

    def write_state(self, slot: int, contents: Mapping[str, Tensor]) -> None:
        """Write into the slot of a snapshot what `read_states` has returned of one."""
