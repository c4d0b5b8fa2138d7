"""LoRA adapters of PEFT as GGUF files, converted as llama.cpp's convert_lora_to_gguf.py does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import GGUFWriter
from safetensors.torch import load_file
from torch import Tensor

from tests.support.checkpoints import checkpoint
from tests.support.gguf_models import converted, metadata_of, name_of

Tensors = dict[str, Tensor]


def _with_stacks(tensors: Tensors) -> Tensors:
    """Stack the matrices of experts, by the name of one without its number."""
    of_experts: dict[str, dict[int, Tensor]] = {}
    found = {}
    for name, tensor in tensors.items():
        start, is_expert, rest = name.partition(".experts.")
        if not is_expert:
            found[name] = tensor
            continue
        number, _, part = rest.partition(".")
        of_experts.setdefault(f"{start}.experts.{part}", {})[int(number)] = tensor
    for name, each in of_experts.items():
        found[name] = torch.stack([each[number] for number in range(len(each))])
    return found


def write_adapter(
    path: Path,
    model: str,
    peft: Path,
    alpha: Any,
    *,
    more: Mapping[str, str] | None = None,
    edit: Callable[[Tensors], Tensors] = lambda tensors: tensors,
) -> Path:
    """Write an adapter of a tiny checkpoint. peft: its directory. more: metadata as text."""
    config = transformers.AutoConfig.from_pretrained(checkpoint(model))
    metadata = metadata_of(config)
    tensors = {}
    for name, tensor in _with_stacks(load_file(peft / "adapter_model.safetensors")).items():
        module, _, kind = name.removeprefix("base_model.model.").partition(".lora_")
        own = name_of(f"{module}.weight", metadata)
        # The rows of the weight are those of B; where its columns have another order, A has them.
        is_changed = kind.startswith("B") != own.endswith("ssm_out.weight")
        changed = converted(own, tensor, config, metadata) if is_changed else tensor
        tensors[f"{own}.lora_{kind[0].lower()}"] = changed
    writer = GGUFWriter(path, metadata["general.architecture"])
    given = {"general.type": "adapter", "adapter.type": "lora", **(more or {})}
    for key, value in given.items():
        writer.add_string(key, value)
    if isinstance(alpha, str):
        writer.add_string("adapter.lora.alpha", alpha)
    else:
        writer.add_float32("adapter.lora.alpha", alpha)
    for name, tensor in edit(tensors).items():
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
