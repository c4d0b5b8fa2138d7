"""Weights between starts: what a loader has made is written as plain values and tensors, and read back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...checkpoints.stored import StoredRows, ValueCheck
from ...kernels.panels import Panels
from . import panels
from .forms import Role, WeightForm
from .joined_form import JoinedForm
from .loading import Loader

# What else a loader would be needed for, or is made again.
_NOT_KEPT = {"_whole", "padded_bias", "stays"}
_ROOMS = ("architectures", "checkpoints", "kernels", "model")  # whose code decides how weights are packed


class KeptError(Exception):
    """The stored packed weights do not match the model that is loaded."""


class Tensors(Protocol):
    """The stored tensors of packed weights, by number."""

    def __getitem__(self, index: int) -> Tensor: ...


class KeepsWeights(Protocol):
    """The interface of a store for packed weights: it loads them, or stores them for the next start."""

    def load(self, model: LoadsWeights, loader: Loader) -> bool:
        """Load the stored weights, or else the checkpoint. Return False if neither is possible."""

    def start_keeping(self) -> None:
        """Begin to store the packed weights, in the background. Call this once the model is ready."""

    def wait(self) -> Path | None:
        """Wait until the weights are stored. Return their file; None if they cannot be stored."""


class LoadsWeights(Protocol):
    """A model that loads its weights, as `Model` does."""

    def load(self, loader: Loader) -> None:
        """Load the weights."""


@dataclass(frozen=True, slots=True)
class RecordingLoader(Loader):
    """A loader that records the parameters and forms that it makes, in order."""

    made: list[tuple[str, Tensor | WeightForm]] = field(default_factory=list)

    def parameter(
        self, rows: StoredRows, name: str, like: Tensor, check: ValueCheck | None = None
    ) -> nn.Parameter:
        found = Loader.parameter(self, rows, name, like, check)
        self.made.append((_name_of(rows, name), found))
        return found

    def form(self, rows: StoredRows, like: Tensor, role: Role, num_precise: int = 0) -> WeightForm:
        found = Loader.form(self, rows, like, role, num_precise)
        self.made.append((_name_of(rows, "form"), found))
        return found


@dataclass(frozen=True, slots=True)
class KeptLoader(Loader):
    """A loader that returns stored weights, which another loader made.

    Raises KeptError if a module asks for another weight than the next in order.

    described: the names and descriptions of the weights, in order; see `describe`.
    """

    described: Iterator[list[Any]] = field(default_factory=lambda: iter(()))
    tensors: Tensors = ()

    def parameter(
        self,
        rows: StoredRows,
        name: str,
        like: Tensor,
        check: ValueCheck | None = None,  # noqa: ARG002
    ) -> nn.Parameter:
        value = self.tensors[self._next(_name_of(rows, name))]
        if value.shape != like.shape or value.dtype != like.dtype:
            raise KeptError(f"{name} of {list(like.shape)} was kept as {list(value.shape)}")
        return nn.Parameter(value.clone(), requires_grad=False)

    def form(self, rows: StoredRows, like: Tensor, role: Role, num_precise: int = 0) -> WeightForm:  # noqa: ARG002
        return _restored(self._next(_name_of(rows, "form")), self.tensors)

    def _next(self, name: str) -> Any:
        found, described = next(self.described, ("nothing", None))
        if found != name:
            raise KeptError(f"{found} was kept where {name} is needed")
        return described


def _name_of(rows: StoredRows, name: str) -> str:
    return f"{next(iter(rows.parts), '')}.{name}"


def describe(loader: RecordingLoader) -> tuple[dict[str, Any], list[Tensor]] | None:
    """Describe the weights that a loader has made by plain values and tensors, to be stored in a file.

    Return None if a weight's form cannot be stored. Call this only once the whole model is loaded, because
    the weights of experts are moved to one piece of memory at the end.
    """
    tensors: list[Tensor] = []

    def put(tensor: Tensor) -> int:
        tensors.append(tensor)
        return len(tensors) - 1

    made: list[tuple[str, Any]] = []
    for name, found in loader.made:
        described = put(found.contiguous()) if isinstance(found, Tensor) else _described(found, put)
        if described is None:
            return None
        made.append((name, described))
    return {"made": made, "file_bytes": dict(loader.num_bytes)}, tensors


def kept_loader(loader: Loader, described: Mapping[str, Any], tensors: Tensors) -> KeptLoader:
    """Return a loader that returns the weights that `describe` described."""
    loader.num_bytes.update(described["file_bytes"])
    return KeptLoader(**_fields_of(loader), described=iter(described["made"]), tensors=tensors)


def recording_loader(loader: Loader) -> RecordingLoader:
    """Return a loader that records what it makes."""
    return RecordingLoader(**_fields_of(loader))


def _fields_of(loader: Loader) -> dict[str, Any]:
    return {each.name: getattr(loader, each.name) for each in fields(Loader)}


def _described(form: WeightForm, put: Callable[[Tensor], int]) -> dict[str, Any] | None:
    """Return the class and the attributes of a form in panels; None for any other."""
    if isinstance(form, JoinedForm):
        forms = [_described(each, put) for each in form.forms]
        return None if None in forms else {"class": "JoinedForm", "forms": forms, "num_rows": form.num_rows}
    if not isinstance(form, panels.PanelWeight | panels.Table):
        return None
    values = {name: _value(x, put) for name, x in vars(form).items() if name not in _NOT_KEPT}
    return {"class": type(form).__name__, "values": values}


def _value(x: Any, put: Callable[[Tensor], int]) -> Any:
    """Return an attribute as JSON has it: True, False and None as they are."""
    if isinstance(x, Tensor):
        return {"tensor": put(x)}
    if isinstance(x, torch.dtype):
        return {"dtype": str(x).removeprefix("torch.")}
    if isinstance(x, Panels):
        return {"panels": [put(x.weight), put(x.scales), x.out_features, x.gated]}
    assert x is None or isinstance(x, bool), f"a form has {x!r}"
    return x


def _restored(described: Mapping[str, Any], tensors: Tensors) -> WeightForm:
    """Make a form again from its description."""
    if described["class"] == "JoinedForm":
        forms = [_restored(each, tensors) for each in described["forms"]]
        return JoinedForm(list(zip(forms, described["num_rows"], strict=True)))
    kind = _classes()[described["class"]]
    form: WeightForm = object.__new__(kind)
    for name, value in described["values"].items():
        setattr(form, name, _attribute(value, tensors))
    if isinstance(form, panels.PanelWeight):
        form.stays = True
        form.padded_bias = None
    return form


def _attribute(value: Any, tensors: Tensors) -> Any:
    if not isinstance(value, Mapping):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dtype":
        return getattr(torch, content)
    weight, scales, out_features, gated = content
    return Panels(tensors[weight], tensors[scales], out_features, gated)


@cache
def _classes() -> dict[str, type[Any]]:
    from . import coded_panels

    kinds = (
        *(panels.Table, panels.PanelWeight, coded_panels.PanelCodes),
        *(coded_panels.PanelInt8Weight, coded_panels.PanelInt4Weight),
    )
    return {kind.__name__: kind for kind in kinds}


@cache
def packer() -> str:
    """Return a hash of the code that packs weights, because another version may pack them differently."""
    folder = Path(__file__).parents[2]
    digest = sha256(torch.__version__.encode())
    for room in _ROOMS:
        files = sorted((folder / room).resolve().rglob("*.py"))
        for file in files:
            if "gpu" not in file.parts:
                digest.update(f"{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()
