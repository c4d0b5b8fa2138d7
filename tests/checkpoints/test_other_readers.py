"""Readers of quantised weights agree with those of other projects, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints.test_formats import CASES, SIZES, loaded
from tests.support.quantised import E2M1

COMPRESSED = [
    *("packed-32", "packed-channel", "packed-tensor", "packed-zeros", "packed-8-bits", "packed-8-bits-zeros"),
    *("int8-channel", "int8-tensor", "int8-zeros", "float-channel", "float-tensor", "float-block"),
    *("mxfp4", "nvfp4", "nvfp4-power-of-two"),
]


@pytest.mark.parametrize("size", ["even", "odd"])
@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors_agrees(name, size, tmp_path):
    """In float32, as it otherwise rounds each product to the dtype of the scales."""
    library = pytest.importorskip("compressed_tensors.compressors", reason="compressed-tensors is missing")
    from compressed_tensors.quantization import QuantizationScheme

    config, write = CASES[name]
    (rows, _), inputs = SIZES[size]
    group = config["config_groups"]["group_0"]
    if inputs % group["weights"].get("group_size", 1):
        pytest.skip("compressed-tensors has no ragged groups")
    stored = write(rows, inputs, np.random.default_rng(1))
    form, _ = loaded(tmp_path, config, {"up_proj": stored})
    tensors = {
        key: x.float() if key == "weight_scale" and x.dtype in (torch.float16, torch.bfloat16) else x
        for key, x in stored.tensors.items()
    }
    compressor = library.BaseCompressor.get_value_from_registry(config["format"])
    theirs = compressor.decompress(tensors, QuantizationScheme(**group))["weight"]
    assert same(form.weight, theirs)


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(ours.to(theirs.dtype), theirs)


def test_transformers_dequantises_blocks_of_fp8_so(tmp_path):
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    for name, block in (("fp8-block", [128, 128]), ("fp8-block-bfloat16", [64, 32])):
        config, write = CASES[name]
        stored = write(150, 208, np.random.default_rng(1))
        form, _ = loaded(tmp_path, config, {"up_proj": stored})
        codes, scale = stored.tensors["weight"], stored.tensors["weight_scale_inv"]
        assert same(form.weight, _dequantize_fp8_weight(codes, scale, block, torch.float32))


def test_transformers_dequantises_mxfp4_so(tmp_path):
    from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

    assert FP4_VALUES[:8] == E2M1
    config, write = CASES["mxfp4"]
    stored = write(24, 96, np.random.default_rng(1))
    # It takes powers of two that are no subnormal numbers alone.
    stored.tensors["weight_scale"].clamp_(20, 230)
    form, _ = loaded(tmp_path, config, {"up_proj": stored})
    codes: Any = stored.tensors["weight_packed"].view(1, 24, 3, 16)
    theirs = convert_moe_packed_tensors(codes, stored.tensors["weight_scale"][None], dtype=torch.float32)
    assert same(form.weight, theirs[0].T)
