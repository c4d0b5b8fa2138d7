"""Weights in codes on a CPU: products and lookups have the bits of those of the floats they stand for."""

from __future__ import annotations

import logging
import random
from dataclasses import replace

import pytest
import torch

from paged.checkpoints.coded import CodedWeight, Factors
from paged.kernels.cpu.linear import linear as numba_linear
from paged.kernels.cpu.linear.linear import linear, pack, pad
from paged.kernels.cpu.linear.pack_codes import is_exact, narrowest, pack_codes
from paged.kernels.cpu.target import HAS_DOT
from paged.kernels.half_bytes import HalfBytes
from paged.model.weights.coded_panels import CodedForms, PanelCodes, keepable
from paged.model.weights.panels import PanelWeight
from tests.support.coded_weights import CENTRED, CODES, FACTORS, is_stored, random_coded, same_bits

CPU = torch.device("cpu")
STORED = [(codes, factors) for codes in CODES for factors in FACTORS if is_stored(codes, factors)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["vectors", "tiles"])
def unit(request, monkeypatch):
    if request.param == "vectors":
        monkeypatch.setattr(numba_linear, "HAS_TILES", False)
    elif not numba_linear.HAS_TILES:
        pytest.skip("this CPU has no tiles of bfloat16 (AMX), or this process may not use them")


@pytest.mark.parametrize(("codes", "factors"), STORED)
@pytest.mark.usefixtures("unit")
def test_products_and_lookups_have_the_bits_of_the_floats(codes, factors):
    """In groups of every size; with ragged panels, gates, a bias; alone and in company."""
    choice = random.Random(f"{codes} {factors}")
    for i, group in enumerate(choice.sample((16, 32, 64, 128, 96, 384), 4)):
        num_rows = 2 * choice.randint(1, 60)
        num_inputs = group * choice.randint(1, 9)
        dtype = DTYPES[i % 2] if choice.random() < 0.8 else torch.float16
        gated = choice.random() < 0.4
        weight = random_coded(codes, factors, num_rows, num_inputs, group)
        floats = weight.floats()
        form = PanelCodes(weight, "gated" if gated else choice.choice(["layer", "head"]), dtype=dtype)
        pairs = form.panels.in_pairs
        assert pairs == (HAS_DOT and dtype == torch.bfloat16)
        assert form.panels.in_features == num_inputs
        expected = pack(floats.bfloat16() if pairs else floats, pairs=pairs, gated=gated)
        bias = torch.randn(num_rows).to(dtype) if choice.random() < 0.5 else None
        padded = None if bias is None else pad(bias, gated=gated)
        x = torch.randn(70, num_inputs).to(dtype)
        out = linear(x, expected, padded, form._out_dtype)
        first = choice.randint(0, 62)
        for rows in (slice(70), slice(7), slice(1), slice(first, first + choice.randint(1, 7))):
            assert same_bits(form(x[rows], bias), out[rows])
        if not gated:
            indices = torch.randint(num_rows, (5,))
            assert same_bits(form.rows(indices), floats[indices].to(dtype))


@pytest.mark.parametrize(
    "pairs", [False, pytest.param(True, marks=pytest.mark.skipif(not HAS_DOT, reason="no AVX512-BF16"))]
)
@pytest.mark.parametrize(
    "order", [(0, 0, 0, 1), (32, 18, 2, 16), (256, 136, 8, 16), (256, 144, 16, 32)], ids=str
)
def test_half_bytes_are_packed_as_their_codes(order, pairs):
    """As bytes of each row in the file say, with bytes of factors or padding around them."""
    block, block_bytes, start, run = order
    num_inputs = 2 * block or 208
    row_bytes = num_inputs // block * block_bytes if block else num_inputs // 2 + 3
    rows = torch.randint(0, 256, (70, row_bytes), dtype=torch.uint8)
    half_bytes = HalfBytes(rows, num_inputs, *order)
    expected = torch.empty(half_bytes.shape, dtype=torch.uint8)
    for k in range(num_inputs):
        place = k % (block or num_inputs)
        chunk, rest = divmod(place, 2 * run)
        at = k // (block or num_inputs) * block_bytes + start + chunk * run + rest % run
        expected[:, k] = rows[:, at] >> 4 * (rest // run) & 15
    assert torch.equal(half_bytes.unpacked(), expected)
    assert torch.equal(half_bytes.take(slice(3, 9)).unpacked(), expected[3:9])
    for gated in (False, True):
        own, other = (
            pack_codes(codes, torch.ones(70, num_inputs // 16), table=CENTRED, pairs=pairs, gated=gated)
            for codes in (half_bytes, expected)
        )
        assert torch.equal(own.weight, other.weight)


def test_codes_take_the_memory_of_their_file():
    """With factors as narrow as there: 4.5 bits of Q4_0 and Q4_K, 8.5 of Q8_0, and a float for each 128."""
    sizes = []
    for codes, factors, group in (
        ("integers", "float16", 32),
        ("integers", "float16 and zero", 128),
        ("integers", "two levels and offset", 32),
        ("int8", "float16", 32),
        ("float8", "float32", 128),
        ("e2m1", "float8 and a divisor", 16),
    ):
        weight = random_coded(codes, factors, 128, 1024, group)
        if factors.startswith("two levels"):  # for each 256 inputs
            units = {name: getattr(weight.factors, name)[:, ::4] for name in ("scale_unit", "offset_unit")}
            weight = replace(weight, factors=weight.factors._replace(**units))
        panels = PanelCodes(weight, "layer", dtype=torch.float32).panels
        sizes.append(8 * (panels.weight.nbytes + panels.scales.nbytes - 192) / weight.codes.numel())
    assert sizes == [4.5, 4 + 24 / 128, 4.5 + 1 / 8, 8.5, 8.25, 4.5 + 64 / 1024]


def test_factors_become_as_narrow_as_they_may():
    for given, dtype in (
        ([0, 15], torch.int8),
        ([-127, 127], torch.int8),
        ([0, 128], torch.float16),
        ([2048, 0], torch.float16),
        ([2049, 0], torch.float32),
        ([0.5, 2.0**-130], torch.bfloat16),
        ([1 + 2.0**-10, 0.5], torch.float16),
        ([0.1, 0.5], torch.float32),
    ):
        x = torch.tensor([given])
        assert narrowest(x).dtype == dtype
        assert torch.equal(narrowest(x).double(), x.double())
    powers = torch.tensor([[127, 130, 0]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert torch.equal(narrowest(powers).float(), torch.tensor([[1.0, 8.0, 2.0**-127]]))


def test_an_order_of_inputs():
    """Gather x by it, and give rows in the order of the model."""
    weight = replace(random_coded("integers", "float16 and zero", 70, 128, 32), order=torch.randperm(128))
    form, x = PanelCodes(weight, "embedding", dtype=torch.float32), torch.randn(9, 128)
    assert not form.is_recordable
    torch.testing.assert_close(form(x, None), x @ weight.floats().T)
    assert torch.equal(form.rows(torch.tensor([69, 3])), weight.floats()[[69, 3]])


INEXACT = {
    "zeros with a scale in float32": Factors(torch.full((40, 2), 0.1), zero=torch.full((40, 2), 7)),
    "zeros with a negative scale": Factors(torch.full((40, 2), -0.5), zero=torch.full((40, 2), 7)),
    "zeros whose product is infinite": Factors(torch.full((40, 2), 2.0**126), zero=torch.full((40, 2), 7)),
    "zeros that leave no integer": Factors(torch.full((40, 2), 0.1), zero=torch.full((40, 2), 200)),
    "an offset and a scale in float32": Factors(torch.full((40, 2), 0.1), offset=torch.full((40, 2), 0.3)),
    "both": Factors(torch.ones(40, 2), torch.ones(40, 2, dtype=torch.int8), torch.ones(40, 2)),
    "groups of 8": Factors(torch.rand(40, 8)),
}


@pytest.mark.parametrize("name", INEXACT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_one_rounding_does_not_give_is_folded_or_widened(name, dtype, caplog, monkeypatch):
    """Say so in one line, however many weights there are. Zeros become part of codes if 8 bits hold them."""
    if dtype == torch.float32:  # floats that bfloat16 holds would be added up by tiles, codes never are
        monkeypatch.setattr(numba_linear, "HAS_TILES", False)
    codes = torch.randint(0, 16, (40, 64), dtype=torch.uint8)
    codes[0, 0] = 7
    weight = CodedWeight(codes, INEXACT[name], CENTRED)
    make, x = CodedForms(dtype), torch.randn(3, 64).to(dtype)
    with caplog.at_level(logging.INFO):
        form, _ = make(weight, "layer"), make(weight, "layer")
    expected = PanelWeight(weight.floats().to(dtype))
    is_folded = name == "both" or ("zeros" in name and "no integer" not in name)
    assert isinstance(form, PanelCodes) == is_folded
    assert len(caplog.records) == (not is_folded)
    assert is_folded == (keepable(weight) is not None)
    assert same_bits(form(x, None), expected(x, None))
    assert same_bits(form.rows(torch.arange(40)), expected.rows(torch.arange(40)))


def test_when_one_rounding_is_enough():
    codes = torch.zeros(1, 32, dtype=torch.uint8)
    float8 = codes.view(torch.float8_e4m3fn)
    one, wide = torch.ones(1, 1), torch.tensor([[1 + 2.0**-20]])
    assert is_exact(codes, wide, table=CENTRED)
    assert not is_exact(codes, wide, offset=one, table=CENTRED)
    assert is_exact(codes, torch.tensor([[1 + 2.0**-19]]), offset=one, table=CENTRED)
    assert not is_exact(codes.char(), torch.tensor([[1 + 2.0**-17]]), offset=one)
    assert is_exact(codes.char(), torch.tensor([[1 + 2.0**-16]]), offset=one)
    assert not is_exact(float8, one, offset=one)
    assert not is_exact(float8, torch.tensor([[2.0**120]]))  # readers take it times 256


def test_what_cannot_be_packed_is_refused():
    codes, scale = torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 2)
    zero, signed = torch.zeros(4, 2, dtype=torch.int8), codes.char()
    unit, float8 = torch.ones(4, 1), codes.view(torch.float8_e4m3fn)
    for message, arguments in (
        ("codes must be one of .*, got torch.int32", {"codes": codes.int()}),
        (r"codes must be 0 to 15, got 16", {"codes": codes + 16}),
        ("codes must be numbers, got NaN", {"codes": (codes + 255).view(torch.float8_e4m3fn), "table": None}),
        ("got none with torch.uint8", {"table": None}),
        ("got one with torch.int8", {"codes": signed}),
        ("table must be a tuple of 16 floats", {"table": (1.0,)}),
        ("table must hold numbers that bfloat16 has", {"table": (1 + 2.0**-10,) * 16}),
        (r"scale must have shape \[4, any\]", {"scale": scale[:3]}),
        (r"num_groups must be greater than 0", {"scale": scale[:, :0]}),
        (r"in_features must .* num_groups", {"scale": torch.ones(4, 3)}),
        (r"groups must have a multiple of 16 inputs, got 8", {"scale": torch.ones(4, 8)}),
        (r"scale must be one of", {"scale": scale.double()}),
        (r"zero must have shape \[4, 2\]", {"zero": zero[:, :1]}),
        (r"zero must be one of", {"zero": scale}),
        ("zeros or offsets, got both", {"zero": zero, "offset": scale}),
        ("offset_unit must be left out without offset", {"offset_unit": unit}),
        (r"scale_unit must have shape \[4, any\]", {"scale_unit": unit[:2]}),
        (
            r"offset_unit must have shape \[4, 1\]",
            {"offset": scale, "scale_unit": unit, "offset_unit": scale},
        ),
        ("num_groups must .* num_units", {"scale_unit": torch.ones(4, 3)}),
        ("integers in zero must be from -16777216 to 16777216", {"zero": zero.int() + 2**30}),
        ("out_features must", {"codes": codes[:3], "scale": scale[:3], "gated": True}),
    ):
        with pytest.raises(ValueError, match=message):
            pack_codes(**{"codes": codes, "scale": scale, "table": CENTRED} | arguments)
    assert pack_codes(float8, scale).has_groups


def test_factors_of_other_panels_are_refused():
    """The kernels go by their head: each of its numbers is checked."""
    panels = pack_codes(torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 2), table=CENTRED)
    x = torch.ones(1, 64)
    assert torch.equal(linear(x, panels, None), torch.full((1, 4), -512.0))
    for at in range(0, 80, 8):
        for number in (-2, 5, 2**40):
            scales = panels.scales.clone()
            scales[at : at + 8] = torch.tensor([number]).view(torch.uint8)
            with pytest.raises(
                ValueError, match=r"panels\.scales must be the factors that `pack_codes` made"
            ):
                linear(x, panels._replace(scales=scales), None)
    for scales in (panels.scales[:100], panels.scales[:-1], torch.cat([panels.scales, panels.scales])):
        with pytest.raises(ValueError, match=r"panels\.scales must be the factors"):
            linear(x, panels._replace(scales=scales), None)
