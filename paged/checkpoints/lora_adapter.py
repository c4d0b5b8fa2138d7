"""LoRA adapters. In PEFT's format, a directory has adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import sqrt
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..architectures.config import LAYERS, TensorNames
from ..architectures.hf_config import check_file, read_json
from ..base.errors import CheckpointError, MissingModelError
from ..base.validation import check_number, shown
from .safetensors_file import SafetensorsFile
from .stored import FLOATS, StoredTensor

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_ADAPTER_BYTES = 16 * 2**30
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"

# Keys of adapter_config.json that say how an adapter was trained, or what its tensors say themselves.
NEUTRAL_OF_PEFT = frozenset(
    ("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
     "target_modules", "exclude_modules", "lora_dropout", "fan_in_fan_out", "layers_to_transform",
     "layers_pattern", "megatron_config", "megatron_core", "loftq_config", "eva_config", "runtime_config",
     "qalora_group_size", "ensure_weight_tying")
)  # fmt: skip
READ = frozenset(
    ("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias",
     "init_lora_weights")
)  # fmt: skip
_WHY = {
    "modules_to_save": "whole weights of the model that were trained",
    "target_parameters": "adapters of experts and of single parameters",
    "trainable_token_indices": "trained rows of the embedding",
    "alora_invocation_tokens": "adapters that begin at a token",
    "layer_replication": "layers that occur several times",
    "use_dora": "DoRA, which also scales the weight",
}
# Starting points that leave the weights of the model as they are.
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva", "mica")


class LoraPart(NamedTuple):
    """What an adapter adds to one stored matrix [num_rows, in_features]: b @ a."""

    a: Tensor  # f32[rank, in_features]
    b: Tensor  # f32[num_rows, rank], scaled


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A LoRA adapter in host memory.

    parts: by the name of the stored matrix in a checkpoint of the decoder alone, without ".weight".
    digest: a hash of what the adapter computes: its tensors and its config, not its name.
    """

    directory: Path
    parts: Mapping[str, LoraPart]
    digest: bytes

    @property
    def rank(self) -> int:
        """The largest rank of its parts."""
        return max(len(part.a) for part in self.parts.values())

    @property
    def num_bytes(self) -> int:
        """The bytes that its tensors take."""
        return sum(each.nbytes for part in self.parts.values() for each in part)


def read_lora_adapter(directory: Path, names: TensorNames) -> LoraAdapter:
    """Read an adapter. names: those of its model's tensors.

    Raises CheckpointError, which names file and tensor or key, for what is damaged, not finite or not
    supported.
    """
    config = _read_config(directory)
    path = directory / WEIGHTS
    if not path.exists():
        if (directory / "adapter_model.bin").exists():
            raise CheckpointError(
                f"{directory / 'adapter_model.bin'}: is a pickle, which may run code; save the adapter with "
                "safe_serialization=True"
            )
        raise MissingModelError(f"{path} does not exist; an adapter has {CONFIG} and {WEIGHTS}")
    if names.factors is None:
        raise CheckpointError(
            f"{path}: the model's GGUF file has its weights multiplied by factors that it does not tell, and "
            "an adapter of PEFT needs them; take the model in safetensors, or the adapter as GGUF"
        )
    check_file(path, MAX_ADAPTER_BYTES)
    reader = AdapterReader(path, names, (directory / CONFIG).read_bytes())
    with SafetensorsFile(path) as file:
        for module, a, b in _pairs(file.tensors):
            reader.add(module, a, b, config.rank_of(module), config.scale_of(module))
    return reader.adapter()


class AdapterReader:
    """Reads the matrices of an adapter, and makes the adapter of them.

    path: the file.
    names: those of the tensors of its model.
    config: what the adapter's digest begins with: all that its file says beside the matrices.
    """

    def __init__(self, path: Path, names: TensorNames, config: bytes) -> None:
        self._path = path
        self._names = names
        self._parts: dict[str, LoraPart] = {}
        self._digest = sha256(config)

    def add(self, module: str, a: StoredTensor, b: StoredTensor, rank: int, scale: float) -> None:
        """Read the matrices of a module, by its name in a checkpoint of the model.

        Raises CheckpointError if they are not of this rank, or of a module that the model does not have.
        """
        own_name = _name_in_decoder(a, module, self._names)
        low, high = _read(a), _read(b)
        _check_shapes(a, b, rank)
        if own_name in self._parts:
            raise CheckpointError(f"{self._path}: {module} is there twice, under two names")
        for each in (low, high):
            self._digest.update(each.numpy().tobytes())
        self._digest.update(own_name.encode())
        high = _with_factors(high * scale, own_name, self._names)
        self._parts[own_name] = LoraPart(low, high)

    def adapter(self) -> LoraAdapter:
        """Return the adapter. Raises CheckpointError if it has no matrix."""
        if not self._parts:
            raise CheckpointError(f"{self._path}: has no tensors, so the adapter would change nothing")
        return LoraAdapter(self._path.parent, self._parts, self._digest.digest())


class _Config(NamedTuple):
    """The numbers of adapter_config.json."""

    path: Path
    rank: int
    alpha: float
    ranks: Mapping[str, int]  # by a pattern that the end of a module's name matches
    alphas: Mapping[str, float]
    by_root: bool

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's matrices."""
        return self.ranks.get(_matching(self.ranks, module, self.path), self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of what is added to a module's outputs."""
        alpha = self.alphas.get(_matching(self.alphas, module, self.path), self.alpha)
        rank = self.rank_of(module)
        return alpha / (sqrt(rank) if self.by_root else rank)


def _matching(patterns: Mapping[str, object], module: str, path: Path) -> str:
    """Return the first pattern that a module's name ends with, as PEFT finds it; "" if there is none."""
    for pattern in patterns:
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return pattern
        except re.error as error:
            raise CheckpointError(
                f"{path}: the pattern {pattern!r} is no regular expression: {error}"
            ) from None
    return ""


def _read_config(directory: Path) -> _Config:
    path = directory / CONFIG
    if not path.exists():
        raise MissingModelError(f"{path} does not exist; an adapter has {CONFIG} and {WEIGHTS}")
    config = read_json(path)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{path}: peft_type {shown(kind)} is not supported; supported is 'LORA'")
    for key, value in config.items():
        if key not in NEUTRAL_OF_PEFT and key not in READ and value not in (None, False, [], {}):
            why = f": {_WHY[key]}" if key in _WHY else ""
            raise CheckpointError(f"{path}: {key} {shown(value)} is not supported{why}")
    if (bias := config.get("bias", "none")) != "none":
        raise CheckpointError(f"{path}: bias {shown(bias)} is not supported; supported is 'none'")
    start = config.get("init_lora_weights", True)
    if not isinstance(start, bool | str | None) or start not in _PLAIN_STARTS:
        raise CheckpointError(
            f"{path}: init_lora_weights {shown(start)} is not supported, as it changes the model's own "
            "weights; save the adapter as a plain one, with path_initial_model_for_weight_conversion"
        )

    def number(name: str, value: object) -> float:
        return check_number(CheckpointError, f"{path}: {name}", value, 0.0, above=True)

    def rank(name: str, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{path}: {name} must be an int of at least 1, got {shown(value)}")
        return value

    patterns = []
    for key, check in (("rank_pattern", rank), ("alpha_pattern", number)):
        found = config.get(key) or {}
        if not isinstance(found, dict):
            raise CheckpointError(f"{path}: {key} must be an object of patterns, got {shown(found)}")
        patterns.append({name: check(f"{key} {name!r}", value) for name, value in found.items()})
    by_root = config.get("use_rslora", False)
    if not isinstance(by_root, bool | None):
        raise CheckpointError(f"{path}: use_rslora must be true or false, got {shown(by_root)}")
    return _Config(
        path,
        rank("r", config.get("r", 8)),
        number("lora_alpha", config.get("lora_alpha", 8)),
        {name: int(value) for name, value in patterns[0].items()},
        patterns[1],
        bool(by_root),
    )


def _pairs(tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, StoredTensor, StoredTensor]]:
    """Yield the name of each module with its A and B. Raises CheckpointError for any other tensor."""
    for name, tensor in tensors.items():
        ending = _A if name.endswith(_A) else _B if name.endswith(_B) else ""
        if not ending or not name.startswith(_PREFIX):
            raise CheckpointError(
                f"{tensor.path}: {name} is not supported; an adapter has tensors {_PREFIX}MODULE{_A} and "
                f"{_PREFIX}MODULE{_B}"
            )
        module = name[: -len(ending)]
        other = module + (_B if ending == _A else _A)
        if other not in tensors:
            raise CheckpointError(f"{tensor.path}: {name} is there without {other}")
        if ending == _A:
            yield module.removeprefix(_PREFIX), tensor, tensors[other]


def _name_in_decoder(tensor: StoredTensor, module: str, names: TensorNames) -> str:
    """Return the name of a module's matrix in a checkpoint of the decoder alone."""
    name = f"{module}.weight"
    if not names.is_read(name):
        raise CheckpointError(
            f"{tensor.path}: {tensor.name} adapts a part of the model that is not loaded: {module}"
        )
    own_name = names.in_decoder(name)
    if own_name is None:
        raise CheckpointError(f"{tensor.path}: {tensor.name} adapts {module}, which the model does not have")
    return own_name.removesuffix(".weight")


def _read(tensor: StoredTensor) -> Tensor:
    """Return a matrix in float32."""
    if tensor.dtype not in FLOATS or len(tensor.shape) != 2:
        raise CheckpointError(
            f"{tensor.path}: {tensor.name} is {tensor.dtype} of shape {tensor.shape}; it must be a matrix of "
            "floats"
        )
    values = tensor.read().float()
    if not torch.isfinite(values).all():
        raise CheckpointError(f"{tensor.path}: {tensor.name} has numbers that are not finite")
    return values


def _with_factors(b: Tensor, own_name: str, names: TensorNames) -> Tensor:
    """Multiply the rows of B by the factors by which the rows of the weight are multiplied."""
    module = own_name.removeprefix(LAYERS).partition(".")[2]
    runs = dict(names.factors or ()).get(f"{module}.weight", ())
    if sum(count for count, _ in runs) != len(b):  # no factors, or a wrong shape, which is found later
        return b
    return b * torch.cat([torch.full((count, 1), factor) for count, factor in runs])


def _check_shapes(a: StoredTensor, b: StoredTensor, rank: int) -> None:
    """Raise CheckpointError unless both matrices have the rank that the config says."""
    if a.shape[0] != rank or b.shape[1] != rank:
        raise CheckpointError(
            f"{a.path}: {a.name} of shape {a.shape} and {b.name} of shape {b.shape} must both have the rank "
            f"{rank} of {CONFIG}"
        )
