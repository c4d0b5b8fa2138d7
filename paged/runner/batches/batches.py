"""Batches: what the runner asks of whatever makes the batch of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from torch import Tensor

from ...device.transfers import Upload
from ...model.batch import Batch
from ..plan import ComputedPart

if TYPE_CHECKING:
    from ...sampling.seat_parameters import SampledPlaces

Step = TypeVar("Step")


class Batches(Protocol[Step]):
    """Makes the batch of each step, for one model on one device, from its plan and the state of the seats.

    It keeps the state of each seat, its last token and its block tables: `HostBatches` on the host,
    `SeatedBatches` on a GPU.
    """

    def put(self, plan: ComputedPart, upload: Upload) -> Step:
        """Add what the device needs for the batch of a step to the upload."""

    def batch(self, step: Step) -> Batch:
        """Make the batch of a step whose upload is sent."""

    def places(self, step: Step) -> SampledPlaces | None:
        """Return the seats and positions of what a step samples, on the device; None: the host sends them."""

    def record(self, step: Step, tokens: Tensor) -> None:
        """Keep the tokens that a step has drawn, i64[num_logits], where the next step takes them from."""
