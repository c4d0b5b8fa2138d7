"""Weights in codes for a GPU's kernels, which run in Triton's interpreter here: forms, and the engine."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paged import SamplingParams
from paged.checkpoints.coded import CodedWeight, Factors
from paged.checkpoints.stored import Layout, StoredFormat, StoredPart
from paged.kernels.backend import load_kernels
from paged.model.layers.linear import Embedding, Linear
from paged.model.weights import gpu_codes
from paged.model.weights.coded_forms import CodedProduct
from paged.model.weights.forms import EachExpert, PlainWeight, StackedExperts
from paged.model.weights.gpu_codes import CodedExperts, PackedCodesWeight, coded_form, quantized_form
from paged.model.weights.quantization import Int8Weight, int4_codes
from paged.runner import load
from tests.support.checkpoints import checkpoint, new_engine, ragged_prompts
from tests.support.coded_weights import coded_weight, random_coded
from tests.support.error_bounds import assert_product
from tests.support.kernel_cases import DEVICE

GROUP = 16


@dataclass(frozen=True)
class CodedFormat(StoredFormat):
    """Codes of 4 bits in 32, and a scale for each group of inputs, whose order is reversed."""

    title = "codes"

    def layouts(self, part: StoredPart) -> dict[str, Layout]:
        codes = Layout((part.num_inputs,), torch.uint8, stored_dtypes=(torch.int32,))
        return {"codes": codes, "scales": Layout((part.num_inputs // GROUP,), torch.float32)}

    def weight(self, tensors: Mapping[str, Tensor]) -> CodedWeight:
        order = torch.arange(tensors["codes"].shape[1]).flip(0)
        table = tuple(map(float, range(-8, 8)))
        return CodedWeight(tensors["codes"], Factors(tensors["scales"]), table, order)


def coded_format(part: StoredPart) -> CodedFormat | None:
    return CodedFormat() if part.get("codes") else None


def in_codes(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return random tensors of CodedFormat and the floats that they stand for."""
    codes = torch.randint(0, 16, weight.shape, dtype=torch.int32)
    scales = torch.randn(len(weight), weight.shape[1] // GROUP) / 64
    coded = CodedFormat().weight({"codes": codes.byte(), "scales": scales})
    return {"codes": codes, "scales": scales}, coded.floats()


def test_engine_gives_the_tokens_of_the_floats(tmp_path, monkeypatch):
    """A tied embedding, QKV with biases, and MLPs whose gates are in codes and whose ups are floats."""
    monkeypatch.setattr(load, "_recognizers_of", lambda *_: [coded_format])
    source = checkpoint("llama-tied-bias")
    of_floats, of_codes = {}, {}
    for key, tensor in load_file(source / "model.safetensors").items():
        of_floats[key] = of_codes[key] = tensor
        if tensor.dim() == 2 and "up_proj" not in key and "lm_head" not in key:
            parts, of_floats[key] = in_codes(tensor)
            del of_codes[key]
            of_codes |= {f"{key.removesuffix('weight')}{part}": x for part, x in parts.items()}
    found = []
    for tensors in (of_floats, of_codes):
        directory = tmp_path / str(len(found))
        shutil.copytree(source, directory)
        save_file(tensors, directory / "model.safetensors")
        engine = new_engine(directory, attention_backend="triton", device="auto")
        found.append(greedy(engine))
    assert found[0] == found[1]
    forms = [m.form for m in engine.runner.model.modules() if isinstance(m, (Linear, Embedding))]
    assert sum(isinstance(form, PackedCodesWeight) for form in forms) == 2 * 3 + 2


def greedy(engine) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    return [o.outputs[0].token_ids for o in engine.generate(ragged_prompts([2, 4]), params, use_tqdm=False)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_weights_are_quantised_as_on_a_cpu(dtype):
    """In float16 too, where the least scales would be 0."""
    weight = (torch.randn(9, 64) * torch.logspace(-6, 2, 9)[:, None]).to(dtype)
    weight = weight.to(DEVICE)
    weight[3] = 0
    indices = torch.arange(9, device=DEVICE)
    int8 = quantized_form("int8", weight, "head")
    assert torch.equal(int8.rows(indices), Int8Weight(weight.float()).dequantized().to(dtype))
    codes, scale, zero = int4_codes(weight.view(9, 2, 32))
    int4 = quantized_form("int4", weight, "layer")
    floats = scale.float()[..., None] * (codes.float() - 8) + zero.float()[..., None]
    assert torch.equal(int4.rows(indices), floats.flatten(1).to(dtype))
    x = torch.randn(3, 64, device=DEVICE).to(dtype)
    bias = torch.randn(9, device=DEVICE).to(dtype)
    assert_product(int4(x, bias), x, floats.flatten(1).to(dtype), bias)
    assert int4(x, bias).dtype == dtype
    assert int8(x, None).dtype == torch.float32


@pytest.mark.parametrize("make", [PackedCodesWeight, CodedProduct])
def test_an_order_of_inputs(make):
    """Gather x by it, and give rows in the order of the model."""
    weight = coded_weight("gptq", 20, 96, 32)
    factors = Factors(*(x if x is None else x.to(DEVICE) for x in weight.factors))
    weight = replace(weight, stored=weight.codes.to(DEVICE), factors=factors, order=torch.randperm(96))
    form, x = make(weight, "embedding", dtype=torch.float32), torch.randn(9, 96, device=DEVICE)
    assert_product(form(x, None), x, weight.floats())
    indices = torch.tensor([19, 3], device=DEVICE)
    assert torch.equal(form.rows(indices), weight.floats()[indices])


def test_scales_with_a_divisor_are_widened():
    """No kernel divides them: both forms have the bits of the quotients."""
    weight = random_coded("e2m1", "float8 and a divisor", 8, 64, 16)
    indices = torch.arange(8)
    assert torch.equal(CodedProduct(weight, "layer", dtype=torch.float32).rows(indices), weight.floats())
    assert torch.equal(on_device(weight).rows(indices.to(DEVICE)).cpu(), weight.floats())


def test_experts_are_multiplied_together():
    """With the bits of each one's product, and as one after the other where they are not alike."""
    kernels = load_kernels("triton")
    forms = [quantized_form("int8", torch.randn(64, 32, device=DEVICE), "layer") for _ in range(4)]
    biases = [torch.randn(64, device=DEVICE) for _ in forms]
    alone = EachExpert(forms, biases, kernels)
    offsets = torch.tensor([0, 2, 2, 20, 21], dtype=torch.int32, device=DEVICE)
    sources = torch.randint(0, 5, (21,), device=DEVICE)
    x = torch.randn(5, 32, device=DEVICE)
    expected = alone(x, offsets, sources)
    together = forms[0].of_experts(forms, biases, kernels)
    assert isinstance(together, CodedExperts)
    assert torch.equal(together(x, offsets, sources), expected)
    assert torch.equal(alone(x, offsets, sources), expected)  # its forms are views of them
    others = [*forms[1:], quantized_form("int4", torch.randn(64, 32, device=DEVICE), "layer")]
    assert isinstance(others[0].of_experts(others, biases, kernels), EachExpert)
    plain = [PlainWeight(torch.randn(64, 32, device=DEVICE)) for _ in forms]
    expected = EachExpert(plain, biases, kernels)(x, offsets, sources)
    stacked = plain[0].of_experts(plain, biases, kernels)
    assert isinstance(stacked, StackedExperts)
    torch.testing.assert_close(stacked(x, offsets, sources), expected)


def test_experts_with_orders_of_inputs_are_multiplied_together(monkeypatch):
    """With the bits of each one's product, part by part; no offset is asked of the device."""
    monkeypatch.setattr(gpu_codes, "_PART_ELEMENTS", 6 * 32)
    weights = [coded_weight("gptq", 64, 32, 16) for _ in range(4)]
    weights = [each if i == 2 else replace(each, order=torch.randperm(32)) for i, each in enumerate(weights)]
    forms = [on_device(each) for each in weights]
    kernels = load_kernels("triton")
    alone = EachExpert(forms, None, kernels)
    offsets = torch.tensor([0, 2, 2, 20, 21], dtype=torch.int32, device=DEVICE)
    sources = torch.randint(0, 5, (21,), device=DEVICE)
    x = torch.randn(5, 32, device=DEVICE)
    expected = alone(x, offsets, sources)
    together = forms[1].of_experts(forms, None, kernels)
    assert isinstance(together, CodedExperts)
    assert torch.equal(together(x, offsets, sources), expected)
    assert torch.equal(together(x[sources], offsets, None), expected)
    given = (each.to("meta") for each in (x, together.orders, offsets, sources))
    assert gpu_codes._in_stored_order(*given).shape == (21, 32)  # meta tensors have no values


def test_engine_routes_as_torch_does():
    """gpt-oss's experts: biases, and gates and ups that are clamped."""
    directory = checkpoint("gpt_oss")
    found = [greedy(new_engine(directory, attention_backend=name)) for name in ("torch", "triton")]
    assert found[0] == found[1]


def on_device(weight: CodedWeight) -> PackedCodesWeight | CodedProduct:
    factors = Factors(*(None if x is None else x.to(DEVICE) for x in weight.factors))
    moved = replace(weight, stored=weight.codes.to(DEVICE), factors=factors)
    form = coded_form(moved, "layer", dtype=torch.float32)
    assert isinstance(form, PackedCodesWeight)
    return form


def test_what_no_kernel_takes_is_left_to_torch():
    weight = coded_weight("gptq", 8, 48, 24)
    assert isinstance(coded_form(weight, "layer", dtype=torch.float32), CodedProduct)
    weight = CodedWeight(weight.codes, weight.factors, tuple(i / 7 for i in range(16)))
    assert isinstance(coded_form(weight, "layer", dtype=torch.float32), CodedProduct)
    whole = coded_weight("gptq", 8, 24, 24)
    assert isinstance(coded_form(whole, "layer", dtype=torch.float32), PackedCodesWeight)
