"""The slots of LoRA adapters on a device: each linear layer has room for the matrices of some adapters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..architectures.config import TensorNames
from ..base.errors import CheckpointError, ConfigError
from ..checkpoints.lora_adapter import LoraAdapter, LoraPart
from ..checkpoints.stored import StoredRows
from ..kernels.operations import Kernels
from .decoder import Decoder, DecoderLayer
from .layers.attention import Attention
from .layers.linear import Linear
from .layers.mlp import MLP, ManyExperts, PlainMLP

if TYPE_CHECKING:
    from .layers.experts import Experts

EXPERTS = "experts"  # what lora_target_modules calls the layers of experts


class _Place(NamedTuple):
    """Where a stored matrix is in a layer.

    part: its number among the matrices that make up the layer.
    rows: i64[n], the row of the matrix that each of `columns` of the output is.
    """

    part: int
    columns: slice
    rows: Tensor


class _Target(NamedTuple):
    """A linear layer that has slots, or the same layer of all experts, which are alike.

    places: where the adapted matrices are in the output, by their number among the parts of the layer.
    """

    linears: Sequence[Linear]
    places: Mapping[int, list[_Place]]

    def names(self, part: int) -> list[str]:
        """Return the name of a part, that of each expert."""
        return [[*linear.stored.parts][part] for linear in self.linears]


class LoraLayer:
    """The adapter slots of one linear layer: the matrices A and B of each slot; of experts, of each expert.

    The memory never moves, because recorded steps hold its address.
    """

    def __init__(
        self,
        target: _Target,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
    ) -> None:
        linear = target.linears[0]
        num_parts = len(linear.stored.parts)
        self.places = target.places
        self._names = {part: target.names(part) for part in target.places}
        self._num_experts = len(target.linears)  # 1 if it is no layer of experts
        num_slots *= self._num_experts
        self.a = torch.zeros(num_slots, num_parts, max_rank, linear.in_features, dtype=dtype, device=device)
        self.b = torch.zeros(num_slots, max_rank, linear.stored.num_rows, dtype=dtype, device=device)
        self.ranks = torch.zeros(num_slots, num_parts, dtype=torch.int32, device=device)
        ranges = sorted(
            (place.columns.start, place.columns.stop, place.part)
            for each in target.places.values()
            for place in each
        )
        self.columns = torch.tensor(ranges, dtype=torch.int32, device=device).view(-1, 3)
        self._kernels = kernels

    def add(self, x: Tensor, out: Tensor, slots: Tensor) -> None:
        """Add the product of x and the adapters in these slots, i32[num_tokens], to the output.

        Of experts, slots are those of `sort_by_expert`.
        """
        self._kernels.add_lora(x, out, self.a, self.b, self.ranks, self.columns, slots)

    def set(self, slot: int, adapter: Mapping[str, LoraPart]) -> None:
        """Write an adapter into a slot. It replaces the adapter that was there."""
        own = slice(slot * self._num_experts, (slot + 1) * self._num_experts)
        ranks = torch.zeros(self._num_experts, self.ranks.shape[1], dtype=torch.int32)
        a, b = self.a[own], self.b[own]
        if not a.is_cpu:  # one copy of all experts
            a, b = (torch.zeros_like(each, device="cpu") for each in (a, b))
        for number, names in self._names.items():
            for expert, name in enumerate(names):
                part = adapter.get(name)
                ranks[expert, number] = 0 if part is None else len(part.a)
                if part is None:
                    continue
                rank = len(part.a)
                a[expert, number, :rank] = part.a.to(a.dtype)
                for place in self.places[number]:
                    b[expert, :rank, place.columns] = part.b[place.rows].T.to(b.dtype)
        most = int(ranks.max())
        if not self.a.is_cpu and most:
            self.a[own, :, :most] = a[:, :, :most].to(self.a.device)
            self.b[own, :most] = b[:, :most].to(self.b.device)
        self.ranks[own] = ranks.to(self.ranks.device)


class LoraSlots:
    """The adapter slots of a model.

    targets: suffixes of the names of the matrices to adapt, such as "q_proj", and "experts" for those of
        experts; None adapts all but those of experts.
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
        _check_targets(model if whole is None else whole, targets, self.shapes)
        self.max_rank = max_rank
        self._largest = torch.finfo(model.dtype).max
        self._layers: list[LoraLayer] = []
        for target in _targets_of(model, targets):
            layer = LoraLayer(target, num_slots, max_rank, model.dtype, device, model.kernels)
            target.linears[0].lora = layer
            self._layers.append(layer)

    def check(self, adapter: LoraAdapter) -> None:
        """Raise CheckpointError if an adapter does not fit the model or its slots."""
        check_adapter(adapter, self.shapes, self.max_rank)
        for name, part in adapter.parts.items():
            largest = max(float(each.abs().max()) for each in part)
            if largest > self._largest:
                raise CheckpointError(
                    f"{adapter.directory}: {adapter.modules[name]} is adapted by matrices of shapes "
                    f"{list(part.a.shape)} and {list(part.b.shape)}, which with their scale reach "
                    f"{largest:g}; the largest number of the engine's dtype is {self._largest:g}"
                )

    def set(self, slot: int, adapter: Mapping[str, LoraPart]) -> None:
        """Write an adapter into a slot. It replaces the adapter that was there. Parts of other layers are
        left out.
        """
        for layer in self._layers:
            layer.set(slot, adapter)


def check_adapter(adapter: LoraAdapter, shapes: Mapping[str, tuple[int, int]], max_rank: int) -> None:
    """Raise CheckpointError if an adapter has other matrices, shapes or ranks.

    shapes: the shapes of the matrices that can be adapted, by their names in the decoder.
    """
    for name, part in adapter.parts.items():
        shape = shapes.get(name)
        stored = adapter.modules[name]
        if shape is None:
            raise CheckpointError(
                f"{adapter.directory}: {stored} is adapted, but the engine has no slots for it: "
                f"{_why_no_slots(name, shapes)}"
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


def _check_targets(model: Decoder, targets: Collection[str] | None, shapes: Collection[str]) -> None:
    """Raise ConfigError for a target that names none of the matrices that have slots.

    shapes: the names of these matrices.
    """
    names = model.config.tensor_names
    known = {end for name in shapes for end in _ends(name, names)}
    has_experts = any(True for _ in _of_experts(model))
    if has_experts:
        known.add(EXPERTS)
    if wrong := {*(targets or ())} - known:
        there = {_ends(name, names)[1] for name in shapes_of(model, None)}
        if has_experts:
            there.add(EXPERTS)
        raise ConfigError(
            f"lora_target_modules {', '.join(map(repr, sorted(wrong)))} names no matrix of the model, which "
            f"has {', '.join(sorted(there))}"
        )


def _why_no_slots(name: str, shapes: Collection[str]) -> str:
    """Say why a matrix has no slots, and which option gives it some."""
    if f".{EXPERTS}." not in name:
        return (
            "the model has no such linear layer, it is the embedding or the head, or "
            "lora_target_modules leaves it out"
        )
    if any(f".{EXPERTS}." in each for each in shapes):
        return "the model has no such expert, or no such layer of experts"
    others = dict.fromkeys(each.rpartition(".")[2] for each in shapes)
    return (
        f"experts have slots only where lora_target_modules names {EXPERTS!r}, as in {[*others, EXPERTS]}, "
        "since these take memory for every expert"
    )


def _targets_of(model: Decoder, targets: Collection[str] | None) -> Iterator[_Target]:
    """Yield the layers that have slots.

    targets: suffixes of the names of the matrices to adapt, "experts" for all of experts; None takes all but
        those of experts.
    """
    names = model.config.tensor_names

    def is_target(name: str) -> bool:
        return targets is None or not {*targets}.isdisjoint(_ends(name, names))

    for linear in adaptable(model):
        places = _places(linear.stored)
        own = {part: places[part] for part, name in enumerate(linear.stored.parts) if is_target(name)}
        if own:
            yield _Target([linear], own)
    if EXPERTS in (targets or ()):
        for linears in _of_experts(model):
            yield _Target(linears, _places(linears[0].stored))


def _ends(name: str, names: TensorNames) -> tuple[str, str]:
    """Return how the name of a matrix ends in the decoder, and in the checkpoint."""
    return name.rpartition(".")[2], names.in_checkpoint(f"{name}.weight").split(".")[-2]


def shapes_of(model: Decoder, targets: Collection[str] | None) -> dict[str, tuple[int, int]]:
    """Return the rows and columns of each matrix that may be adapted, by its name in the decoder."""
    return {
        name: (linear.stored.parts[name], linear.in_features)
        for target in _targets_of(model, targets)
        for part in target.places
        for linear, name in zip(target.linears, target.names(part), strict=True)
    }


def slot_bytes(model: Decoder, max_rank: int, targets: Collection[str] | None) -> int:
    """Return the size of one slot in all layers of a model, in bytes. The model may be on the meta device."""
    numbers = 0
    for linears, _ in _targets_of(model, targets):
        stored = linears[0].stored
        numbers += len(linears) * (len(stored.parts) * linears[0].in_features + stored.num_rows)
    return numbers * max_rank * model.dtype.itemsize


def adaptable(model: Decoder) -> Iterator[Linear]:
    """Yield the linear layers that adapters can change.

    These belong to attention, layers with states, MLPs (shared ones, too), per-layer embeddings and routers.
    `_of_experts` yields the layers of experts.
    """
    if model.inputs is not None:
        yield model.inputs.per_layer_model_projection
    for layer in model.layers:
        if layer.input is not None:
            yield from (layer.input.per_layer_input_gate, layer.input.per_layer_projection)
        for mixer in (layer.mixer, layer.state_heads):
            if mixer is not None:
                yield from (mixer.qkv if isinstance(mixer, Attention) else mixer.inputs, mixer.output)
        mlps: list[object] = [layer.mlp]
        for experts in _experts_in(layer):
            mlps.append(experts.shared)
            yield experts.router
            others = experts.shared_gate, experts.into_latent, experts.out_of_latent
            yield from (each for each in others if each is not None)
        for mlp in mlps:
            if isinstance(mlp, MLP):
                yield from (mlp.gate_up, mlp.down)
            elif isinstance(mlp, PlainMLP):
                yield from (mlp.up, mlp.down)


def _experts_in(layer: DecoderLayer) -> list[Experts]:
    """Return the mixtures of experts of a layer."""
    found = [layer.mlp, None if layer.beside is None else layer.beside.experts]
    return [each for each in found if isinstance(each, ManyExperts)]


def _of_experts(model: Decoder) -> Iterator[Sequence[Linear]]:
    """Yield each linear layer of experts: those of all experts of a mixture."""
    for layer in model.layers:
        for experts in _experts_in(layer):
            yield from (experts.gate_up, experts.down)


def leave_gates_apart(model: Decoder, targets: Collection[str] | None) -> None:
    """Make gated layers return gates and ups separately, because adapters change both.

    targets: see `LoraSlots`. Experts without slots stay as they are.
    """
    of_experts = [*chain.from_iterable(_of_experts(model))] if EXPERTS in (targets or ()) else []
    for linear in (*adaptable(model), *of_experts):
        if linear.role == "gated":
            linear.role = "layer"


def _places(stored: StoredRows) -> dict[int, list[_Place]]:
    """Return where the matrices that make up a layer are in its output, by their number."""
    index = torch.arange(stored.num_rows) if stored.index is None else stored.index.cpu()
    starts = torch.tensor([0, *accumulate(stored.parts.values())])
    parts = torch.searchsorted(starts, index, right=True) - 1
    changes = (parts.diff().nonzero().flatten() + 1).tolist()
    places: dict[int, list[_Place]] = {}
    for first, end in pairwise([0, *changes, len(index)]):
        part = int(parts[first])
        place = _Place(part, slice(first, end), index[first:end] - starts[part])
        places.setdefault(part, []).append(place)
    return places
