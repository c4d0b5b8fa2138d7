"""Linears by the CPU kernels: their products, and that they are batch-invariant."""

from __future__ import annotations

import copy
import ctypes
import mmap
import sys
from itertools import product

import numpy as np
import pytest
import torch

from paged import ConfigError, SamplingParams
from paged.checkpoints.stored import StoredRows
from paged.device import devices
from paged.kernels.cpu import backend as numba_kernels
from paged.kernels.cpu.formats import BFLOAT16_PAIRS
from paged.kernels.cpu.linear import linear as numba_linear
from paged.kernels.cpu.linear import pack_bf12 as numba_bf12
from paged.kernels.cpu.linear.amx_linear import TILES, is_read_apart, panels_of_unit
from paged.kernels.cpu.linear.linear import LINEAR
from paged.kernels.cpu.rows.take_rows import widen_rows
from paged.kernels.cpu.target import HAS_DOT, HAS_LOOKUP, HAS_TILES, LANES
from paged.model.layers.linear import Linear
from paged.model.weights import panels
from paged.model.weights.coded_panels import PANEL_FORMS, PanelInt4Weight, PanelInt8Weight
from paged.model.weights.panels import PanelWeight, Table
from paged.model.weights.quantization import Int8Weight, int4_codes
from tests.support.checkpoints import (
    CONFIGS,
    assert_all_free,
    checkpoint,
    new_engine,
    ragged_prompts,
    random_model,
)

# Outputs and inputs: fewer than a panel, no multiple of a panel, several parts of the depth.
SHAPES = [(5, 32), (33, 96), (100, 288), (67, 2048)]
needs_dot = pytest.mark.skipif(
    not HAS_DOT, reason="this CPU does not multiply pairs of bfloat16 (AVX512-BF16)"
)
forms = pytest.mark.parametrize("form", PANEL_FORMS.values(), ids=lambda form: form.__name__)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


@pytest.fixture(params=["vectors", "vectors of bf12", "tiles", "tiles of bf12"])
def unit(request, monkeypatch):
    """Choose vectors or AMX tiles, if the CPU has both, and whether bfloat16 weights are in bf12."""
    if request.param.endswith("bf12"):
        given = request.node.callspec.params
        if given.get("form", PanelWeight) is not PanelWeight or given.get("quantization"):
            pytest.skip("weights in codes are never in bf12: the same test again")
        monkeypatch.setattr(numba_bf12, "_LEAST_WEIGHTS", 0)
    if request.param.startswith("vectors"):
        monkeypatch.setattr(numba_linear, "HAS_TILES", False)
    elif not HAS_TILES:
        pytest.skip("this CPU has no tiles of bfloat16 (AMX), or this process may not use them")
    return request.param.split()[0]


def dequantized(form: type[PanelWeight], weight: torch.Tensor) -> torch.Tensor:
    """Return the weight that the form stores, in float64."""
    if form is PanelInt8Weight:
        plain = Int8Weight(weight)
        return plain.codes.double() * plain.scale.double()[:, None]
    if form is PanelInt4Weight:
        codes, scales, zeros = int4_codes(weight.view(len(weight), -1, 32))
        return ((codes.double() - 8) * scales.double()[..., None] + zeros.double()[..., None]).flatten(1)
    return weight.double()


@forms
@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_and_bits(form, dtype, shape, unit):
    num_outputs, num_inputs = shape
    linear = Linear(num_inputs, StoredRows({"": num_outputs}), bias=num_outputs != 33).to(dtype)
    for parameter in linear.parameters():
        parameter.data.normal_()
        if unit == "tiles":
            parameter.data.copy_(parameter.bfloat16())
    weight = dequantized(form, linear.weight.detach())
    linear.take_form(form(linear.weight.detach()))
    assert not hasattr(linear, "weight")
    bias = 0 if linear.bias is None else linear.bias.double()
    x = torch.randn(300, num_inputs, dtype=dtype)  # more than a unit of rows
    out = linear(x)
    is_wide = dtype == torch.float16 or (dtype == torch.float32 and form is PanelInt4Weight)
    assert linear.form.panels.in_pairs == (
        HAS_DOT and dtype == torch.bfloat16 if unit == "vectors" else not is_wide
    )
    size, eps = x.double().abs() @ weight.abs().T + 1, torch.finfo(dtype).eps
    expected = x.double() @ weight.T + bias
    # Only int4 weights are rounded: to bfloat16, if they are multiplied in that.
    is_rounded = form is PanelInt4Weight and dtype == torch.bfloat16
    allowed = eps * expected.abs() + (eps / 2 if is_rounded else 1e-6) * size
    assert ((out.double() - expected).abs() <= allowed).all()
    for first, end in ((0, 1), (1, 3), (3, 8), (60, 70), (100, 240), (299, 300)):
        assert torch.equal(linear(x[first:end]), out[first:end])


@pytest.mark.skipif(not HAS_LOOKUP, reason="this CPU looks no vectors of bytes up (AVX2, AVX512BW)")
@pytest.mark.parametrize("unit", ["vectors of bf12", "tiles of bf12"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gated", [False, True], ids="gated={}".format)
@pytest.mark.usefixtures("unit")
def test_bf12_is_lossless(dtype, gated, monkeypatch):
    """Encode all kinds of numbers and a row of exceptions; leave random bits and small weights alone."""
    chance = torch.randint(-(2**15), 2**15, (2, 150, 640), dtype=torch.int16).view(torch.bfloat16)
    weight = torch.randn(150, 640).bfloat16()
    weight[5], weight[40:, 0], weight[:, -1] = chance[0, 5], float("-inf"), -0.0
    weight[70:72, 32:64], weight[149, -2:] = 0.0, chance[1, 149, -2:]
    whole = numba_linear.pack(weight, pairs=numba_linear.can_pair(dtype, 640), gated=gated)
    encoded = numba_bf12.pack_bf12(whole)
    assert encoded.in_pairs == whole.in_pairs
    assert encoded.weight.nbytes * 16 == whole.weight.nbytes * (12.25 if LANES == 16 else 12.5)
    assert 300 < len(encoded.scales) < 700
    for num_rows in (1, 2, 4, 6, 17, 33, 70, 200):
        x = torch.randn(num_rows, 640).to(dtype)
        expected, out = (numba_linear.linear(x, panels, None) for panels in (whole, encoded))
        assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
    weight[weight.isnan()] = 3.0  # a NaN that is widened may be another one
    indices, form = torch.tensor([149, 5, 0, 5, 71]), PanelWeight(weight.to(dtype), gated=gated)
    assert form.panels.weight.dtype == torch.int16
    assert gated or torch.equal(
        form.rows(indices).bfloat16().view(torch.int16), weight[indices].view(torch.int16)
    )
    assert PanelWeight(chance[0]).panels.weight.dtype == torch.bfloat16
    monkeypatch.setattr(numba_bf12, "_LEAST_WEIGHTS", 2**19)
    assert PanelWeight(weight).panels.weight.dtype == torch.bfloat16
    assert PanelWeight(torch.randn(1024, 512).bfloat16()).panels.weight.dtype == torch.int16


@forms
@pytest.mark.parametrize("unit", ["tiles", "tiles of bf12"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gated", [False, True], ids="gated={}".format)
@pytest.mark.usefixtures("unit")
def test_units_of_several_panels_have_the_bits_of_one(form, dtype, gated, monkeypatch):
    """Multiply two panels at a time, adjacent or apart, of an odd number, with a last unit of few rows.

    One thread does all units, so it switches from two panels to one and back.
    """
    before = torch.get_num_threads()
    panels = form(torch.randn(2 * 70, 608).bfloat16().to(dtype), gated=gated)
    monkeypatch.setattr(numba_linear, "rows_of_unit", lambda *_: 48)
    try:
        torch.set_num_threads(1)
        for num_rows in (1, 16, 17, 40, 97, 300):
            x, out = torch.randn(num_rows, 608).to(dtype), []
            for number, apart in product((1, 2, 4, 8), (False, True)):
                monkeypatch.setattr(numba_linear, "panels_of_unit", lambda *_, number=number: number)
                monkeypatch.setattr(numba_linear, "is_read_apart", lambda *_, apart=apart: apart)
                out.append(panels(x, None))
            assert all(torch.equal(out[0], other) for other in out[1:])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("shape", "apart"),
    [
        ((16, 64, 2048, 1), True),
        ((17, 64, 2048, 1), False),
        ((6, 64, 2048, 3), False),
        ((1, 9, 768, 1), False),
    ],
    ids=str,
)
def test_few_rows_read_a_large_weight_at_two_places(shape, apart):
    """shape: rows, panels, inputs, and the parts that a row is split into."""
    assert is_read_apart(*shape) == apart


@pytest.mark.parametrize(("num_panels", "number"), [(320, 8), (32, 4), (16, 2), (8, 1)])
def test_a_thread_that_takes_two_units_at_once_leaves_some_for_others(num_panels, number):
    """Take fewer panels where threads would otherwise have no unit."""
    assert panels_of_unit(256, num_panels, 2048, 256, 1, BFLOAT16_PAIRS, 4) == number


@dtypes
@pytest.mark.parametrize("num_inputs", [33, 48], ids="num_inputs={}".format)
def test_numbers_of_inputs_that_make_no_pairs_or_fill_no_tile(dtype, num_inputs):
    weight, x = torch.randn(40, num_inputs).bfloat16().to(dtype), torch.randn(9, num_inputs).to(dtype)
    form = PanelWeight(weight)
    assert form.panels.in_pairs == (HAS_DOT and dtype == torch.bfloat16 and num_inputs % 2 == 0)
    out = form(x, None)
    torch.testing.assert_close(
        out.double(), x.double() @ weight.double().T, rtol=torch.finfo(dtype).eps, atol=1e-4
    )


@forms
@needs_dot
def test_weights_of_bfloat16_are_in_pairs(form, monkeypatch):
    weight = torch.randn(40, 64)
    assert form(weight.bfloat16()).panels.in_pairs
    assert form(weight).panels.in_pairs == (HAS_TILES and form is PanelInt8Weight)
    monkeypatch.setattr(numba_linear, "HAS_TILES", False)
    assert not form(weight).panels.in_pairs
    with pytest.raises(ValueError, match=r"x must be one of torch\.bfloat16, got torch.float32"):
        form(weight.bfloat16())(torch.randn(2, 64), None)


@dtypes
@pytest.mark.usefixtures("unit")
def test_rows_that_are_not_side_by_side(dtype):
    weight, x = torch.randn(40, 64).bfloat16().to(dtype), torch.randn(7, 130).to(dtype)
    form = PanelWeight(weight)
    assert torch.equal(form(x[:, 1:65], None), form(x[:, 1:65].clone(), None))
    assert torch.equal(form(x[:, ::2][:, :64], None), form(x[:, ::2][:, :64].clone(), None))


@pytest.mark.parametrize("num_rows", [1, 70], ids="num_rows={}".format)
def test_products_side_by_side(num_rows):
    """A product stores into the columns that it is given, and into no others."""
    x, weight = torch.randn(num_rows, 64), torch.randn(LANES + 5, 64)
    packed = numba_linear.pack(weight)
    out = torch.zeros(num_rows, 100)
    part = out[:, 7 : 7 + len(weight)]
    assert numba_linear.linear(x, packed, None, out=part) is part
    assert torch.equal(part, numba_linear.linear(x, packed, None))
    assert not out[:, :7].any()
    assert not out[:, 7 + len(weight) :].any()
    apart = torch.zeros(num_rows, 2 * len(weight))[:, ::2]
    for wrong in (part[:, 1:], part.double(), apart):
        with pytest.raises(ValueError, match="out"):
            numba_linear.linear(x, packed, None, out=wrong)


@forms
@dtypes
@pytest.mark.parametrize("size", [5, 16, 100], ids="size={}".format)
def test_gates_are_applied(form, dtype, size, unit):
    """Compare with the product and the activation one after the other: float32 is bitwise equal."""
    linear = Linear(64, StoredRows({"": 2 * size}), bias=size != 16).to(dtype)
    for parameter in linear.parameters():
        parameter.data.normal_()
        if unit == "tiles":
            parameter.data.copy_(parameter.bfloat16())
    plain, x = copy.deepcopy(linear), torch.randn(75, 64, dtype=dtype)
    linear.take_form(form(linear.weight.detach(), gated=True))
    plain.take_form(form(plain.weight.detach(), out_dtype=torch.float32))
    assert linear.form.gated
    assert not plain.form.gated
    out, expected = linear(x), numba_kernels.silu_and_mul(plain(x))
    assert out.shape == (75, size)
    assert torch.equal(out, expected.to(dtype))
    assert torch.equal(linear(x[7:9]), out[7:9])


@dtypes
@pytest.mark.usefixtures("unit")
def test_a_head_gives_float32(dtype):
    """Check that logits in float32 are not rounded on the way."""
    weight, x = torch.randn(40, 64).bfloat16().to(dtype), torch.randn(7, 64).to(dtype)
    out = PanelWeight(weight, out_dtype=torch.float32)(x, None)
    assert out.dtype == torch.float32
    assert torch.equal(out.to(dtype), PanelWeight(weight)(x, None))
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=1e-4, atol=1e-4)


def test_the_default_dtype_changes_nothing():
    weight, x, bias = torch.randn(40, 64), torch.randn(7, 64), torch.randn(40)
    expected = PanelWeight(weight)(x, bias)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(PanelWeight(weight)(x, bias), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@forms
@pytest.mark.usefixtures("unit")
def test_no_rows(form):
    assert form(torch.randn(40, 64).bfloat16().float())(torch.randn(0, 64), None).shape == (0, 40)


def test_float32_in_tiles_is_float32(unit):
    """Multiply numbers of any magnitude, infinity and NaN; the thirds of a number lose no bit."""
    x = torch.randn(40, 96) * 2.0 ** torch.randint(-60, 60, (40, 1))
    weight = torch.randn(70, 96).bfloat16().float()
    form, expected = PanelWeight(weight), x.double() @ weight.double().T
    assert form.panels.in_pairs == (unit == "tiles")
    size = x.double().abs() @ weight.double().abs().T
    assert ((form(x, None).double() - expected).abs() <= 4e-7 * size).all()
    eye, limits = PanelWeight(torch.eye(96)), torch.finfo(torch.float32)
    x[0, :6] = torch.tensor([limits.max, -limits.max, 1 + limits.eps, 1 - limits.eps / 2, 2.0**-100, 0.1])
    assert torch.equal(eye(x, None), x)
    x[1, 3], x[2, 5] = float("inf"), float("-inf")
    x[3, 7] = torch.tensor(0x7F800001, dtype=torch.int32).view(torch.float32)  # NaN by its last bit alone
    out = PanelWeight(torch.ones(5, 96))(x, None)
    assert (out[1] == float("inf")).all()
    assert (out[2] == float("-inf")).all()
    assert out[3].isnan().all()
    assert out[4:].isfinite().all()


@pytest.mark.skipif(sys.platform != "linux", reason="takes mprotect")
@pytest.mark.parametrize("num_rows", [1, 15, 17, 33, 65], ids="num_rows={}".format)
def test_nothing_behind_x_is_read(num_rows, unit):
    """Put x in front of an unreadable page, with blocks of few rows and of many in turn."""
    memory, weight = mmap.mmap(-1, 2**18), torch.randn(70, 96).bfloat16().float()
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    guard = 2**18 - mmap.PAGESIZE
    assert libc.mprotect(ctypes.c_void_p(address + guard), mmap.PAGESIZE, 0) == 0
    x = torch.frombuffer(memory, dtype=torch.float32, count=guard // 4)[-num_rows * 96 :].view(num_rows, 96)
    x.normal_()
    for dtype in (torch.float32, torch.bfloat16):
        form, rows = PanelWeight(weight.to(dtype)), x
        if dtype == torch.bfloat16:
            rows = x.view(torch.bfloat16)[:, 96:]
            rows.copy_(torch.randn(num_rows, 96))
        assert form.panels.in_pairs == (unit == "tiles" or (HAS_DOT and dtype == torch.bfloat16))
        assert torch.equal(form(rows, None), form(rows.clone(), None))


@pytest.mark.parametrize(
    "task",
    [LINEAR, pytest.param(TILES, marks=pytest.mark.skipif(not HAS_TILES, reason="this CPU has no AMX"))],
    ids=["vectors", "tiles"],
)
def test_a_thread_that_finds_no_unit_leaves_scratch_memory_alone(task):
    """A late thread finds no unit, and the next kernel may be using the scratch memory already."""
    scratch = torch.full((2**18,), 7, dtype=torch.uint8)
    record = np.zeros(1, task.record)
    record["scratch"], record["next_unit"] = scratch.data_ptr(), 5
    record["num_units"] = record["all_units"] = record["num_threads"] = 5
    task.code.call(record.ctypes.data)
    assert (scratch == 7).all()


def test_what_the_kernel_would_misread_is_refused():
    with pytest.raises(ValueError, match=r"weight must be one of .*, got torch.float64"):
        PanelWeight(torch.ones(4, 32, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"x must have shape \[any, 32\], got \[3, 16\]"):
        PanelWeight(torch.ones(4, 32))(torch.ones(3, 16), None)
    with pytest.raises(ValueError, match=r"scales go with a weight in int8 .*, got some with torch\.float32"):
        numba_linear.pack(torch.ones(4, 32), torch.ones(4))
    with pytest.raises(ValueError, match="in_features must be greater than 0, got 0"):
        PanelWeight(torch.ones(4, 1)[:, :0])
    with pytest.raises(ValueError, match=r"got none with torch\.int8"):
        numba_linear.pack(torch.ones(4, 32, dtype=torch.int8))


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(70, 96), (34, 5)], ids=str)
def test_numbers_that_16_bits_hold_are_kept_in_16(shape, kept, monkeypatch):
    """Compare with float32, bitwise; a weight with a single finer number stays float32."""
    monkeypatch.setattr(numba_linear, "HAS_TILES", False)  # they add up in another order
    weight, limits = torch.randn(shape).to(kept), torch.finfo(kept)
    weight[1, :4] = torch.tensor([limits.max**0.5, limits.smallest_normal / 2, -0.0, limits.smallest_normal])
    weight, indices = weight.float(), torch.tensor([33, 1, 0, 16, 1])
    form, table = PanelWeight(weight), Table(weight)
    assert form.panels.weight.dtype == table.weight.dtype == kept
    for num_rows in (1, 3, 9, 70):
        x = torch.randn(num_rows, shape[1])
        assert torch.equal(form(x, None), numba_linear.linear(x, numba_linear.pack(weight), None))
        gated = numba_linear.linear(x, numba_linear.pack(weight, gated=True), None)
        assert torch.equal(PanelWeight(weight, gated=True)(x, None), gated)
    for rows in (form.rows(indices), table.rows(indices)):
        assert torch.equal(rows.view(torch.int32), weight[indices].view(torch.int32))
    weight[-1, -1] = 1 + 2**-20
    assert PanelWeight(weight).panels.weight.dtype == Table(weight).weight.dtype == torch.float32


def test_what_is_flushed_to_zero_is_no_other_number():
    weight = torch.tensor([[1e-40, 1.0]])
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU does not flush to zero what is too small to be normal")
    try:
        assert PanelWeight(weight).panels.weight.dtype == torch.float32
    finally:
        torch.set_flush_denormal(False)


def test_what_is_kept_in_16_bits_is_widened_only():
    with pytest.raises(ValueError, match=r"table must be one of .*, got torch\.int8"):
        widen_rows(torch.zeros(3, 4, dtype=torch.int8), torch.tensor([0]))
    with pytest.raises(ValueError, match=r"table must be contiguous, got strides \(1, 4\)"):
        widen_rows(torch.zeros(3, 4, dtype=torch.float16).T, torch.tensor([0]))


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "llama-tied-bias"])
def test_an_engine_in_float32_reads_16_bits(name, kept, tmp_path, monkeypatch):
    """Compare with float32 weights, bitwise, with recorded steps too."""
    monkeypatch.setattr(numba_linear, "HAS_TILES", False)
    random_model(CONFIGS[name]()).to(kept).save_pretrained(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2, ignore_eos=True)
    prompts = ragged_prompts([3, 40, 1, 20])

    def bits(engine):
        return [o.outputs[0].logprobs for o in engine.generate(prompts, params, use_tqdm=False)]

    engine = new_engine(tmp_path, dtype="float32")
    assert engine.runner.model.head.form.panels.weight.dtype == kept
    monkeypatch.setattr(panels, "narrowed", lambda weight, _: weight)
    wide = new_engine(tmp_path, dtype="float32", enforce_eager=True)
    assert wide.runner.model.head.form.panels.weight.dtype == torch.float32
    assert bits(engine) == bits(engine) == bits(wide)
    assert any(engine.runner.graphs._graphs.values())


@pytest.mark.parametrize("form", [PanelWeight, PanelInt8Weight], ids=lambda form: form.__name__)
@dtypes
@pytest.mark.parametrize("num_inputs", [8, 96], ids="num_inputs={}".format)
@pytest.mark.usefixtures("unit")
def test_rows_are_those_of_the_weight(form, dtype, num_inputs):
    weight = torch.randn(70, num_inputs).bfloat16().to(dtype)
    indices = torch.tensor([69, 0, 16, 15, 16])
    expected = dequantized(form, weight)[indices].to(dtype)
    torch.testing.assert_close(form(weight).rows(indices), expected, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize(
    ("name", "dtype", "quantization", "deterministic"),
    [
        ("llama-tied-bias", "float32", None, True),
        ("qwen3", "bfloat16", None, True),
        ("llama", "bfloat16", "int8", True),
        ("demo", "float32", "int4", True),
        ("demo", "float32", "int8", False),
        ("demo", "float32", None, False),
        pytest.param("demo", "bfloat16", None, False, marks=needs_dot),
        ("llama", "float16", None, True),
        pytest.param("llama-tied-bias", "bfloat16", None, False, marks=needs_dot),
        pytest.param("demo", "bfloat16", "int4", False, marks=needs_dot),
    ],
)
def test_the_same_bits_alone_batched_and_in_chunks(
    name, dtype, quantization, deterministic, unit, monkeypatch
):
    """Compare tokens and log-probabilities bitwise, with `deterministic` and where it is not needed."""
    if unit == "tiles" and name != "demo":
        pytest.skip("weights of 48 inputs fill no tiles")
    monkeypatch.setattr(devices, "cpu_flags", lambda: {"avx512_bf16"})  # and none that libraries use better
    options = {"dtype": dtype, "quantization": quantization, "deterministic": deterministic}
    model = name if name == "demo" else checkpoint(name)
    engine = new_engine(model, **options)
    assert isinstance(engine.runner.model.layers[0].mlp.down.form, PANEL_FORMS[quantization])
    assert engine.runner.model.head.form.panels.in_pairs == (
        unit == "tiles" or (HAS_DOT and dtype == "bfloat16")
    )
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    prompts = ragged_prompts([3, 70, 131, 1, 20])

    def bits(output):
        answer = output.outputs[0]
        return answer.token_ids, answer.logprobs, output.prompt_logprobs

    together = [bits(output) for output in engine.generate(prompts, params, use_tqdm=False)]
    for prompt, expected in zip(prompts, together, strict=True):
        assert bits(engine.generate([prompt], params, use_tqdm=False)[0]) == expected
    chunked = new_engine(model, max_num_batched_tokens=16, max_num_seqs=4, **options)
    assert [bits(output) for output in chunked.generate(prompts, params, use_tqdm=False)] == together
    assert_all_free(engine)


def test_deterministic_needs_the_cpus_own_kernels():
    with pytest.raises(ConfigError, match="deterministic=True needs a CPU with attention_backend='numba'"):
        new_engine(checkpoint("llama"), deterministic=True, attention_backend="torch")
