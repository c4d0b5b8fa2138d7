"""StateCache: the states of layers that keep one of fixed size for each sequence, by slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...architectures.config import ModelConfig
from ...architectures.states import StateSpec
from ..part import ModelPart

if TYPE_CHECKING:
    from ...kernels.operations import Kernels

Move = tuple[int, int]  # from, to: slots


class LayerStates(NamedTuple):
    """The recurrent states of one layer."""

    last_inputs: Tensor  # [num_slots, width - 1, columns], of the convolution, in the dtype of activations
    matrices: Tensor | None  # f32[num_slots, num_heads, key_dim, value_dim]; None: the layer has none
    # [num_seats, num_run_places, numbers] of tokens of runs; None: there are no drafts, or no matrices
    run_columns: Tensor | None = None  # what the convolution reads
    run_rows: Tensor | None = None  # what the kernel of the matrices reads


class Run(NamedTuple):
    """Consecutive moves that can be made at once: no slot is both read and written, or written twice.

    first, end: the range of the moves.
    """

    first: int
    end: int
    from_host: bool
    to_host: bool


class StateCache:
    """The recurrent states of sequences, by layer and slot. Memory is not initialised: kernels start a new
    sequence from zeros.

    The first num_slots slots are the seats of running requests, on the device. Further slots are in host
    memory.

    A run of drafts leaves the state of its seat as it was. The inputs of its tokens are stored; the tokens
    that turn out right are applied by the next step of the seat, or before its state is moved.

    tensors: "last_inputs" and, if the layers have them, "matrices": [num_layers, num_slots, numbers].
    host: the same tensors for the slots in host memory.
    run_inputs: "columns" and, if the layers have matrices, "rows": [num_layers, num_seats, places * numbers].
    """

    def __init__(
        self,
        config: ModelConfig,
        part: ModelPart,
        num_slots: int,
        num_host_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_seats: int = 0,
        num_run_places: int = 0,
    ) -> None:
        self.num_slots = num_slots
        specs = states_of(config, part)
        assert len(set(specs.values())) == 1, "all layers of a model keep states of one shape"
        spec = next(iter(specs.values()))
        shapes = {"last_inputs": (spec.last_inputs, dtype), "matrices": (spec.matrices, torch.float32)}
        pinned = device.type == "cuda" and num_host_slots > 0
        self.tensors = dict[str, Tensor]()
        self.host = dict[str, Tensor]()
        for name, (shape, kind) in shapes.items():
            if size := torch.Size(shape).numel():
                own = len(specs), num_slots, size
                self.tensors[name] = torch.empty(own, dtype=kind, device=device)
                held = len(specs), num_host_slots, size
                self.host[name] = torch.empty(held, dtype=kind, pin_memory=pinned)
        self.run_inputs = {
            name: torch.empty(len(specs), num_seats, num_run_places * size, dtype=dtype, device=device)
            for name, size in zip(("columns", "rows"), spec.run_inputs, strict=True)
            if size and num_run_places
        }
        self._layers = {}
        for number, layer in enumerate(specs):
            views = {
                name: self.tensors[name][number].view(num_slots, *shape)
                for name, (shape, _) in shapes.items()
                if name in self.tensors
            }
            runs = {
                name: tensor[number].view(num_seats, num_run_places, -1)
                for name, tensor in self.run_inputs.items()
            }
            self._layers[layer] = LayerStates(
                views["last_inputs"], views.get("matrices"), runs.get("columns"), runs.get("rows")
            )

    def layer(self, index: int) -> LayerStates:
        """Return the states of one layer."""
        return self._layers[index]

    @property
    def num_bytes(self) -> int:
        """The size of all slots on the device, and of the inputs of runs, in bytes."""
        return sum(tensor.nbytes for tensor in (*self.tensors.values(), *self.run_inputs.values()))

    def divide(self, moves: Sequence[Move]) -> tuple[list[Move], list[Run]]:
        """Divide moves into runs that can be made at once.

        Returns the moves, with the slots of host memory counted from 0, and the runs.
        """
        most = self.num_slots
        counted = [(source % most, target % most) for source, target in moves]
        return counted, runs_of(moves, most)

    def move(
        self,
        pairs: Tensor,  # i64[num_moves, 2], (from, to) as `divide` returns them, on the device
        runs: Sequence[Run],
        kernels: Kernels,
    ) -> None:
        """Make the moves in order, one run of moves after the other."""
        for first, end, from_host, to_host in runs:
            for name, tensor in self.tensors.items():
                source = self.host[name] if from_host else tensor
                target = None
                if from_host != to_host:
                    target = _planes(self.host[name] if to_host else tensor)
                kernels.copy_blocks(_planes(source), pairs[first:end], target)


def states_of(config: ModelConfig, part: ModelPart | None) -> dict[int, StateSpec]:
    """Return the states that a part of a model stores, by layer. None is the whole model."""
    if part is None:
        return config.states
    return {layer: part.shard.state(spec) for layer, spec in config.states.items() if layer in part.layers}


def runs_of(moves: Sequence[Move], num_slots: int) -> list[Run]:
    """Divide consecutive moves into runs that can each be made at once.

    num_slots: the number of slots on the device.
    """
    runs: list[Run] = []
    read: set[int] = set()
    written: set[int] = set()
    for number, (source, target) in enumerate(moves):
        sides = source >= num_slots, target >= num_slots
        fits = target not in read | written and source not in written
        if not (runs and fits and runs[-1][2:] == sides):
            runs.append(Run(number, number, *sides))
            read, written = set(), set()
        runs[-1] = runs[-1]._replace(end=number + 1)
        read.add(source)
        written.add(target)
    return runs


def _planes(tensor: Tensor) -> Tensor:
    """View [num_layers, num_slots, size] as `copy_blocks` takes it, with five dimensions."""
    return tensor[..., None, None]
