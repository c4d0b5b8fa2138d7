"""Seats, snapshots and memory of models with states. Others do not import it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple, Self, cast

import torch
from torch import Tensor, nn

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

# By default snapshots take one part in so many of the memory for blocks, but there are some in any case.
SNAPSHOT_SHARE = 8
LEAST_SNAPSHOTS = 4


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
    """Set max_num_seqs in sizes, to a number of sequences whose states fit.

    room: the bytes for states and KV together.
    least: exchanges this number among all processes of the model and returns the smallest; None if there is
        one process.
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


def snapshots_in(sizes: Sizes, room: int | None) -> int:
    """Return the default number of snapshots: as many as fit in an eighth of the memory for blocks.

    room: the bytes for snapshots and blocks together; None if num_blocks is given, so that snapshots take
        further memory.
    """
    # By the whole model: the layers of a stage may all keep states, or none of them.
    whole = replace(sizes, part=None)
    num_blocks = sizes.config.num_blocks or whole.max_useful_blocks
    found = num_blocks * whole.block_bytes // SNAPSHOT_SHARE // whole.state_bytes
    if room is not None and sizes.state_bytes:
        found = min(found, room // SNAPSHOT_SHARE // sizes.state_bytes)
    return max(LEAST_SNAPSHOTS, found)


def with_snapshots(sizes: Sizes, room: int | None, least: Callable[[int], int] | None = None) -> Sizes:
    """Set the number of snapshots in sizes: as the option says, or else as `snapshots_in` does.

    least: see `with_seats`.
    """
    if not sizes.enable_prefix_caching or sizes.config.state_snapshots is not None:
        return sizes
    found = snapshots_in(sizes, room)
    if least is not None:
        found = least(found)
    return replace(sizes, config=replace(sizes.config, state_snapshots=found))


def read_states(states: StateCache, sizes: Sizes, slots: Sequence[int]) -> dict[str, Tensor]:
    """Copy snapshots to the host. Return tensors by their names in the cache.

    slots: the numbers of the snapshots. Number 0 is the first slot behind the seats.
    """
    own = [sizes.config.num_seats + slot for slot in slots]
    return {name: tensor[:, own].cpu() for name, tensor in states.tensors.items()}


def write_state(states: StateCache, sizes: Sizes, slot: int, contents: Mapping[str, Tensor]) -> None:
    """Overwrite the slot of a snapshot with the state of one snapshot from `read_states`."""
    for name, content in contents.items():
        states.tensors[name][:, sizes.config.num_seats + slot] = content


def new_states(sizes: Sizes, device: torch.device) -> StateCache:
    """Allocate the states of all seats, and of swapped-out sequences. Raises ResourceError."""
    part = ModelPart.whole(sizes.model.num_layers) if sizes.part is None else sizes.part
    dtype: torch.dtype = getattr(torch, sizes.dtype)
    num_slots = sizes.num_states
    try:
        return StateCache(
            sizes.model,
            part,
            num_slots,
            sizes.num_host_states,
            dtype,
            device,
            num_seats=sizes.config.num_seats,
            num_run_places=sizes.num_run_places,
        )
    except RuntimeError as error:  # torch has no narrower one for a CPU
        raise ResourceError(
            f"no memory for the states of max_num_seqs {sizes.config.num_seats} sequences and "
            f"{sizes.num_snapshots} snapshots: {sizes.all_state_bytes / 2**30:,.1f} GiB cannot be allocated "
            f"on {device}; lower max_num_seqs or state_snapshots"
        ) from error


class StateChanges(NamedTuple):
    """The changes of states before a step computes: runs of drafts are applied, then states are moved.

    settled: i32[5 n + 1] for n seats: the seats, lengths, starts and `Batch.runs`; None if there are none.
    """

    settled: Sent | None
    moves: Sent | None
    runs: list[Run]

    @classmethod
    def put(cls, plan: ComputedPart, states: StateCache, upload: Upload) -> Self:
        """Add the numbers of these changes to the upload of a step."""
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
        """Make the changes, once the upload is sent."""
        if self.settled is not None:
            numbers = self.settled.tensor
            num = (len(numbers) - 1) // 5
            seats, lengths, bounds, runs = numbers.split_with_sizes([num, num, num + 1, 2 * num])
            self._apply_runs(model, kv_cache, Sequences(seats, lengths, bounds, runs.view(-1, 2)))
        if self.moves is not None and kv_cache.states is not None:
            kv_cache.states.move(self.moves.tensor, self.runs, model.kernels)

    @staticmethod
    def _apply_runs(model: Model, kv_cache: KVCache, sequences: Sequences) -> None:
        """Apply the rest of last runs to the states of these sequences, in each layer that has some."""
        for layer in cast(nn.Module, model).modules():
            if isinstance(layer, StateLayer) and kv_cache.states is not None:
                layer.apply_runs(kv_cache.states.layer(layer.layer), sequences)


def run_numbers(plan: ComputedPart) -> list[int]:
    """Return `Batch.runs` of a step: how many tokens each row applies first, and whether it has drafts."""
    first_run = plan.num_decodes
    end = first_run + plan.num_drafting
    unapplied = plan.unapplied or [0] * len(plan.seats)
    return [*chain.from_iterable((n, first_run <= row < end) for row, n in enumerate(unapplied))]


def no_room(sizes: Sizes, free: int, least: int) -> ResourceError:
    """Return the error for an engine whose states leave no room for K and V.

    free: the bytes for states and KV together.
    least: the bytes of one block in each layer group.
    """
    of_seats = sizes.config.num_seats * sizes.seat_bytes
    of_snapshots = sizes.num_snapshots * sizes.state_bytes
    ways = "lower max_num_seqs"
    snapshots = ""
    if of_snapshots:
        snapshots = f", {sizes.num_snapshots} snapshots of them {of_snapshots / 2**20:,.0f} MiB"
        ways += " or state_snapshots"
    return ResourceError(
        f"no memory for a KV cache beside states: {free / 2**20:,.0f} MiB are left, the states of "
        f"max_num_seqs {sizes.config.num_seats} sequences take {of_seats / 2**20:,.0f} MiB "
        f"({of_seats / sizes.config.num_seats / 2**20:,.2f} each){snapshots}, and a block in each layer "
        f"group {least / 2**20:,.2f} MiB; {ways}"
    )
