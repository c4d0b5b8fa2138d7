"""Linear layers give the same products in every form of their weight, and hold it once."""

from __future__ import annotations

import pytest
import torch

from paged import LLMEngine, SamplingParams
from paged.checkpoints.stored import StoredRows
from paged.model.layers.linear import Linear
from paged.model.weights.forms import PlainWeight
from paged.model.weights.onednn import PackedWeight, can_pack
from tests.support.error_bounds import assert_product

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_packed_linear_agrees_with_plain(dtype, bias):
    if not can_pack(CPU, dtype):
        pytest.skip(f"this CPU or torch does not pack {dtype}")
    linear = Linear(96, StoredRows({"": 80}), bias=bias).to(dtype)
    for parameter in linear.parameters():
        parameter.data.normal_()
    weight, bias_ = linear.weight.clone(), linear.bias
    linear.take_form(PackedWeight(weight))
    assert not hasattr(linear, "weight")
    for num_rows in (1, 3, 17, 200):
        x = torch.randn(num_rows, 96, dtype=dtype)
        assert_product(linear(x), x, weight, bias_)


def test_without_packing_the_engine_uses_plain_weights(monkeypatch):
    params = SamplingParams(temperature=0, max_tokens=8)

    def tokens() -> list[int]:
        engine = LLMEngine("demo", dtype="float32", num_blocks=8, attention_backend="torch")
        forms.append(type(engine.runner.model.layers[0].mlp.down.form))
        return engine.generate("import os", params, use_tqdm=False)[0].outputs[0].token_ids

    forms: list[type] = []
    first = tokens()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert tokens() == first
    assert forms[1] is PlainWeight


@pytest.mark.parametrize("error", [AttributeError, RuntimeError])
def test_torch_without_packing_is_detected(monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(PackedWeight, "__call__", fail)
    assert not can_pack(CPU, torch.float32)
    assert not can_pack(CPU, torch.float16)
    assert not can_pack(torch.device("cuda"), torch.float32)
