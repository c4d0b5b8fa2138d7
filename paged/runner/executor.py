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
        """Wait for the step. Return a token for each sampled row of its plan."""


class Executor(Protocol):
    """Computes steps. `ModelRunner` does so in one process, `DriverRunner` with several.

    num_in_flight: how many steps may be launched before the results of the first are taken. Results are taken
        in order.
    device: the device of this process.
    """

    num_in_flight: int
    device: torch.device

    def plan(self, schedule: Schedule) -> StepPlan:
        """Make the plan of a step. Only this method reads requests."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Launch a step without waiting for it. Steps are launched in the order of their plans."""

    def execute(self, schedule: Schedule) -> StepOutput:
        """Run one step and wait for it. No other step may be in flight."""

    def discard(self) -> None:
        """Give up the steps in flight. Their results will not be taken."""

    def check(self) -> None:
        """Raise RankError if a process of the model has ended, also between steps."""

    def recover(self, error: BaseException) -> EngineDeadError | None:
        """Restore a usable state after a step has raised. Return an error if no step can run any more."""

    def watch(self, on_loss: Callable[[], object]) -> None:
        """Register a function that another thread calls as soon as `check` may raise."""

    def close(self) -> None:
        """End the other processes of the model."""

    @property
    def exchange_s(self) -> float:
        """The total seconds that steps have waited for other processes of the model."""

    @property
    def graph_costs(self) -> tuple[int, int, float]:
        """The number of CUDA graphs, and the bytes and seconds that capturing at the start took."""

    def describe(self) -> str:
        """Describe dtype, device, threads and attention backend in one phrase."""

    @property
    def weight_bytes(self) -> dict[str, int]:
        """The bytes of the weights in their files, by the name of their format."""

    def read_blocks(self, blocks: Sequence[BlockId], groups: Sequence[int]) -> dict[str, Tensor]:
        """Copy blocks to the host: tensors [num_planes, num_blocks, size] by their names in `KVCache`.

        groups: the layer group of each block.
        """

    def write_block(self, block: BlockId, group: int, contents: Mapping[str, Tensor]) -> None:
        """Overwrite a block with the contents of another one, in the form that `read_blocks` returns.

        Tensors of the cache that are missing in `contents` are not changed.
        """

    def read_states(self, slots: Sequence[int]) -> dict[str, Tensor]:
        """Copy snapshots to the host: [num_layers, num_slots, size] by the names of `StateCache`.

        slots: the numbers of the snapshots. Number 0 is the first slot behind the seats.
        """

    def write_state(self, slot: int, contents: Mapping[str, Tensor]) -> None:
        """Overwrite the slot of a snapshot with the state of one snapshot from `read_states`."""
