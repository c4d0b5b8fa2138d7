"""Seats and memory of models with states. Others do not import it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from ..base.errors import ResourceError
from ..model.cache.states import StateCache
from ..model.part import ModelPart
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
    num_seqs = max(1, min(sizes.config.num_seats, room // 4 // sizes.state_bytes))
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
            f"{sizes.state_bytes / 2**20:,.1f}",
            f"{room / 2**20:,.0f}",
        )
    return found


def new_states(sizes: Sizes, device: torch.device) -> StateCache:
    """Allocate the states of all seats, and of swapped-out sequences. Raises ResourceError."""
    part = ModelPart.whole(sizes.model.num_layers) if sizes.part is None else sizes.part
    dtype: torch.dtype = getattr(torch, sizes.dtype)
    num_slots = sizes.config.num_seats
    try:
        return StateCache(sizes.model, part, num_slots, sizes.num_host_states, dtype, device)
    except RuntimeError as error:  # torch has no narrower one for a CPU
        raise ResourceError(
            f"no memory for the states of max_num_seqs {num_slots} sequences: "
            f"{sizes.all_state_bytes / 2**30:,.1f} GiB cannot be allocated on {device}; lower it"
        ) from error


def no_room(sizes: Sizes, free: int, least: int) -> ResourceError:
    """Return the error of an engine whose states leave no room for K and V.

    free: the bytes for states and KV together. least: the bytes of one block in each layer group.
    """
    return ResourceError(
        f"no memory for a KV cache beside states: {free / 2**20:,.0f} MiB are left, the states of "
        f"max_num_seqs {sizes.config.num_seats} sequences take {sizes.all_state_bytes / 2**20:,.0f} MiB "
        f"({sizes.state_bytes / 2**20:,.2f} each), and a block in each layer group {least / 2**20:,.2f} MiB; "
        "lower max_num_seqs"
    )
