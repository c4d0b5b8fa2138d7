"""Make the batch of a schedule, as the runner does."""

from typing import Any

from paged.device.transfers import Transfers
from paged.model.batch import Batch
from paged.runner.batches.batches import Batches
from paged.scheduler.schedule import Schedule


def made(batches: Batches[Any], schedule: Schedule, transfers: Transfers) -> tuple[Any, Batch]:
    """Return what `put` returns, and the batch."""
    upload = transfers.new_upload()
    step = batches.put(schedule, upload)
    upload.send()
    return step, batches.batch(step)
