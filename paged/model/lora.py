"""The slots of LoRA adapters on a device: each linear layer has room for the matrices of some adapters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..architectures.config import TensorNames
from ..base.errors import CheckpointError, ConfigError
from ..checkpoints.lora_adapter import LoraAdapter, LoraPart
from ..checkpoints.stored import StoredRows
from ..kernels.operations import Kernels
from .decoder import Decoder
from .layers.attention import Attention
from .layers.linear import Linear
from .layers.mlp import MLP, PlainMLP


class _Place(NamedTuple):
    """Where a stored matrix is in a layer.

    part: its number among the matrices that make up the layer.
    rows: i64[n], the row of the matrix that each of `columns` of the output is.
    """

    part: int
    columns: slice
    rows: Tensor


class LoraLayer:
    """The adapter slots of one linear layer: the matrices A and B of each slot.

    The memory never moves, because recorded steps hold its address.
    """

    def __init__(
        self,
        linear: Linear,
        places: Mapping[str, list[_Place]],
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
    ) -> None:
        num_parts = len(linear.stored.parts)
        self.places = places
        self.a = torch.zeros(num_slots, num_parts, max_rank, linear.in_features, dtype=dtype, device=device)
        self.b = torch.zeros(num_slots, max_rank, linear.stored.num_rows, dtype=dtype, device=device)
        self.ranks = torch.zeros(num_slots, num_parts, dtype=torch.int32, device=device)
        ranges = sorted(
            (place.columns.start, place.columns.stop, place.part)
            for each in places.values()
            for place in each
        )
        self.columns = torch.tensor(ranges, dtype=torch.int32, device=device).view(-1, 3)
        self._kernels = kernels

    def add(self, x: Tensor, out: Tensor, slots: Tensor) -> None:
        """Add the product of x and the adapters in these slots, i32[num_tokens], to the output."""
        self._kernels.add_lora(x, out, self.a, self.b, self.ranks, self.columns, slots)

    def set(self, slot: int, adapter: Mapping[str, LoraPart]) -> None:
        """Write an adapter into a slot. It replaces the adapter that was there."""
        for name, places in self.places.items():
            part = adapter.get(name)
            self.ranks[slot, places[0].part] = 0 if part is None else len(part.a)
            if part is None:
                continue
            rank = len(part.a)
            self.a[slot, places[0].part, :rank] = part.a.to(self.a.dtype)
            for place in places:
                self.b[slot, :rank, place.columns] = part.b[place.rows].T.to(self.b.dtype)


class LoraSlots:
    """The adapter slots of a model.

    targets: suffixes of the names of the matrices to adapt, such as "q_proj"; None adapts all.
    whole: the model that `model` is a part of, which may be on the meta device; None if `model` is whole.
    shapes: the shape [rows, columns] of each matrix of the whole model that can be adapted, by its name in
        the decoder.

    Raises ConfigError for a target that names no matrix.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        num_slots: int,
        max_rank: int,
        targets: Collection[str] | None,
        device: torch.device,
        whole: Decoder | None = None,
    ) -> None:
        self.shapes = shapes_of(model if whole is None else whole, targets)
        names = model.config.tensor_names
        if wrong := {*(targets or ())} - {end for name in self.shapes for end in _ends(name, names)}:
            there = {_ends(name, names)[1] for name in shapes_of(whole or model, None)}
            raise ConfigError(
                f"lora_target_modules {', '.join(map(repr, sorted(wrong)))} names no matrix of the model, "
                f"which has {', '.join(sorted(there))}"
            )
        self.max_rank = max_rank
        self._names = names
        self._largest = torch.finfo(model.dtype).max
        self._layers: list[LoraLayer] = []
        for linear, places in targets_of(model, targets):
            layer = LoraLayer(linear, places, num_slots, max_rank, model.dtype, device, model.kernels)
            linear.lora = layer
            self._layers.append(layer)

    def check(self, adapter: LoraAdapter) -> None:
        """Raise CheckpointError if an adapter does not fit the model or its slots."""
        check_adapter(adapter, self.shapes, self.max_rank, self._names)
        for name, part in adapter.parts.items():
            largest = max(float(each.abs().max()) for each in part)
            if largest > self._largest:
                stored = self._names.in_checkpoint(f"{name}.weight").removesuffix(".weight")
                raise CheckpointError(
                    f"{adapter.directory}: {stored} is adapted by matrices of shapes "
                    f"{list(part.a.shape)} and {list(part.b.shape)}, which with their scale reach "
                    f"{largest:g}; the largest number of the engine's dtype is {self._largest:g}"
                )

    def set(self, slot: int, adapter: Mapping[str, LoraPart]) -> None:
        """Write an adapter into a slot. It replaces the adapter that was there. Parts of other layers are
        left out.
        """
        for layer in self._layers:
            layer.set(slot, adapter)


def check_adapter(
    adapter: LoraAdapter, shapes: Mapping[str, tuple[int, int]], max_rank: int, names: TensorNames
) -> None:
    """Raise CheckpointError if an adapter has other matrices, shapes or ranks.

    shapes: the shapes of the matrices that can be adapted, by their names in the decoder.
    """
    for name, part in adapter.parts.items():
        shape = shapes.get(name)
        stored = names.in_checkpoint(f"{name}.weight").removesuffix(".weight")
        if shape is None:
            raise CheckpointError(
                f"{adapter.directory}: {stored} is adapted, but the engine has no slots for it: the model "
                "has no such linear layer, it belongs to experts, embedding or head, or lora_target_modules "
                "leaves it out"
            )
        rank = len(part.a)
        if rank > max_rank:
            raise CheckpointError(
                f"{adapter.directory}: {stored} has rank {rank}, and max_lora_rank is {max_rank}"
            )
        if (len(part.b), part.a.shape[1]) != shape:
            raise CheckpointError(
                f"{adapter.directory}: {stored} is {list(shape)}, but its lora_A of shape "
                f"{list(part.a.shape)} and lora_B of shape {list(part.b.shape)} make "
                f"{[len(part.b), part.a.shape[1]]}"
            )


def targets_of(
    model: Decoder, targets: Collection[str] | None
) -> Iterator[tuple[Linear, dict[str, list[_Place]]]]:
    """Yield each linear layer that has slots, and the rows of its output that each adapted matrix computes.

    targets: suffixes of the names of these matrices; None takes all.
    """
    names = model.config.tensor_names

    def is_target(name: str) -> bool:
        return targets is None or not {*targets}.isdisjoint(_ends(name, names))

    for linear in adaptable(model):
        places = {name: own for name, own in _places(linear.stored).items() if is_target(name)}
        if places:
            yield linear, places


def _ends(name: str, names: TensorNames) -> tuple[str, str]:
    """Return how the name of a matrix ends in the decoder, and in the checkpoint."""
    return name.rpartition(".")[2], names.in_checkpoint(f"{name}.weight").split(".")[-2]


def shapes_of(model: Decoder, targets: Collection[str] | None) -> dict[str, tuple[int, int]]:
    """Return the rows and columns of each matrix that may be adapted, by its name in the decoder."""
    return {
        name: (linear.stored.parts[name], linear.in_features)
        for linear, places in targets_of(model, targets)
        for name in places
    }


def slot_bytes(model: Decoder, max_rank: int, targets: Collection[str] | None) -> int:
    """Return the size of one slot in all layers of a model, in bytes. The model may be on the meta device."""
    numbers = 0
    for linear, _ in targets_of(model, targets):
        numbers += len(linear.stored.parts) * linear.in_features + linear.stored.num_rows
    return numbers * max_rank * model.dtype.itemsize


def adaptable(model: Decoder) -> Iterator[Linear]:
    """Yield the linear layers that adapters can change.

    These belong to attention, layers with states, MLPs and per-layer embeddings.
    """
    if model.inputs is not None:
        yield model.inputs.per_layer_model_projection
    for layer in model.layers:
        if layer.input is not None:
            yield from (layer.input.per_layer_input_gate, layer.input.per_layer_projection)
        for mixer in (layer.mixer, layer.state_heads):
            if mixer is not None:
                yield from (mixer.qkv if isinstance(mixer, Attention) else mixer.inputs, mixer.output)
        if isinstance(layer.mlp, MLP):
            yield from (layer.mlp.gate_up, layer.mlp.down)
        elif isinstance(layer.mlp, PlainMLP):
            yield from (layer.mlp.up, layer.mlp.down)


def leave_gates_apart(model: Decoder) -> None:
    """Make gated layers return gates and ups separately, because adapters change both."""
    for linear in adaptable(model):
        if linear.role == "gated":
            linear.role = "layer"


def _places(stored: StoredRows) -> dict[str, list[_Place]]:
    """Return where the matrices that make up a layer are in its output, by name."""
    index = torch.arange(stored.num_rows) if stored.index is None else stored.index.cpu()
    starts = torch.tensor([0, *accumulate(stored.parts.values())])
    parts = torch.searchsorted(starts, index, right=True) - 1
    changes = (parts.diff().nonzero().flatten() + 1).tolist()
    names = [*stored.parts]
    places: dict[str, list[_Place]] = {}
    for first, end in pairwise([0, *changes, len(index)]):
        part = int(parts[first])
        place = _Place(part, slice(first, end), index[first:end] - starts[part])
        places.setdefault(names[part], []).append(place)
    return places
