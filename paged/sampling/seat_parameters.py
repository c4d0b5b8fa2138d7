"""SeatParameters: the sampling parameters of running requests, which a GPU keeps by seat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..device.transfers import Sent, Upload
from ..kernels.seats import NUM_PARAMETER_WORDS, RowParameters, TakeParameters
from .parameters import WORDS, used_filters
from .seats import DraftRow, Sampled

if TYPE_CHECKING:
    from ..kernels.operations import Kernels

FILTERS = ("min_p", "top_n_sigma", "typical_p", "top_k", "top_p")


class SampledPlaces(NamedTuple):
    """The rows of logits that a step samples from: their seats, and the positions of the tokens to draw."""

    seats: Tensor  # i64[num_rows]
    positions: Tensor  # i64[num_rows]


class SeatParameters:
    """The sampling parameters of all seats, on the device. Those of a request are sent once.

    table: a row for each seat; see `TakeParameters`. The last row belongs to the scratch seat, whose
        parameters are greedy.
    """

    def __init__(self, take: TakeParameters, num_seats: int, device: torch.device) -> None:
        self._take = take
        self.table = torch.zeros(num_seats + 1, NUM_PARAMETER_WORDS, dtype=torch.int32, device=device)
        self._known: dict[int, Sampled] = {}  # whose parameters the device has, by seat
        self._sent: tuple[Sent, Sent] | None = None  # that are not written yet

    def put(
        self, seats: Sequence[int], requests: Sequence[Sampled], columns: NDArray[Any], upload: Upload
    ) -> None:
        """Add to an upload the parameters of requests that the device does not have yet.

        columns: the parameters of all these requests, from `columns_of`.
        """
        known = self._known
        new = dict[int, int]()  # the row of each seat
        for row, (seat, request) in enumerate(zip(seats, requests, strict=True)):
            request = request.seat if isinstance(request, DraftRow) else request
            if known.get(seat) is not request:
                new[seat] = row
                known[seat] = request
        if new:
            words = words_of(columns[[*new.values()]])
            self._sent = upload.put([*new], torch.int64), upload.put(words, torch.int32)

    def write(self) -> None:
        """Write the parameters that `put` added to an upload into the table, once it is sent."""
        if self._sent is not None:
            seats, words = self._sent
            self._sent = None
            self.table.index_copy_(0, seats.tensor, words.tensor)

    def forget(self) -> None:
        """Mark all parameters as unknown to the device, since some may not have arrived there."""
        self._known = {}
        self._sent = None

    def of_rows(self, columns: NDArray[Any], vocab_size: int) -> SeatedParameters:
        """Return the parameters of a batch's rows, which the device looks up by seat."""
        return SeatedParameters(self, columns, vocab_size)

    def take(self, seats: Tensor) -> RowParameters:
        """Return the parameters of these seats, i64[num_rows]."""
        return self._take(self.table, seats)


class SeatedParameters:
    """The parameters of a batch's rows, which the device looks up by seat.

    filters: the names of the filters that at least one row uses. The others are skipped.
    """

    def __init__(self, of_seats: SeatParameters, columns: NDArray[Any], vocab_size: int) -> None:
        self._of_seats = of_seats
        self.filters = used_filters(columns, vocab_size)

    def sample(
        self, kernels: Kernels, logits: Tensor, places: SampledPlaces, highest: Tensor | None
    ) -> Tensor:
        """Draw a token for each row; see `Kernels.sample_tokens`."""
        taken = self._of_seats.take(places.seats)
        return draw(kernels, logits, taken, self.filters, places, highest)


def draw(
    kernels: Kernels,
    logits: Tensor,
    taken: RowParameters,
    filters: Sequence[str],
    places: SampledPlaces,
    highest: Tensor | None,
) -> Tensor:
    """Draw a token for each row with these filters; see `Kernels.sample_tokens`."""
    used: dict[str, Any] = {name: getattr(taken, name) if name in filters else None for name in FILTERS}
    return kernels.sample_tokens(
        logits, taken.seeds, places.positions, temperature=taken.temperature, highest=highest, **used
    )


def words_of(columns: NDArray[Any]) -> NDArray[np.int32]:
    """Convert the parameters to 32-bit words, one row per request; see `TakeParameters`."""
    packed: NDArray[Any] = np.empty(len(columns), WORDS)
    for name in WORDS.names or ():
        packed[name] = columns[name]
    return packed.view(np.int32).reshape(len(columns), -1)
