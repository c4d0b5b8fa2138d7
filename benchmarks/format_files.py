"""Checkpoints in quantised formats, with random codes: layers of a Llama, and next to no vocabulary."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from benchmarks.common import GGUF_NAMES, SHAPES
from paged.checkpoints.gguf.config import make_config
from paged.checkpoints.gguf.gguf_file import open_gguf
from paged.checkpoints.gguf.metadata import Metadata
from tests.support.gguf_files import KIND_OF, Stored, write_gguf
from tests.support.gguf_models import metadata_of
from tests.support.quantised import compressed, float_group, int_group

GROUP = 128
VOCAB_SIZE = 64


class Format(NamedTuple):
    """How a checkpoint stores a weight [outputs, inputs], and what config.json says of it."""

    bits: int  # of a code
    tensors: Callable[[int, int], dict[str, Tensor]]
    quantization: Mapping[str, Any] | None = None


def integers(*shape: int, most: int = 256, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Make random bytes, seen as numbers of a dtype: shape is theirs."""
    drawn = torch.randint(0, most, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)
    return drawn.view(dtype)


def scales(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """Make scales of the size that those of a model have."""
    return (torch.rand(shape) / 64 + 2**-8).to(dtype)


def _floats(n: int, k: int) -> dict[str, Tensor]:
    return {"weight": torch.randn(n, k).mul_(k**-0.5).bfloat16()}


def _gptq(n: int, k: int) -> dict[str, Tensor]:
    return {
        "qweight": integers(k // 8, n, dtype=torch.int32),
        "qzeros": integers(k // GROUP, n // 8, dtype=torch.int32),
        "scales": scales(k // GROUP, n),
        "g_idx": torch.arange(k, dtype=torch.int32) // GROUP,
    }


def _awq(n: int, k: int) -> dict[str, Tensor]:
    return {
        "qweight": integers(k, n // 8, dtype=torch.int32),
        "qzeros": integers(k // GROUP, n // 8, dtype=torch.int32),
        "scales": scales(k // GROUP, n),
    }


def _packed(n: int, k: int) -> dict[str, Tensor]:
    return {
        "weight_packed": integers(n, k // 8, dtype=torch.int32),
        "weight_scale": scales(n, k // GROUP, dtype=torch.bfloat16),
        "weight_shape": torch.tensor([n, k]),
    }


def _fp8(n: int, k: int) -> dict[str, Tensor]:
    return {
        "weight": torch.randn(n, k).to(torch.float8_e4m3fn),
        "weight_scale_inv": scales(-(-n // GROUP), k // GROUP, dtype=torch.float32),
    }


def _mxfp4(n: int, k: int) -> dict[str, Tensor]:
    return {"weight_packed": integers(n, k // 2), "weight_scale": integers(n, k // 32, most=8) + 118}


def _nvfp4(n: int, k: int) -> dict[str, Tensor]:
    return {
        "weight_packed": integers(n, k // 2),
        "weight_scale": integers(n, k // 16, most=127).view(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([1234.5]),
    }


def _gguf(name: str) -> Format:
    kind = KIND_OF[name]

    def blocks(n: int, k: int) -> dict[str, Tensor]:
        drawn = integers(n, k // kind.num_inputs, kind.num_bytes)
        for place in kind.factors:
            drawn[..., place : place + 2] = scales(*drawn.shape[:2], 1).view(torch.uint8)
        return {name: drawn}

    return Format(8 if name in ("Q6_K", "Q8_0") else 4, blocks)


FLOATS = Format(16, _floats)
FORMATS = {
    "GPTQ": Format(4, _gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}),
    "AWQ": Format(
        4,
        _awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
    ),
    "packed": Format(4, _packed, compressed("pack-quantized", int_group(4, GROUP))),
    **{name: _gguf(name) for name in ("Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q8_0")},
    "fp8": Format(8, _fp8, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [GROUP, GROUP]}),
    "MXFP4": Format(4, _mxfp4, compressed("mxfp4-pack-quantized", float_group(4, "group", group_size=32))),
    "NVFP4": Format(
        4, _nvfp4, compressed("nvfp4-pack-quantized", float_group(4, "tensor_group", group_size=16))
    ),
}


def config_of(model: str, num_layers: int) -> dict[str, Any]:
    """Return what config.json says of so many layers of a model of SHAPES."""
    sizes = {**SHAPES[model], "num_hidden_layers": num_layers, "vocab_size": VOCAB_SIZE}
    config: dict[str, Any] = AutoConfig.for_model("llama", dtype=torch.bfloat16, **sizes).to_dict()
    return {**config, "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}


def write_checkpoint(directory: Path, config: Mapping[str, Any], form: Format) -> int:
    """Write a checkpoint. Return the bytes of its tensors in codes."""
    torch.manual_seed(0)
    width = config["hidden_size"]
    floats = {
        "model.embed_tokens.weight": torch.randn(VOCAB_SIZE, width).bfloat16(),
        "lm_head.weight": torch.randn(VOCAB_SIZE, width).bfloat16(),
        "model.norm.weight": torch.ones(width).bfloat16(),
    }
    codes: dict[str, Tensor] = {}
    for i in range(config["num_hidden_layers"]):
        for name, shape in linears(config).items():
            tensors = form.tensors(*shape)
            codes |= {f"model.layers.{i}.{name}.{last}": x for last, x in tensors.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            floats[f"model.layers.{i}.{name}.weight"] = torch.ones(width).bfloat16()
    if next(iter(codes)).rpartition(".")[2] in KIND_OF:
        own = _write_gguf(directory, config, codes, floats)
    else:
        save_file({**codes, **floats}, directory / "model.safetensors")
        own = dict(config) | ({"quantization_config": form.quantization} if form.quantization else {})
    (directory / "config.json").write_text(json.dumps(own))
    return sum(x.nbytes for x in codes.values())


def linears(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the shapes of a layer's weights."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    narrow = width // config["num_attention_heads"] * config["num_key_value_heads"]
    return {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (narrow, width),
        "self_attn.v_proj": (narrow, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }


def _write_gguf(
    directory: Path, config: Mapping[str, Any], codes: Mapping[str, Tensor], floats: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Write a GGUF file and a link to it. Return its config."""
    names = {"model.embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm"}
    for i in range(config["num_hidden_layers"]):
        names |= {f"model.layers.{i}.{ours}": f"blk.{i}.{name}" for ours, name in GGUF_NAMES.items()}
    stored = {}
    for name, x in {**codes, **floats}.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight":
            stored[f"{names[module]}.weight"] = Stored("F32", x.shape, x.float().numpy().tobytes())
        else:
            shape = len(x), x.shape[1] * KIND_OF[kind].num_inputs
            stored[f"{names[module]}.weight"] = Stored(kind, shape, x.numpy().tobytes())
    path = directory / "file" / "model.gguf"
    path.parent.mkdir()
    write_gguf(path, metadata_of(AutoConfig.for_model(**config)), stored)
    (directory / path.name).symlink_to(path)
    with open_gguf(path) as gguf:
        return make_config(gguf, Metadata(path, gguf.metadata))


def layers_for(form: Format, num_layers: int) -> int:
    """Return how many layers in this format take about the bytes of so many in bfloat16."""
    return math.ceil(num_layers * FLOATS.bits / form.bits)
