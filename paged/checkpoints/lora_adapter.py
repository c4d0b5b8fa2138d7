"""LoRA adapters. In PEFT's format, a directory has adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import sqrt
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..architectures.config import LAYERS, ExpertStack, ModelConfig, TensorNames
from ..architectures.families.vision import PROJECTOR, VISION
from ..architectures.hf_config import check_file, read_json
from ..architectures.spec import ExpertsSpec
from ..base.errors import CheckpointError, MissingModelError
from ..base.validation import check_number, shown
from .safetensors_file import SafetensorsFile
from .stored import FLOATS, StoredTensor

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_ADAPTER_BYTES = 16 * 2**30
T = TypeVar("T")
_PREFIX = "base_model.model."
_WRAPPED = ".base_layer"
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
     "init_lora_weights", "target_parameters")
)  # fmt: skip
_WHY = {
    "modules_to_save": "whole weights of the model that were trained",
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
    modules: the names of these matrices in the adapter's file.
    digest: a hash of what the adapter computes: its tensors and its config, not its name.
    """

    directory: Path
    parts: Mapping[str, LoraPart]
    modules: Mapping[str, str]
    digest: bytes

    @property
    def rank(self) -> int:
        """The largest rank of its parts."""
        return max(len(part.a) for part in self.parts.values())

    @property
    def num_bytes(self) -> int:
        """The bytes that its tensors take."""
        return sum(each.nbytes for part in self.parts.values() for each in part)


def read_lora_adapter(directory: Path, model: ModelConfig) -> LoraAdapter:
    """Read an adapter. model: the config of its model, with the names of transformers' checkpoints.

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
    if model.tensor_names.factors is None:
        raise CheckpointError(
            f"{path}: the model's GGUF file has its weights multiplied by factors that it does not tell, and "
            "an adapter of PEFT needs them; take the model in safetensors, or the adapter as GGUF"
        )
    check_file(path, MAX_ADAPTER_BYTES)
    reader = AdapterReader(path, model, (directory / CONFIG).read_bytes())
    with SafetensorsFile(path) as file:
        for module, a, b in _pairs(file.tensors):
            found = _stack_at(module, config, model.tensor_names)
            if found is None:
                name = config.parameter_of(module)
                reader.add(module, a, b, config.rank_of(name), config.scale_of(name))
            else:
                name, stack = found
                reader.add_experts(name, stack, a, b, config.rank_of(name), config.scale_of(name))
    return reader.adapter()


def _stack_at(module: str, config: _Config, names: TensorNames) -> tuple[str, ExpertStack] | None:
    """Return the name of the stack of experts whose matrices PEFT has under this name, and the stack.

    PEFT wraps a module once for each of its adapted parameters, the first one innermost: it is under the name
    with the most `base_layer`.
    """
    base = module
    while base.endswith(_WRAPPED):
        base = base.removesuffix(_WRAPPED)
    depth = (len(module) - len(base)) // len(_WRAPPED)
    own = names.in_decoder(f"{base}.") or ""
    if not own.startswith(LAYERS):
        return None
    layer = f"{LAYERS}{own.removeprefix(LAYERS).partition('.')[0]}."
    stacks = {
        f"{base}.{parameter}": stack
        for stack in names.stacks
        if stack.rank == 3 and all(part.endswith(".weight") for part in stack.parts)
        if (parameter := f"{layer}{stack.name}".removeprefix(own)) != f"{layer}{stack.name}"
    }
    found = [(name, stack) for name, stack in stacks.items() if config.is_parameter(name)]
    if depth < len(found):
        return found[len(found) - 1 - depth]
    if depth:
        raise CheckpointError(
            f"{config.path}: target_parameters {shown([*config.parameters])} name {len(found)} weights of "
            f"experts in {base}, but there are matrices of {module}"
        )
    return None


class AdapterReader:
    """Reads the matrices of an adapter, and makes the adapter of them.

    path: the file.
    model: the config of its model, with the names that tensors have in the adapter.
    config: the beginning of the adapter's digest: all that its file says besides the matrices.
    """

    def __init__(self, path: Path, model: ModelConfig, config: bytes) -> None:
        self._path = path
        self._names = model.tensor_names
        parts = [part for layer in model.layers for part in layer.feed_forwards]
        self._num_experts = max((p.num_experts for p in parts if isinstance(p, ExpertsSpec)), default=0)
        self._parts: dict[str, LoraPart] = {}
        self._modules: dict[str, str] = {}
        self._digest = sha256(config)

    def add(self, module: str, a: StoredTensor, b: StoredTensor, rank: int, scale: float) -> None:
        """Read the matrices of a module, by its name in a checkpoint of the model.

        Raises CheckpointError if they are not of this rank, or of a module that the model does not have.
        """
        own_name = _name_in_decoder(a, module, self._names)
        low, high = self._read(own_name, a, b)
        _check_shapes(a, b, rank)
        high = self._scaled(b, high, scale)
        high = _with_factors(high, own_name, self._names)
        self._put(own_name, LoraPart(low, high), module)

    def add_experts(
        self, name: str, stack: ExpertStack, a: StoredTensor, b: StoredTensor, rank: int, scale: float
    ) -> None:
        """Read the matrices of a stack of experts, by its name in a checkpoint of the model.

        a: [num_experts, rank, in_features], or in PEFT's form [num_experts * rank, in_features].
        b: [num_experts, out_features, rank], or in PEFT's form [out_features, rank * num_experts], rank by
            rank, each with all experts.

        Raises CheckpointError if they do not have these shapes.
        """
        own_name = self._names.in_decoder(name) or name
        is_flat = len(a.shape) == 2
        low, high = self._read(own_name, a, b, num_dims=2 if is_flat else 3)
        num_experts = self._num_experts
        *_, num_inputs = low.shape
        num_rows = len(high) if is_flat else high.shape[1]
        shapes = [num_experts, rank, num_inputs], [num_experts, num_rows, rank]
        if is_flat:
            shapes = [num_experts * rank, num_inputs], [num_rows, rank * num_experts]
        if (a.shape, b.shape) != shapes or num_rows % len(stack.parts):
            raise CheckpointError(
                f"{a.path}: {a.name} of shape {a.shape} and {b.name} of shape {b.shape} must have the rank "
                f"{rank} of the adapter's config for each of the {num_experts} experts of {name}, and rows "
                f"of {len(stack.parts)} matrices"
            )
        if is_flat:
            low = low.view(num_experts, rank, num_inputs)
            high = high.view(num_rows, rank, num_experts).permute(2, 0, 1).contiguous()
        high = self._scaled(b, high, scale)
        experts = own_name.removesuffix(stack.name) + "mlp.experts."
        for expert in range(num_experts):
            for part, own_high in zip(stack.parts, high[expert].chunk(len(stack.parts)), strict=True):
                own = f"{experts}{expert}.{part.removesuffix('.weight')}"
                self._put(own, LoraPart(low[expert], own_high), name)

    def _read(self, own_name: str, *tensors: StoredTensor, num_dims: int = 2) -> list[Tensor]:
        """Read matrices, or stacks of them, which become a part of the digest."""
        found = [_read(each, num_dims) for each in tensors]
        for each in found:
            self._digest.update(each.numpy().tobytes())
        self._digest.update(own_name.encode())
        return found

    def _scaled(self, b: StoredTensor, high: Tensor, scale: float) -> Tensor:
        high = high * scale
        if not torch.isfinite(high).all():
            raise CheckpointError(
                f"{self._path}: {b.name} of shape {b.shape} has numbers that are not finite once they are "
                f"multiplied by the scale {scale:g}"
            )
        return high

    def _put(self, own_name: str, part: LoraPart, module: str) -> None:
        if own_name in self._parts:
            raise CheckpointError(f"{self._path}: {module} is there twice, under two names")
        self._parts[own_name] = part
        self._modules[own_name] = module

    def adapter(self) -> LoraAdapter:
        """Return the adapter. Raises CheckpointError if it has no matrix."""
        if not self._parts:
            raise CheckpointError(f"{self._path}: has no tensors, so the adapter would change nothing")
        return LoraAdapter(self._path.parent, self._parts, self._modules, self._digest.digest())


class _Config(NamedTuple):
    """The numbers of adapter_config.json."""

    path: Path
    rank: int
    alpha: float
    ranks: Mapping[str, int]  # by a pattern that the end of a module's name matches
    alphas: Mapping[str, float]
    by_root: bool
    parameters: Sequence[str]  # the endings of the names of adapted parameters that are no linear layers

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's matrices."""
        return _matching(self.ranks, module, self.path, self.rank)

    def is_parameter(self, name: str) -> bool:
        """Return whether a parameter is adapted by its name."""
        return any(f".{name}".endswith(f".{each}") for each in self.parameters)

    def parameter_of(self, module: str) -> str:
        """Return the name that patterns match: that of its weight, if it was given by this name."""
        weight = f"{module}.weight"
        return weight if self.is_parameter(weight) else module

    def scale_of(self, module: str) -> float:
        """Return the factor of what is added to a module's outputs."""
        alpha = _matching(self.alphas, module, self.path, self.alpha)
        rank = self.rank_of(module)
        return alpha / (sqrt(rank) if self.by_root else rank)


def _matching(patterns: Mapping[str, T], module: str, path: Path, default: T) -> T:
    """Return the number of the first pattern that a module's name ends with, as PEFT finds it."""
    for pattern, number in patterns.items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return number
        except re.error as error:
            raise CheckpointError(
                f"{path}: the pattern {pattern!r} is no regular expression: {error}"
            ) from None
    return default


def _read_config(directory: Path) -> _Config:
    path = directory / CONFIG
    if not path.exists():
        raise MissingModelError(f"{path} does not exist; an adapter has {CONFIG} and {WEIGHTS}")
    config = read_json(path)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{path}: peft_type {shown(kind)} is not supported; supported is 'LORA'")
    for key, value in config.items():
        is_default = value is None or value is False or value in ([], {})
        if key not in NEUTRAL_OF_PEFT and key not in READ and not is_default:
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
    parameters = config.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(each, str) for each in parameters):
        raise CheckpointError(f"{path}: target_parameters must be a list of names, got {shown(parameters)}")
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
        parameters,
    )


def _pairs(tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, StoredTensor, StoredTensor]]:
    """Yield the name of each module with its A and B. Raises CheckpointError for any other tensor."""
    for name, tensor in tensors.items():
        ending = _A if name.endswith(_A) else _B if name.endswith(_B) else ""
        if not ending or not name.startswith(_PREFIX):
            raise CheckpointError(
                f"{tensor.path}: {name} is not supported; an adapter has tensors {_PREFIX}MODULE{_A} and "
                f"{_PREFIX}MODULE{_B} of linear layers, no embedding and no whole weights"
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
    if own_name is not None and own_name.startswith((VISION, PROJECTOR)):
        raise CheckpointError(
            f"{tensor.path}: {tensor.name} adapts {module}, a part for images; adapters of these are not "
            "supported"
        )
    if own_name is None:
        raise CheckpointError(f"{tensor.path}: {tensor.name} adapts {module}, which the model does not have")
    return own_name.removesuffix(".weight")


def _read(tensor: StoredTensor, num_dims: int) -> Tensor:
    """Return a matrix, or a stack of matrices, in float32."""
    if tensor.dtype not in FLOATS or len(tensor.shape) != num_dims:
        raise CheckpointError(
            f"{tensor.path}: {tensor.name} is {tensor.dtype} of shape {tensor.shape}; it must be "
            f"{'a matrix' if num_dims == 2 else 'a stack of matrices'} of floats"
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
