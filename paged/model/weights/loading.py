"""Compare the tensors of a checkpoint with the decoder's parameters, and copy them there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ...errors import CheckpointError
from ..config import TensorNames
from .safetensors_file import SafetensorsFile
from .sources import Sources, StoredTensor
from .weight_files import find_weight_files

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@contextmanager
def open_tensors(directory: Path, names: TensorNames) -> Iterator[Sources]:
    """Open the files of a checkpoint, and find every tensor of the decoder in their headers.

    Each file is opened and its header read once. The tensors can be read until the context ends.

    Raises CheckpointError, which names file and tensor, for damaged files and for tensors of no known part.
    """
    with ExitStack() as files:
        found: dict[str, StoredTensor] = {}
        for path in find_weight_files(directory):
            file = files.enter_context(SafetensorsFile(path, names))
            for name, tensor in file.tensors.items():
                own_name = names.in_decoder(name)
                if own_name is None:
                    raise _unknown(path, [name])
                if (known := found.get(own_name)) is not None:
                    again = "" if known.name == name else f", as {known.name}"
                    raise CheckpointError(f"{path}: {name} is in {known.path.name} too{again}")
                found[own_name] = tensor
        yield found


def load_weights(destinations: Mapping[str, Tensor], sources: Sources) -> None:
    """Copy tensors to their destinations, casting to their dtypes."""
    for name, destination in destinations.items():
        sources[name].copy_to(destination)


def check_weights(
    destinations: Mapping[str, Tensor], sources: Sources, names: TensorNames, directory: Path
) -> None:
    """Compare the tensors of a checkpoint with the destinations, which may be on the meta device.

    Raises CheckpointError, which names file and tensor, for tensors that are missing, unknown or of another
    shape.
    """
    _check_names(destinations, sources, names, directory)
    for name, destination in destinations.items():
        tensor = sources[name]
        if tensor.shape != list(destination.shape):
            raise CheckpointError(
                f"{tensor.path}: {tensor.name} has shape {tensor.shape}, "
                f"but config.json makes it {list(destination.shape)}"
            )


def has_own_head(sources: Sources) -> bool:
    """Return whether there is an output head that differs from the embedding.

    The two are then not tied, whatever config.json says, which often has a default there. Some checkpoints
    carry a copy of the embedding.
    """
    if HEAD not in sources or EMBEDDING not in sources:
        return False
    head = sources[HEAD]
    embedding = sources[EMBEDDING]
    if head.shape != embedding.shape or len(head.shape) != 2:
        return True
    return not all(
        torch.equal(head.read(rows).float(), embedding.read(rows).float()) for rows in head.parts()
    )


def _check_names(
    destinations: Mapping[str, Tensor], sources: Sources, names: TensorNames, directory: Path
) -> None:
    absent = set(destinations) - set(sources)
    if absent:
        # A model that makes embeddings needs no head, so its checkpoint may lack one that is not tied.
        only_head = "; tie_word_embeddings true in config.json uses the embedding as head"
        missing = _some(sorted(map(names.in_checkpoint, absent)))
        hint = only_head if absent == {HEAD} else ""
        raise CheckpointError(f"{directory}: {missing} missing from the checkpoint{hint}")
    tied_head = set() if HEAD in destinations else {HEAD}
    extra = sorted(sources[name].name for name in set(sources) - set(destinations) - tied_head)
    if extra:
        path = next(source.path for source in sources.values() if source.name == extra[0])
        raise _unknown(path, extra)


def _unknown(file: Path, names: list[str]) -> CheckpointError:
    return CheckpointError(f"{file}: {_some(names)} not part of the model that config.json describes")


def _some(names: list[str]) -> str:
    listed = ", ".join(names[:3])
    return f"{listed} is" if len(names) == 1 else f"{listed}{' …' if len(names) > 3 else ''} are"
