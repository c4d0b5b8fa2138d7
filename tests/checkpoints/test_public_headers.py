"""The tensors that public quantised models have are those that are asked for, in their dtypes and shapes.

Each model of `test_schemes` is here with one of its linear layers, as the header of its file has it, or as
its format makes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paged import CheckpointError
from paged.architectures.config import LLAMA_NAMES
from paged.architectures.schemes import UNUSED, quantization_of
from paged.checkpoints.formats.recognizers import recognizers_of
from paged.checkpoints.stored import StoredRows, StoredTensor
from paged.model.layers.linear import Linear
from paged.model.weights.loading import check_weights
from tests.architectures.test_schemes import ACCEPTED, Q_PROJ

I32, I64, U8, I8 = torch.int32, torch.int64, torch.uint8, torch.int8
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3 = torch.float8_e4m3fn
Tensors = dict[str, tuple[Any, ...]]  # dtype and shape


@dataclass(frozen=True, slots=True)
class Header(StoredTensor):
    """A tensor without numbers, but for the shape that weight_shape holds: all groups are the first."""

    values: tuple[int, int]

    def read(self, rows: slice = slice(None), out: Tensor | None = None) -> Tensor:  # noqa: ARG002
        assert len(self.shape) == 1, f"{self.name} is read for its header"
        return torch.tensor(self.values) if self.dtype == I64 else torch.zeros(self.shape, dtype=self.dtype)


def gptq(inputs: int, rows: int, *, bits: int = 4, groups: int, ordered: bool = True, **more: Any) -> Tensors:
    per_word = 32 // bits
    found = {
        "qweight": (I32, inputs // per_word, rows),
        "qzeros": (I32, groups, rows // per_word),
        "scales": (F16, groups, rows),
    }
    return found | ({"g_idx": (I32, inputs)} if ordered else {}) | more


def awq(inputs: int, rows: int, **more: Any) -> Tensors:
    words = rows // 8
    groups = inputs // 128
    return {
        "qweight": (I32, inputs, words),
        "qzeros": (I32, groups, words),
        "scales": (F16, groups, rows),
        **more,
    }


def packed(rows: int, words: int, groups: int) -> Tensors:
    return {
        "weight_packed": (I32, rows, words),
        "weight_scale": (BF16, rows, groups),
        "weight_shape": (I64, 2),
    }


FLOATS: Tensors = {"weight": (BF16, 4096, 4096)}
FP8 = {"weight": (E4M3, 4096, 4096)}
MODELOPT_NVFP4: Tensors = {
    "weight": (U8, 4096, 2048),
    "weight_scale": (E4M3, 4096, 256),
    "weight_scale_2": (F32,),
    "input_scale": (F32,),
}
HEADERS: dict[str, Tensors] = {
    "Qwen2.5 GPTQ-Int4": gptq(3584, 3584, groups=28, bias=(F16, 3584)),
    "Qwen2.5 GPTQ-Int8": gptq(3584, 3584, bits=8, groups=28, bias=(F16, 3584)),
    "Llama 2 GPTQ with act-order": gptq(4096, 4096, groups=32),
    "Llama 3.1 GPTQ-INT4": gptq(4096, 1024, groups=32),
    "GPTQModel 2": gptq(4096, 4096, groups=32),
    "GPTQ version 2": gptq(4096, 4096, groups=1),
    "Llama 3.1 AWQ-INT4": awq(4096, 4096),
    "Qwen2.5 AWQ": awq(3584, 512, bias=(F16, 512)),
    "Qwen3 AutoRound": gptq(4096, 4096, groups=32, ordered=False),
    "AutoRound in AWQ's layout": awq(4096, 4096),
    "AutoRound of 2024": gptq(4096, 4096, groups=32),
    "AutoRound without g_idx": gptq(4096, 4096, groups=32, ordered=False),
    "AutoRound for GPTQModel": gptq(4096, 4096, groups=32, ordered=False),
    "AutoRound with a pattern": gptq(4096, 4096, bits=8, groups=32, ordered=False),
    "AutoRound with layers in 8 bits": gptq(4096, 4096, bits=8, groups=32, ordered=False),
    "AutoRound with layers in floats": FLOATS,
    "Qwen 3.5 GPTQ-Int4": FLOATS,
    "GPTQModel with other sizes for a module": gptq(4096, 4096, bits=8, groups=32),
    "Llama 3.1 quantized.w4a16": packed(4096, 512, 32),
    "Llama 3.1 quantized.w8a16": packed(4096, 1024, 1),
    "Llama 3.1 quantized.w8a8": {"weight": (I8, 4096, 4096), "weight_scale": (BF16, 4096, 1)},
    "Gemma 3 w4a16": packed(2048, 320, 20),
    "Llama 3.1 FP8-dynamic": {**FP8, "weight_scale": (BF16, 4096, 1)},
    "Llama 3.1 FP8": {**FP8, "weight_scale": (BF16, 1), "input_scale": (BF16, 1)},
    "Qwen3 FP8-BLOCK": {**FP8, "weight_scale": (BF16, 32, 32)},
    "Qwen3 NVFP4": {
        "weight_packed": (U8, 4096, 2048),
        "weight_scale": (E4M3, 4096, 256),
        "weight_global_scale": (F32, 1),
        "input_global_scale": (F32, 1),
    },
    "Qwen3 MXFP4": {"weight_packed": (U8, 4096, 2048), "weight_scale": (U8, 4096, 128)},
    "Qwen3.8 NVFP4 with attention in FP8": {**FP8, "weight_scale": (BF16, 4096, 1)},
    "Llama 3.1 with fp8 for K and V alone": {**FLOATS, "q_scale": (BF16, 1)},
    "Qwen3 FP8": {**FP8, "weight_scale_inv": (BF16, 32, 32)},
    "DeepSeek V3": {"weight": (E4M3, 576, 7168), "weight_scale_inv": (F32, 5, 56)},
    "Ministral 3 FP8": {**FP8, "weight_scale_inv": (BF16,), "activation_scale": (BF16,)},
    "Llama 3 FP8 of AutoFP8": {**FP8, "weight_scale": (F32, 1), "input_scale": (F32, 1)},
    "nvidia Llama 3.1 FP8": {**FP8, "weight_scale": (F32,), "input_scale": (F32,), "k_scale": (F32,)},
    "nvidia Llama 3.1 NVFP4": MODELOPT_NVFP4,
    "ModelOpt, by channel": {**FP8, "weight_scale": (F32, 4096)},
    "nvidia mixed": MODELOPT_NVFP4,
    "nvidia mixed, not quantised there": FLOATS,
}
SIZES = {  # outputs and inputs, of those that are not square
    **dict.fromkeys(("Qwen2.5 GPTQ-Int4", "Qwen2.5 GPTQ-Int8"), (3584, 3584)),
    "Llama 3.1 GPTQ-INT4": (1024, 4096),
    "Qwen2.5 AWQ": (512, 3584),
    "Gemma 3 w4a16": (2048, 2560),
    "DeepSeek V3": (576, 7168),
}
OPTIONAL = {"g_idx", "weight_shape", "bias"}
CONFIGS = {name: config for name, config, _ in ACCEPTED}


def check(config: dict[str, Any], tensors: Tensors, size: tuple[int, int]) -> None:
    """Check the header of a layer of this many outputs and inputs."""
    sources = {
        f"{Q_PROJ}.{last}": Header(Path("model.safetensors"), f"{Q_PROJ}.{last}", dtype, shape, size)
        for last, (dtype, *shape) in tensors.items()
        if last not in UNUSED
    }
    rows, inputs = size
    with torch.device("meta"):
        layer = Linear(inputs, StoredRows({Q_PROJ: rows}), bias="bias" in tensors)
    recognizers = recognizers_of(quantization_of({"quantization_config": config}), LLAMA_NAMES)
    check_weights([layer], sources, LLAMA_NAMES, Path(), recognizers)


@pytest.mark.parametrize("name", CONFIGS)
def test_headers_of_public_models(name):
    """And what is missing, has another shape or another dtype is named."""
    config, tensors = CONFIGS[name], HEADERS[name]
    size = SIZES.get(name, (4096, 4096))
    check(config, tensors, size)
    for last in set(tensors) - set(UNUSED):
        dtype, *shape = tensors[last]
        wrong = [{last: (dtype, *([2] if not shape else [shape[0] + 1, *shape[1:]]))}]
        wrong += [{last: (torch.int16, *shape)}]
        for change in wrong:
            with pytest.raises(CheckpointError, match=rf"{last}"):
                check(config, tensors | change, size)
        if last not in OPTIONAL:
            rest = {key: value for key, value in tensors.items() if key != last}
            with pytest.raises(CheckpointError, match=rf"{last}"):
                check(config, rest, size)
