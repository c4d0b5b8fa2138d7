"""Seats and memory of models with states. Others do not import it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import NamedTuple, Self, cast

import torch
from torch import nn

from ..base.errors import ResourceError
from ..device.transfers import Sent, Upload
from ..model.cache.kv_cache import KVCache
from ..model.cache.states import Run, StateCache
from ..model.layers.states import Sequences, StateLayer
from ..model.model import Model
from ..model.part import ModelPart
from .plan import ComputedPart
from .sizes import Sizes

logger = logging.getLogger(__name__)


def seats_in(sizes: Sizes, room: int) -> Sizes:
    """Return sizes with max_num_seqs set: as given, or by default for as many sequences as have room for
    their states.

    room: the bytes for states and KV together. By default states take at most a quarter, but there is always
        room for one sequence.
    """
    if sizes.config.max_num_seqs is not None or not sizes.state_bytes:
        return sizes
    num_seqs = max(1, min(sizes.config.num_seats, room // 4 // sizes.seat_bytes))
    return replace(sizes, config=replace(sizes.config, max_num_seqs=num_seqs))


def with_seats(sizes: Sizes, room: int, least: Callable[[int], int] | None) -> Sizes:
    """Return sizes with as many seats as there is room for their states.

    room: the bytes for states and KV together.
    least: returns the smallest such number among all processes of the model; None if there is one process.
    """
    found = seats_in(sizes, room)
    if least is not None and sizes.config.max_num_seqs is None:
        config = replace(found.config, max_num_seqs=least(found.config.num_seats))
        found = replace(found, config=config)
    if found.config.num_seats != sizes.config.num_seats:
        logger.warning(
            "max_num_seqs is %d: the states of %d sequences, of %s MiB each, would take more than a quarter "
            "of %s MiB",
            found.config.num_seats,
            sizes.config.num_seats,
            f"{sizes.seat_bytes / 2**20:,.1f}",
            f"{room / 2**20:,.0f}",
        )
    return found


def new_states(sizes: Sizes, device: torch.device) -> StateCache:
    """Allocate the states of all seats, and of swapped-out sequences. Raises ResourceError."""
    part = ModelPart.whole(sizes.model.num_layers) if sizes.part is None else sizes.part
    dtype: torch.dtype = getattr(torch, sizes.dtype)
    num_slots = sizes.config.num_seats
    try:
        own = sizes.num_host_states, dtype, device
        return StateCache(sizes.model, part, num_slots, *own, num_run_places=sizes.num_run_places)
    except RuntimeError as error:  # torch has no narrower one for a CPU
        raise ResourceError(
            f"no memory for the states of max_num_seqs {num_slots} sequences: "
            f"{sizes.all_state_bytes / 2**30:,.1f} GiB cannot be allocated on {device}; lower it"
        ) from error


class StateChanges(NamedTuple):
    """What a step does with states before it computes: it ends runs of drafts, then it moves states.

    settled: i32[5 n + 1]: of n seats the seats, lengths, starts and `Batch.runs`; None: there are none.
    """

    settled: Sent | None
    moves: Sent | None
    runs: list[Run]

    @classmethod
    def put(cls, plan: ComputedPart, states: StateCache, upload: Upload) -> Self:
        """Add the numbers of a step to its upload."""
        settled = moves = None
        runs = list[Run]()
        if plan.settled:
            # Each has a run of one token besides, see `StateLayer.apply_runs`.
            seats, unapplied, lengths = zip(*plan.settled, strict=True)
            after = [length + 1 for length in lengths]
            pairs = chain.from_iterable((num, 1) for num in unapplied)
            settled = upload.put([*seats, *after, *range(len(seats) + 1), *pairs], torch.int32)
        if plan.state_moves:
            pairs_of_slots, runs = states.divide(plan.state_moves)
            moves = upload.put(pairs_of_slots, torch.int64)
        return cls(settled, moves, runs)

    def make(self, model: Model, kv_cache: KVCache) -> None:
        """Change the states, when the upload is sent."""
        if self.settled is not None:
            numbers = self.settled.tensor
            num = (len(numbers) - 1) // 5
            *sequences, runs = numbers.split([num, num, num + 1, 2 * num])
            self._apply_runs(model, kv_cache, Sequences(*sequences, runs.view(-1, 2)))
        if self.moves is not None and kv_cache.states is not None:
            kv_cache.states.move(self.moves.tensor, self.runs, model.kernels)

    @staticmethod
    def _apply_runs(model: Model, kv_cache: KVCache, sequences: Sequences) -> None:
        """Apply the rest of last runs to the states of these sequences, in each layer that has some."""
        for layer in cast(nn.Module, model).modules():
            if isinstance(layer, StateLayer) and kv_cache.states is not None:
                layer.apply_runs(kv_cache.states.layer(layer.layer), sequences)


def run_numbers(plan: ComputedPart) -> list[int]:
    """Return `Batch.runs` of a step: for each row the tokens to apply first, and whether it has drafts."""
    first_run = plan.num_decodes
    end = first_run + plan.num_drafting
    unapplied = plan.unapplied or [0] * len(plan.seats)
    return [*chain.from_iterable((n, first_run <= row < end) for row, n in enumerate(unapplied))]


def no_room(sizes: Sizes, free: int, least: int) -> ResourceError:
    """Return the error of an engine whose states leave no room for K and V.

    free: the bytes for states and KV together. least: the bytes of one block in each layer group.
    """
    return ResourceError(
        f"no memory for a KV cache beside states: {free / 2**20:,.0f} MiB are left, the states of "
        f"max_num_seqs {sizes.config.num_seats} sequences take {sizes.all_state_bytes / 2**20:,.0f} MiB "
        f"({sizes.seat_bytes / 2**20:,.2f} each), and a block in each layer group {least / 2**20:,.2f} MiB; "
        "lower max_num_seqs"
    )
