"""RowPenalties: the penalties of a step's rows where a CUDA graph reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from ..device.transfers import Sent, Upload
from ..kernels.operations import Kernels
from .token_history import SCRATCH_SLOT, TokenHistory

# That change no logit: repetition, frequency and presence.
NEUTRAL = (1.0, 0.0, 0.0)


class RowPenalties:
    """The penalties of a batch's rows, and the slots of their requests in the token history.

    They are sent when the batch changes. Rows without penalties have neutral ones and share the scratch slot,
    whose counts change no logit.

    capacity: maximum number of rows.
    """

    def __init__(self, history: TokenHistory, capacity: int, device: torch.device) -> None:
        self._history = history
        self._capacity = capacity
        self._slots = torch.full((capacity,), SCRATCH_SLOT, dtype=torch.int64, device=device)
        self._penalties = torch.empty(len(NEUTRAL), capacity, dtype=torch.float32, device=device)
        self._all_rows = torch.arange(capacity, device=device)
        self._sent: tuple[Sent, Sent] | None = None  # that are not written yet

    def put(
        self,
        rows: Sequence[int],
        slots: Sequence[int],
        penalties: Sequence[Sequence[float]],  # repetition, frequency and presence of each of these rows
        upload: Upload,
    ) -> None:
        """Add the penalties of a batch to an upload."""
        if rows[-1] >= self._capacity:  # there is no graph of so many rows
            return
        all_slots = np.full(self._capacity, SCRATCH_SLOT, np.int64)
        all_slots[[*rows]] = slots
        columns = np.repeat(np.array(NEUTRAL, np.float32)[:, None], self._capacity, axis=1)
        columns[:, [*rows]] = penalties
        self._sent = upload.put(all_slots, torch.int64), upload.put(columns, torch.float32)

    def write(self) -> None:
        """Store the penalties that `put` added to an upload, once the upload is sent."""
        if self._sent is not None:
            slots, penalties = self._sent
            self._sent = None
            self._slots.copy_(slots.tensor)
            self._penalties.copy_(penalties.tensor)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Return a context in which every row has the scratch slot."""
        before = self._slots.clone()
        self._slots.fill_(SCRATCH_SLOT)
        try:
            yield
        finally:
            self._slots.copy_(before)

    def apply(self, kernels: Kernels, logits: Tensor) -> None:
        """Apply the penalties to the logits f32[num_rows, vocab_size] in place."""
        num_rows = len(logits)
        history = self._history
        counts = history.output_counts, history.seen
        columns = (column[:num_rows] for column in self._penalties.unbind())
        kernels.apply_penalties(logits, self._all_rows[:num_rows], self._slots[:num_rows], *counts, *columns)

    def record(self, tokens: Tensor) -> None:
        """Count the drawn tokens, i64[num_rows]."""
        self._history.add(self._slots[: len(tokens)], tokens)
