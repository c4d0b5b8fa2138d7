"""Batches: what the runner asks of whatever makes the batch of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ...device.transfers import Sent, Upload
from ...model.batch import Batch
from ..plan import ComputedPart

if TYPE_CHECKING:
    from ...sampling.seat_parameters import SampledPlaces

Step = TypeVar("Step")


class Batches(Protocol[Step]):
    """Makes the batch of each step from the step's plan and the seats' state, for one model on one device.

    The state of a seat is its request's last token and block tables. `HostBatches` stores it on the host,
    `SeatedBatches` on a GPU.
    """

    def put(self, plan: ComputedPart, upload: Upload) -> Step:
        """Add the numbers of a step's batch to an upload."""

    def batch(self, step: Step) -> Batch:
        """Make the batch of a step whose upload was sent."""

    def places(self, step: Step) -> SampledPlaces | None:
        """Return the seats and positions of the sampled rows, if the device has them; None otherwise."""

    def record(self, step: Step, tokens: Tensor) -> None:
        """Store the drawn tokens of a step, i64[num_logits], from which the next step continues."""


WITHOUT_ADAPTER = -1  # the slot of a token without an adapter


class StepAdapters(NamedTuple):
    """The adapter slots of a step, i32: the slot of each token, and of each output row."""

    by_token: Sent
    by_output: Sent

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return both as tensors on the device, once the upload is sent."""
        return self.by_token.tensor, self.by_output.tensor


def put_adapters(plan: ComputedPart, upload: Upload, num_tokens: int = 0) -> StepAdapters:
    """Add the adapter slots of a step to an upload.

    num_tokens: how many tokens the step is padded to, if it is. Tokens that pad it have no adapter.
    """
    by_token: list[int] = []
    for slot, count in zip(plan.adapters, plan.counts, strict=True):
        by_token += [slot] * count
    by_token += [WITHOUT_ADAPTER] * (num_tokens - len(by_token))
    by_output = [plan.adapters[row] for row in plan.sampled]
    for run in plan.asked:
        by_output += [plan.adapters[run.row]] * (run.end - run.start)
    return StepAdapters(upload.put(by_token, torch.int32), upload.put(by_output, torch.int32))
