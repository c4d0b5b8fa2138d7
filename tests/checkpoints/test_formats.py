"""Weights of quantised checkpoints are what their formats define, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from paged.architectures.config import LLAMA_NAMES
from paged.architectures.schemes import quantization_of
from paged.checkpoints import stored as sources
from paged.checkpoints.coded import CodedWeight
from paged.checkpoints.formats.recognizers import recognizers_of
from paged.checkpoints.safetensors_file import SafetensorsFile
from paged.checkpoints.stored import StoredRows
from paged.model.layers.linear import Linear
from paged.model.weights.choice import Forms
from paged.model.weights.forms import PlainWeight
from paged.model.weights.loading import Loader, check_weights
from tests.support.quantised import (
    Sizes,
    Stored,
    Writer,
    awq,
    compressed,
    float_group,
    fp8,
    gptq,
    int_group,
    integers,
    mxfp4,
    nvfp4,
    packed,
)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")


def gptq_config(group: int, bits: int = 4, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, **more}


def awq_config(group: int) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}


def fp8_config(block: list[int] | None) -> dict[str, Any]:
    return {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": block}


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "exclude_modules": ["lm_head"], **more}


def auto_round(packing: str, group: int = 32) -> dict[str, Any]:
    return {
        "quant_method": "auto-round",
        "packing_format": packing,
        "bits": 4,
        "group_size": group,
        "data_type": "int",
        "sym": True,
    }


CASES: dict[str, tuple[dict[str, Any], Writer]] = {
    "gptq-32": (gptq_config(32), gptq(Sizes())),
    "gptq-64": (gptq_config(64), gptq(Sizes(64))),
    "gptq-128": (gptq_config(128), gptq(Sizes(128))),
    "gptq-whole": (gptq_config(-1), gptq(Sizes(-1))),
    "gptq-v2": (gptq_config(32, checkpoint_format="gptq_v2"), gptq(Sizes(), plus_one=False)),
    "gptq-symmetric": (gptq_config(64, sym=True), gptq(Sizes(64, dtype=BF16), symmetric=True)),
    "gptq-act-order": (gptq_config(32, desc_act=True), gptq(Sizes(), act_order=True)),
    "gptq-8-bits": (gptq_config(64, 8), gptq(Sizes(64, 8, spread=128))),
    "gptq-8-bits-symmetric": (gptq_config(64, 8), gptq(Sizes(64, 8), symmetric=True)),
    "gptq-float32": (gptq_config(64), gptq(Sizes(64, dtype=F32))),
    "gptq-8-bits-float32": (gptq_config(64, 8), gptq(Sizes(64, 8, dtype=F32, spread=128))),
    "awq-32": (awq_config(32), awq(Sizes())),
    "awq-64": (awq_config(64), awq(Sizes(64))),
    "awq-128": (awq_config(128), awq(Sizes(128, dtype=BF16))),
    "awq-whole": (awq_config(-1), awq(Sizes(-1))),
    "auto-round-gptq": (auto_round("auto_round:auto_gptq"), gptq(Sizes())),
    "auto-round-awq": (auto_round("auto_round:auto_awq"), awq(Sizes())),
    "auto-round-gptqmodel": (auto_round("auto_round:gptqmodel"), gptq(Sizes(), plus_one=False)),
    "auto-round-own": (auto_round("auto_round"), gptq(Sizes(), plus_one=False)),
    "packed-32": (compressed("pack-quantized", int_group(4, 32)), packed(Sizes(dtype=BF16))),
    "packed-128": (compressed("pack-quantized", int_group(4, 128)), packed(Sizes(128))),
    "packed-channel": (compressed("pack-quantized", int_group(4, -1)), packed(Sizes(-1))),
    "packed-tensor": (
        compressed("pack-quantized", int_group(4, None)),
        packed(Sizes(-1), per_tensor=True),
    ),
    "packed-zeros": (
        compressed("pack-quantized", int_group(4, 64, symmetric=False)),
        packed(Sizes(64, dtype=BF16), zeros="packed"),
    ),
    "packed-plain-zeros": (
        compressed("pack-quantized", int_group(4, 64, symmetric=False)),
        packed(Sizes(64), zeros="plain"),
    ),
    "packed-act-order": (
        compressed("pack-quantized", int_group(4, 32, symmetric=False, actorder="group")),
        packed(Sizes(), zeros="packed", act_order=True),
    ),
    "packed-8-bits": (compressed("pack-quantized", int_group(8, 64)), packed(Sizes(64, 8))),
    "packed-8-bits-zeros": (
        compressed("pack-quantized", int_group(8, 64, symmetric=False)),
        packed(Sizes(64, 8, spread=128), zeros="packed"),
    ),
    "int8-channel": (compressed("int-quantized", int_group(8, -1)), integers(Sizes(dtype=BF16))),
    "int8-tensor": (
        compressed("int-quantized", int_group(8, None)),
        integers(Sizes(dtype=F32), shape="tensor"),
    ),
    "int8-group": (compressed("int-quantized", int_group(8, 32)), integers(Sizes(), shape="group")),
    "int8-zeros": (
        compressed("int-quantized", int_group(8, -1, symmetric=False)),
        integers(Sizes(dtype=BF16), zeros=True),
    ),
    "int8-zeros-float32": (
        compressed("naive-quantized", int_group(8, -1, symmetric=False)),
        integers(Sizes(dtype=F32), zeros=True),
    ),
    "fp8-block": (fp8_config([128, 128]), fp8((128, 128), name="weight_scale_inv")),
    "fp8-block-bfloat16": (fp8_config([64, 32]), fp8((64, 32), name="weight_scale_inv", dtype=BF16)),
    "fp8-block-ue8m0": (
        fp8_config([128, 128]),
        fp8((128, 128), name="weight_scale_inv", dtype=torch.float8_e8m0fnu),
    ),
    "fp8-tensor": (fp8_config(None), fp8("scalar", name="weight_scale_inv", dtype=BF16)),
    "fp8-old": ({"quant_method": "fp8", "ignored_layers": ["lm_head"]}, fp8("tensor")),
    "float-channel": (compressed("float-quantized", float_group(8, "channel")), fp8("channel", dtype=BF16)),
    "float-tensor": (compressed("naive-quantized", float_group(8, "tensor")), fp8("tensor")),
    "float-block": (
        compressed("float-quantized", float_group(8, "block", block_structure=[128, 128])),
        fp8((128, 128), dtype=BF16),
    ),
    "mxfp4": (compressed("mxfp4-pack-quantized", float_group(4, "group", group_size=32)), mxfp4()),
    "mxfp4-e8m0": (
        compressed("mxfp4-pack-quantized", float_group(4, "group", group_size=32)),
        mxfp4(dtype=torch.float8_e8m0fnu),
    ),
    "nvfp4": (
        compressed("nvfp4-pack-quantized", float_group(4, "tensor_group", group_size=16)),
        nvfp4(1234.5, modelopt=False),
    ),
    "nvfp4-power-of-two": (
        compressed("nvfp4-pack-quantized", float_group(4, "tensor_group", group_size=16)),
        nvfp4(2048.0, modelopt=False),
    ),
    "modelopt-fp8": (modelopt("FP8"), fp8("scalar")),
    "modelopt-channel": (modelopt("FP8_PER_CHANNEL_PER_TOKEN"), fp8("outputs")),
    "modelopt-nvfp4": (modelopt("NVFP4", group_size=16), nvfp4(1 / 1234.5, modelopt=True)),
}
# Rows of two parts, and inputs: one block and several; ragged in every group and block.
SIZES = {"even": ((136, 8), 256), "ragged": ((16, 32), 208), "odd": ((3, 13), 104), "small": ((8, 8), 8)}


def loaded(directory, config, parts) -> Any:
    """Load one linear layer of parts, {name: tensors}, from a file. Return its weight."""
    tensors = {
        f"model.layers.0.mlp.{part}.{last}": x
        for part, own in parts.items()
        for last, x in own.tensors.items()
    }
    save_file(tensors, directory / "model.safetensors")
    found = []
    forms = Forms(
        {"layer": PlainWeight}, lambda weight, _: found.append(weight) or PlainWeight(weight.floats())
    )
    recognizers = recognizers_of(quantization_of({"quantization_config": config}), LLAMA_NAMES)
    shapes = {part: tuple(own.floats.shape) for part, own in parts.items()}
    with SafetensorsFile(directory / "model.safetensors") as file, torch.device("meta"):
        rows = StoredRows({f"model.layers.0.mlp.{part}": shape[0] for part, shape in shapes.items()})
        linear = Linear(next(iter(shapes.values()))[1], rows, bias=False)
        check_weights([linear], file.tensors, LLAMA_NAMES, directory, recognizers)
        with torch.device("cpu"):
            linear.load(Loader(file.tensors, forms, CPU, recognizers))
    return linear.form, found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_weight_is_what_its_format_defines(name, size, tmp_path):
    config, write = CASES[name]
    counts, inputs = SIZES[size]
    random = np.random.default_rng(0)
    parts = {
        part: write(count, inputs, random)
        for part, count in zip(("gate_proj", "up_proj"), counts, strict=True)
    }
    form, weights = loaded(tmp_path, config, parts)
    forms = getattr(form, "forms", [form])
    floats = torch.cat([each.weight for each in forms])
    expected = torch.cat([part.floats for part in parts.values()])
    assert torch.equal(floats.float().view(torch.int32), expected.view(torch.int32)), (
        "every bit, signs of zero too"
    )
    for weight in weights:
        check_seam(weight)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_zero_of_gptq_is_not_wrapped(bits, tmp_path):
    """A stored 15 of 4 bits is 16, and a stored 255 of 8 bits 256."""
    per_word = 32 // bits
    tensors = {
        "qweight": torch.zeros(32 // per_word, 8, dtype=torch.int32),
        "qzeros": torch.full((1, 8 // per_word), -1, dtype=torch.int32),
        "scales": torch.full((1, 8), 0.5, dtype=F16),
    }
    expected = torch.full((8, 32), -0.5 * 2**bits)
    form, _ = loaded(tmp_path, gptq_config(32, bits), {"up_proj": Stored(tensors, expected)})
    assert torch.equal(form.weight, expected)


def check_seam(weight: CodedWeight) -> None:
    """Assert what every form may assume of codes and factors."""
    scale, zero, offset, scale_unit, _, divisor = weight.factors
    rows, inputs = weight.codes.shape
    assert inputs % scale.shape[1] == 0
    assert len(scale) == rows
    assert (weight.codes.dtype == torch.uint8) == (weight.table is not None)
    if weight.table is not None:
        assert len(weight.table) == 16
        assert int(weight.codes.max()) < 16
    if zero is not None:
        assert zero.dtype in (torch.int8, torch.int16)
        assert zero.shape == scale.shape
        assert scale.dtype in (BF16, F16)
    assert offset is None
    for unit in (scale_unit, divisor):
        assert unit is None or unit.shape == (rows, 1)


def test_words_of_awq_are_read_in_parts_of_whole_words(tmp_path, monkeypatch):
    """Eight inputs become one word, so a part may not end between them."""
    monkeypatch.setattr(sources, "TENSOR_PART_BYTES", 64)
    test_weight_is_what_its_format_defines("awq-32", "ragged", tmp_path)
