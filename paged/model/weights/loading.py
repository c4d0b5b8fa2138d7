"""Compare the tensors of a checkpoint with those that a model needs, and load them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ...architectures.config import ModelConfig, TensorNames
from ...architectures.gguf_paths import ROPE_FACTORS, is_gguf
from ...architectures.spec import ExpertsSpec
from ...base.errors import CheckpointError
from ...base.garbage import without_collection
from ...checkpoints.coded import Weight
from ...checkpoints.safetensors_file import SafetensorsFile
from ...checkpoints.stored import (
    FLOATS,
    Layout,
    Recognizer,
    Sources,
    StoredPart,
    StoredRows,
    StoredTensor,
    StoredWeight,
    ValueCheck,
    check_values,
    float_layout,
    format_of,
    read_rows,
    split_by_format,
)
from ...checkpoints.weight_files import find_weight_files
from .forms import Role, WeightForm

if TYPE_CHECKING:
    from .choice import Forms

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@contextmanager
def open_tensors(directory: Path, names: TensorNames) -> Iterator[Sources]:
    """Open the files of a checkpoint, and find every tensor of the decoder in their headers.

    Each file is opened and its header read once. The tensors can be read until the context ends.

    Raises CheckpointError, which names file and tensor, for a damaged file or an unknown tensor.
    """
    with ExitStack() as files:
        with without_collection():  # a dozen objects for each tensor: it would take as long again
            found = _find_tensors(directory, names, files)
        yield found


def _find_tensors(directory: Path, names: TensorNames, files: ExitStack) -> Sources:
    """Find every tensor of the decoder. files: open as long as the tensors are read."""
    found: dict[str, StoredTensor] = {}
    for path in find_weight_files(directory):
        for name, tensor in files.enter_context(_open_file(path, names)).items():
            own_name = names.in_decoder(name)
            if own_name is None:
                raise _unknown(path, [name], tensor.config)
            stack = names.stack_of(own_name)
            parts: Iterable[tuple[str, StoredTensor]] = [(own_name, tensor)]
            if stack is not None:
                from ...checkpoints.stacks import experts_of

                parts = experts_of(own_name, tensor, stack)
            for each, own in parts:
                if (known := found.get(each)) is not None:
                    again = "" if known.name == name else f", as {known.name}"
                    raise CheckpointError(f"{path}: {name} is in {known.path.name} too{again}")
                found[each] = own
    if names.factors:
        from ...checkpoints.scaled import scaled

        return {name: scaled(name, tensor, names.factors) for name, tensor in found.items()}
    return found


@contextmanager
def _open_file(path: Path, names: TensorNames) -> Iterator[Mapping[str, StoredTensor]]:
    """Open a file, or a GGUF file with its other parts, and find its tensors by their names in it."""
    if is_gguf(path.name):
        from ...checkpoints.gguf.gguf_file import open_gguf
        from ...checkpoints.gguf.tensors import presented

        with open_gguf(path) as gguf:
            yield {
                name: tensor
                for name, tensor in presented(gguf).items()
                if name not in ROPE_FACTORS and names.is_read(name)
            }
    else:
        with SafetensorsFile(path, names) as file:
            yield file.tensors


class Loadable(nn.Module):
    """A module whose parameters are rows of a checkpoint's tensors. It is made on the meta device.

    role: the role that selects the form of its weight; None keeps the weight a parameter.
    num_precise: see `Forms.make`.
    """

    role: Role | None = None
    num_precise = 0

    def __init__(self, stored: StoredRows) -> None:
        super().__init__()
        self.stored = stored

    def load(self, loader: Loader) -> None:
        """Read the parameters of this module. Submodules are not read."""
        for name, parameter in list(self.named_parameters(recurse=False)):
            setattr(self, name, loader.parameter(self.stored, name, parameter))


class KVScales(NamedTuple):
    """The scales for a layer's K and V in the cache, f32[num_kv_heads]; None if the checkpoint has none."""

    key: Tensor | None
    value: Tensor | None


class StoredWeights(NamedTuple):
    """The sizes in bytes of a model's parameters in its files, by stored format."""

    num_bytes: Counter[str]  # by the title of a format; that of floats is ""

    @property
    def formats(self) -> str:
        """The titles of the quantised formats, the format with the most bytes first."""
        return " and ".join(title for title, _ in self.num_bytes.most_common() if title)

    def __str__(self) -> str:
        return f"{self.formats or 'floats'} ({self.num_bytes.total() / 1e9:,.3g} GB)"


@dataclass(frozen=True, slots=True)
class Loader:
    """Reads the parameters of modules. The tensors stored for a weight determine its format."""

    sources: Sources
    forms: Forms
    device: torch.device
    recognizers: Sequence[Recognizer] = ()
    kv_scales: Mapping[int, KVScales] = field(default_factory=dict)  # by layer
    # Bytes of the files that weights were read from, by the title of their format.
    num_bytes: Counter[str] = field(default_factory=Counter)
    float_forms: Forms | None = None  # of weights that stay floats in a quantised model; None: as the others

    @property
    def in_floats(self) -> Loader:
        """A loader for weights that stay floats in a quantised model."""
        return self if self.float_forms is None else replace(self, forms=self.float_forms)

    def parameter(
        self, rows: StoredRows, name: str, like: Tensor, check: ValueCheck | None = None
    ) -> nn.Parameter:
        """Read a float parameter. If the checkpoint lacks it, return ones.

        like: the parameter on the meta device.
        check: a check of its values; by default they must be finite.
        """
        if rows.parts:
            layout = float_layout(like) if check is None else float_layout(like)._replace(check=check)
            value = self.read(rows, name, layout).reshape(like.shape)  # a number is read as a row
        else:
            value = torch.ones(like.shape, dtype=like.dtype, device=self.device)
        return nn.Parameter(value, requires_grad=False)

    def form(self, rows: StoredRows, like: Tensor, role: Role, num_precise: int = 0) -> WeightForm:
        """Read a weight, and convert it to the form that its stored format and its role determine.

        like: the float weight on the meta device.
        num_precise: see `Forms.make`.
        """
        parts, stored, role = self.weights_of(rows, like, role)
        if len(stored) == 1:
            return self.form_of(stored[0], parts, role, num_precise)
        from .joined_form import JoinedForm

        return JoinedForm([(self.form_of(each, parts, role), each.rows.num_rows) for each in stored])

    def weights_of(
        self, rows: StoredRows, like: Tensor, role: Role
    ) -> tuple[dict[str, StoredPart], list[StoredWeight], Role]:
        """Return the stored parts of a weight by name, its rows by format, and the role of the rows."""
        parts = {part.name: part for part in parts_of(rows, like, self.sources)}
        formats = {name: format_of(part, self.recognizers) for name, part in parts.items()}
        stored = split_by_format(rows, formats)
        # Gates and ups in several products are not multiplied by each other in any of them.
        return parts, stored, "layer" if len(stored) > 1 and role == "gated" else role

    def form_of(
        self, stored: StoredWeight, parts: Mapping[str, StoredPart], role: Role, num_precise: int = 0
    ) -> WeightForm:
        """Read rows that share one stored format, and convert them to a form."""
        first = parts[next(iter(stored.rows.parts))]
        layouts = {name: each for name, each in stored.format.layouts(first).items() if each.is_read}

        def weight_of(rows: StoredRows) -> Weight:
            tensors = {name: self.read(rows, name, each, title) for name, each in layouts.items()}
            return stored.format.weight(tensors)

        title = stored.format.title
        whole = stored.rows.whole
        stored_dtypes = {
            self.sources[f"{part}.{name}"].dtype for part in stored.rows.parts for name in layouts
        }
        # What is stored in bfloat16 is narrow everywhere.
        is_alike = whole is None or stored_dtypes == {torch.bfloat16}
        read_whole = None if is_alike or whole is None else partial(weight_of, whole)
        return self.forms.make(weight_of(stored.rows), role, num_precise, read_whole)

    def read(self, rows: StoredRows, name: str, layout: Layout, title: str = "") -> Tensor:
        """Read rows of one stored tensor for a parameter."""
        tensors = [(self.sources[f"{part}.{name}"], count) for part, count in rows.parts.items()]
        parts_read = map(rows.part_read, rows.parts)
        self.num_bytes[title] += round(
            sum(tensor.num_bytes * read for (tensor, _), read in zip(tensors, parts_read, strict=True))
        )
        values = read_rows(tensors, rows.index, layout, self.device)
        if layout.check is not None:
            check_values([tensor for tensor, _ in tensors], values, layout.check)
        return values


def parts_of(rows: StoredRows, like: Tensor, sources: Sources) -> list[StoredPart]:
    """Return the parts that make up a weight in a checkpoint.

    like: the float weight on the meta device.
    """
    num_inputs = like.shape[1]
    return [
        StoredPart(part, num_rows, num_inputs, like.dtype, rows.transposed, sources)
        for part, num_rows in rows.parts.items()
    ]


class Wanted(NamedTuple):
    """A tensor that a model needs from a checkpoint."""

    num_rows: int
    layout: Layout

    @property
    def shape(self) -> list[int]:
        """The shape that the tensor must have."""
        return self.layout.shape_of(self.num_rows)


def wanted_tensors(
    modules: Iterable[Loadable], sources: Sources, recognizers: Sequence[Recognizer] = ()
) -> dict[str, Wanted]:
    """Return the tensors that modules read from a checkpoint, by name. The default format is floats."""
    wanted: dict[str, Wanted] = {}
    for module in modules:
        rows = module.stored
        for name, like in module.named_parameters(recurse=False):
            is_weight = name == "weight" and module.role is not None
            for part in parts_of(rows, like, sources) if is_weight else ():
                layouts: Mapping[str, Layout] = format_of(part, recognizers).layouts(part)
                wanted |= {f"{part.name}.{each}": Wanted(part.num_rows, x) for each, x in layouts.items()}
            if not is_weight:
                layout = float_layout(like)
                wanted |= {f"{part}.{name}": Wanted(count, layout) for part, count in rows.parts.items()}
    return wanted


def check_weights(
    modules: Iterable[Loadable],
    sources: Sources,
    names: TensorNames,
    directory: Path,
    recognizers: Sequence[Recognizer] = (),
) -> None:
    """Compare the tensors of a checkpoint with the tensors that modules need.

    directory: the directory of the checkpoint, for messages; for a GGUF file, messages name the file.

    Raises CheckpointError, which names file and tensor, if a tensor is missing, unknown, or has the wrong
    shape or dtype.
    """
    wanted = wanted_tensors(modules, sources, recognizers)
    place = next((each.path for each in sources.values() if is_gguf(each.path.name)), directory)
    _check_names(wanted, sources, names, place)
    for name, (num_rows, layout) in wanted.items():
        tensor = sources[name]
        if tensor.shape != (shape := layout.shape_of(num_rows)):
            raise _wrong_shape(tensor, shape)
        if tensor.dtype not in layout.stored_dtypes:
            supported = ", ".join(map(str, layout.stored_dtypes))
            raise CheckpointError(
                f"{tensor.path}: {tensor.name} is {tensor.dtype}; supported are {supported}"
            )


# Of a weight: half of 4 bits, the narrowest format, as the number of weights is an estimate.
_LEAST_BITS = 2


def check_sizes(config: ModelConfig, sources: Sources, directory: Path) -> None:
    """Check that the files of a model are large enough for its config, before modules are made.

    A wrong config.json thus cannot cause modules much larger than the files. `check_weights` compares the
    tensors later.

    Raises CheckpointError, which names the sizes.
    """
    place = next((each.path for each in sources.values() if is_gguf(each.path.name)), directory)
    num_experts = sum(
        part.num_experts
        for layer in config.layers
        for part in layer.feed_forwards
        if isinstance(part, ExpertsSpec)
    )
    if config.num_layers + num_experts > len(sources):
        experts = f" with {num_experts:,} experts in all" if num_experts else ""
        raise CheckpointError(
            f"{place}: config.json describes {config.num_layers:,} layers{experts}, but the files have "
            f"{len(sources):,} tensors"
        )
    least = config.num_params * _LEAST_BITS // 8
    num_bytes = 0
    for tensor in sources.values():
        num_bytes += tensor.num_bytes
        if num_bytes >= least:
            return
    embedding = sources.get(EMBEDDING)
    shape = [config.vocab_size, config.hidden_size]
    if embedding is not None and embedding.dtype in FLOATS and embedding.shape != shape:
        raise _wrong_shape(embedding, shape)
    raise CheckpointError(
        f"{place}: config.json describes a model of {config.num_params:,} weights ({config.num_layers:,} "
        f"layers of hidden_size {config.hidden_size:,}, vocab_size {config.vocab_size:,}), but the tensors "
        f"of the files have {num_bytes:,} bytes"
    )


def _wrong_shape(tensor: StoredTensor, shape: list[int]) -> CheckpointError:
    return CheckpointError(
        f"{tensor.path}: {tensor.name} has shape {tensor.shape}, but {tensor.config} makes it {shape}"
    )


def has_own_head(sources: Sources) -> bool:
    """Return whether a checkpoint has an output head that differs from the embedding.

    In this case head and embedding are not tied, whatever config.json says: its value is often a default.
    Some checkpoints store a copy of the embedding as their head. A head that cannot be read counts as a copy.
    """
    if any(name.startswith("lm_head.") and name not in (HEAD, "lm_head.bias") for name in sources):
        return True  # in codes
    if HEAD not in sources:
        return False
    if EMBEDDING not in sources:
        return True  # the embedding is in codes
    head = sources[HEAD]
    embedding = sources[EMBEDDING]
    if head.shape != embedding.shape or len(head.shape) != 2:
        return True
    if not head.has_data:
        return False
    return not all(
        torch.equal(head.read(rows).float(), embedding.read(rows).float()) for rows in head.parts()
    )


def _check_names(wanted: Mapping[str, Wanted], sources: Sources, names: TensorNames, directory: Path) -> None:
    absent = set(wanted) - set(sources)
    if absent:
        # A model that makes embeddings needs no head, so its checkpoint may lack one that is not tied.
        only_head = "; tie_word_embeddings true in config.json uses the embedding as head"
        missing = _some(sorted(set(map(names.in_checkpoint, absent))))
        hint = only_head if absent == {HEAD} else ""
        raise CheckpointError(f"{directory}: {missing} missing from the checkpoint{hint}")
    tied_head = set() if HEAD in wanted else {HEAD}
    modules = {name.rpartition(".")[0] for name in wanted if not name.endswith(".weight")}
    extra = sorted(
        {
            sources[name].name
            for name in set(sources) - set(wanted) - tied_head
            if not _is_idle_bias(name, modules, sources)
        }
    )
    if extra:
        first = next(source for source in sources.values() if source.name == extra[0])
        raise _unknown(first.path, extra, first.config)


def _is_idle_bias(name: str, modules: set[str], sources: Sources) -> bool:
    """Return whether a tensor is a bias of zeros, which some quantisers write for layers that have none.

    modules: the modules that have tensors of codes.
    """
    module, _, last = name.rpartition(".")
    bias = sources[name]
    if last != "bias" or module not in modules or len(bias.shape) != 1 or bias.dtype not in FLOATS:
        return False
    return not bias.has_data or not bool(bias.read().any())


def _unknown(file: Path, names: list[str], config: str = "config.json") -> CheckpointError:
    return CheckpointError(f"{file}: {_some(names)} not part of the model that {config} describes")


def _some(names: list[str]) -> str:
    listed = ", ".join(names[:3])
    return f"{listed} is" if len(names) == 1 else f"{listed}{' …' if len(names) > 3 else ''} are"
