"""LoRA adapters in GGUF files, as llama.cpp's convert_lora_to_gguf.py writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ...architectures.config import ModelConfig
from ...architectures.gguf_names import CONVERTED
from ...base.errors import CheckpointError
from ...base.validation import check_number, shown
from ..lora_adapter import AdapterReader, LoraAdapter
from .config import require_family
from .gguf_file import Gguf, GgufTensor, open_gguf
from .metadata import Metadata
from .tensors import orders_of

_A, _B = ".weight.lora_a", ".weight.lora_b"
# Metadata of an adapter that are read, or change nothing.
_KNOWN = ("adapter.type", "adapter.lora.alpha", "adapter.lora.task_name", "adapter.lora.prompt_prefix")


def read_gguf_adapter(path: Path, config: ModelConfig) -> LoraAdapter:
    """Read an adapter. config: the config of its model.

    Raises CheckpointError, which names file and tensor or key, for what is damaged, not finite, not supported
    or of another model.
    """
    with open_gguf(path) as gguf:
        metadata = Metadata(path, gguf.metadata)
        alpha = _alpha(metadata)
        require_family(metadata, config.architecture)
        names = CONVERTED[metadata.architecture].names
        reader = AdapterReader(
            path, replace(config, tensor_names=names), b"".join(file.digest for file in gguf.files)
        )
        for module, a, b in _pairs(gguf, metadata, config):
            rank = b.shape[-1]
            # llama.cpp takes an alpha of 0 to say that nothing is scaled.
            scale = alpha / rank if alpha else 1.0
            name = f"{module}.weight"
            stack = names.stack_of(names.in_decoder(name) or "")
            if stack is None:
                reader.add(module, a, b, rank, scale)
            else:
                reader.add_experts(name, stack, a, b, rank, scale)
        return reader.adapter()


def _alpha(metadata: Metadata) -> float:
    path = metadata.path
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if (value := metadata.values.get(key)) != wanted:
            raise CheckpointError(f"{path}: {key} is {shown(value)}, but an adapter has {wanted!r}")
    for key in metadata.values:
        if key.startswith("adapter.") and key not in _KNOWN:
            raise CheckpointError(f"{path}: {key} is not supported")
    alpha = metadata.values.get("adapter.lora.alpha")
    return check_number(CheckpointError, f"{path}: adapter.lora.alpha", alpha, 0.0)


def _pairs(
    gguf: Gguf, metadata: Metadata, config: ModelConfig
) -> Iterator[tuple[str, GgufTensor, GgufTensor]]:
    """Yield the name of each matrix in the file with its A and B, in the orders of transformers."""
    orders = orders_of(CONVERTED[metadata.architecture], _with_sizes(metadata, config))
    values = orders.get("attn_gate.weight")
    for name, tensor in gguf.tensors.items():
        ending = _A if name.endswith(_A) else _B if name.endswith(_B) else ""
        if not ending or not name.startswith("blk."):
            raise CheckpointError(
                f"{tensor.path}: {name} is not supported; an adapter has tensors blk.N.MATRIX{_A} and {_B} "
                "of linear layers"
            )
        module = name.removesuffix(ending)
        other = gguf.tensors.get(module + (_B if ending == _A else _A))
        if other is None:
            raise CheckpointError(f"{tensor.path}: {name} is there without its other matrix")
        if ending == _B:
            continue
        part = f"{module.split('.', 2)[-1]}.weight"
        order = orders.get(part)
        if order is not None and other.shape[0] % len(order) == 0:  # else the shape is wrong: found later
            other = replace(other, order=order)
        if part == "ssm_out.weight" and values is not None and len(values) == tensor.shape[-1]:
            tensor = replace(tensor, columns=tuple(values.argsort().tolist()))
        yield module, tensor, other


def _with_sizes(metadata: Metadata, config: ModelConfig) -> Metadata:
    """Return the metadata with the sizes that orders of rows depend on, which adapters lack."""
    sizes: dict[str, int] = {"attention.head_count": config.num_heads, "embedding_length": config.hidden_size}
    for attention in config.attentions.values():
        sizes |= {
            "attention.key_length": attention.kv.key_dim,
            "attention.value_length": attention.kv.value_dim,
        }
    for state in config.states.values():
        if state.kind == "delta":
            sizes |= {
                "ssm.time_step_rank": state.num_heads,
                "ssm.group_count": state.num_key_heads,
                "ssm.inner_size": state.num_values,
                "ssm.state_size": state.key_dim,
            }
    own: Mapping[str, int | str] = {f"{metadata.architecture}.{key}": value for key, value in sizes.items()}
    return Metadata(metadata.path, {"general.architecture": metadata.architecture, **own})
