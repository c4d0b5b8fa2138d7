import pytest
import torch

from paged.kernels import reference
from paged.kernels.backend import load_kernels
from paged.kernels.checks import TrustedContents
from paged.kernels.gpu.target import in_interpreter
from tests.support.error_bounds import assert_rotated, in_float64
from tests.support.kernel_cases import DEVICE, IMPLEMENTATIONS

# num_tokens, num_heads, num_kv_heads, head_dim, block_size. A program takes 1024 pairs, from 128 heads of 16
# to 8 of 256: all of a token, or it ends in the midst of keys (128), of values (256), of queries (96).
SHAPES = [(3, 4, 2, 16, 8), (1, 7, 1, 80, 16), (5, 13, 5, 128, 8), (2, 3, 4, 256, 16), (2, 29, 3, 96, 1)]


NORMS = [None, "norm", "unit_offset"]


def make_case(shape, dtype, *, norm, exact_sums=False):
    """Arguments of rotary_store_kv: qkv is a view into a wider tensor, K and V of a slot lie side by side."""
    num_tokens, num_heads, num_kv_heads, head_dim, block_size = shape
    wide = torch.randn(num_tokens, num_heads + 2 * num_kv_heads + 1, head_dim + 8, device=DEVICE)
    if exact_sums:  # of squares, in any order
        wide = wide.mul(4).round().clamp(-15, 15).div(4)
    angles = torch.randn(num_tokens, head_dim // 2, device=DEVICE) * 10
    caches = torch.randn(4, block_size, 2, num_kv_heads, head_dim, device=DEVICE).to(dtype)
    case = {
        "qkv": wide.to(dtype)[:, :-1, :head_dim],
        "cos": angles.cos(),
        "sin": angles.sin(),
        "key_cache": caches[:, :, 0],
        "value_cache": caches[:, :, 1],
        "slot_mapping": torch.randperm(4 * block_size, device=DEVICE)[:num_tokens],
        "eps": 1e-5,
    }
    if norm:
        case["query_norm_weight"] = torch.randn(head_dim, device=DEVICE).to(dtype)
        case["key_norm_weight"] = torch.randn(head_dim, device=DEVICE).to(dtype)
        case["unit_offset"] = norm == "unit_offset"
    return case


def run(operation, case, convert=dict):
    """Everything that the operation may have written, of the tensors that `case` looks into."""
    bases = {name: x._base for name, x in case.items() if isinstance(x, torch.Tensor) and x._base is not None}
    copies = convert({id(base): base.clone() for base in bases.values()})
    views = {
        name: copies[id(base)].as_strided(case[name].shape, case[name].stride(), case[name].storage_offset())
        for name, base in bases.items()
    }
    query = operation(**{**convert(case), **views})
    num_heads, num_kv_heads = query.shape[1], case["key_cache"].shape[2]
    wide, caches = copies[id(bases["qkv"])], copies[id(bases["key_cache"])]
    assert query.data_ptr() == wide.data_ptr(), "the query is rotated in place"
    wide[:, num_heads : num_heads + num_kv_heads, : query.shape[2]] = 0  # key heads are scratch
    return query.clone(), wide, caches


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("norm", [None, "unit_offset"], ids=str)  # the next test has the other norm's bits
def test_matches_float64(name, dtype, shape, norm):
    """Slots that are not named, values in qkv, and the memory around its view keep every bit."""
    case = make_case(shape, dtype, norm=norm)
    query, wide, caches = run(load_kernels(name).rotary_store_kv, case)
    exact_query, exact_wide, exact_caches = run(reference.rotary_store_kv, case, in_float64)
    norms = {"norm": norm is not None, "unit_offset": norm == "unit_offset"}
    assert_rotated(query, exact_query, **norms)
    _, num_heads, num_kv_heads, head_dim, block_size = shape
    place = case["slot_mapping"] // block_size, case["slot_mapping"] % block_size
    assert_rotated(caches[:, :, 0][place], exact_caches[:, :, 0][place], **norms)
    caches[:, :, 0][place] = exact_caches[:, :, 0][place] = 0
    for got, expected in (
        (wide[:, num_heads + num_kv_heads :], exact_wide[:, num_heads + num_kv_heads :]),
        (wide[..., head_dim:], exact_wide[..., head_dim:]),
        (caches, exact_caches),
    ):
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=0)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU contracts products and sums, here two roundings are one")
@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_rounds_where_the_unfused_operations_round(name, dtype, shape, norm):
    """Bit for bit, where the sum in the norm does not depend on its order."""
    case = make_case(shape, dtype, norm=norm, exact_sums=True)
    for got, expected in zip(
        run(load_kernels(name).rotary_store_kv, case), run(reference.rotary_store_kv, case), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.int8], ids=str)
def test_a_row_that_pads_a_step_is_not_stored(cache_dtype):
    """Slot -1 would be one in front of the cache; other rows keep their bits."""
    case = make_case(SHAPES[0], torch.float32, norm="norm")
    caches = torch.full((2, 5, *case["key_cache"].shape[1:]), 7, dtype=cache_dtype, device=DEVICE)
    scales = torch.full((2, 5, 2, 8), 7.0, device=DEVICE)
    found = []
    for slots in ([3, 17, 9], [3, -1, 9]):
        own, own_scales = caches.clone(), scales.clone()
        case |= {"key_cache": own[0, 1:], "value_cache": own[1, 1:]}
        if cache_dtype == torch.int8:
            case |= {"key_scales": own_scales[0, 1:], "value_scales": own_scales[1, 1:]}
        case |= {"slot_mapping": torch.tensor(slots, device=DEVICE)}
        with TrustedContents():
            load_kernels("triton").rotary_store_kv(**{**case, "qkv": case["qkv"].clone()})
        found.append((own, own_scales))
    (whole, whole_scales), (padded, padded_scales) = found
    whole[:, 3, 1], whole_scales[:, 3, :, 1] = 7, 7  # slot 17, in a block behind the one in front
    assert torch.equal(padded, whole)
    assert torch.equal(padded_scales, whole_scales)


@pytest.mark.parametrize("name", ["triton", "numba"] if DEVICE == "cpu" else ["triton"])
def test_caches_of_any_strides(name):
    """Heads before slots, with room between heads and blocks; sines in wider rows: the same numbers."""
    case = make_case(SHAPES[0], torch.float32, norm="norm")
    plain = torch.zeros(2, *case["key_cache"].shape, device=DEVICE)
    num_blocks, block_size, num_kv_heads, head_dim = plain.shape[1:]
    strided = torch.zeros(2, num_blocks, num_kv_heads + 1, block_size + 3, head_dim, device=DEVICE)
    strided = strided[:, :, 1:, :block_size].transpose(2, 3)
    rotary_store_kv, queries = load_kernels(name).rotary_store_kv, []
    for caches in (plain, strided):
        own = {"key_cache": caches[0], "value_cache": caches[1], "qkv": case["qkv"].clone()}
        if caches is strided and name == "triton":  # numba leaves rows like these to torch
            own["sin"] = torch.cat([case["sin"], case["sin"]], dim=1)[:, : head_dim // 2]
        queries.append(rotary_store_kv(**{**case, **own}))
    torch.testing.assert_close(strided, plain, rtol=0, atol=0)
    torch.testing.assert_close(*queries, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_queries_alone(name, dtype, norm):
    """The same bits as beside keys and values, as for a layer that reads those of another."""
    case = make_case((3, 29, 2, 96, 8), dtype, norm=norm)
    alone = case["qkv"][:, :29].clone()
    nothing = dict.fromkeys(("key_cache", "value_cache", "slot_mapping", "key_norm_weight"))
    for operation in (load_kernels(name).rotary_store_kv, reference.rotary_store_kv):
        own, beside = alone.clone(), case["qkv"].clone()
        query = operation(**{**case, **nothing, "qkv": own})
        assert query.data_ptr() == own.data_ptr()
        assert torch.equal(query, operation(**{**case, "qkv": beside}))


def test_keys_without_a_cache_are_refused():
    case = make_case(SHAPES[0], torch.float32, norm="norm")
    with pytest.raises(ValueError, match="without key_cache there must be no other tensor of keys"):
        load_kernels("triton").rotary_store_kv(**{**case, "key_cache": None})
    with pytest.raises(ValueError, match="with key_cache there must be value_cache and slot_mapping"):
        load_kernels("triton").rotary_store_kv(**{**case, "value_cache": None})


def test_keys_and_values_that_would_overwrite_each_other_are_refused():
    case = make_case(SHAPES[0], torch.float32, norm="")
    with pytest.raises(ValueError, match="key_cache and value_cache must not share memory"):
        load_kernels("triton").rotary_store_kv(**{**case, "value_cache": case["key_cache"]})


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_value_that_is_not_finite_is_stored_as_it_is(name):
    case = make_case(SHAPES[0], torch.float32, norm=True)
    case["qkv"][:, -1, ::3] = torch.inf
    case["qkv"][:, -1, 1::3] = torch.nan
    load_kernels(name).rotary_store_kv(**case)
    stored = case["value_cache"].flatten(0, 1)[case["slot_mapping"], -1]
    torch.testing.assert_close(stored, case["qkv"][:, -1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_no_tokens(name):
    case = make_case((0, 4, 2, 16, 8), torch.float32, norm=True)
    before = case["key_cache"].clone()
    assert load_kernels(name).rotary_store_kv(**case).shape == (0, 4, 16)
    torch.testing.assert_close(case["key_cache"], before, rtol=0, atol=0)


def test_reference_rotates_as_hf_does():
    modeling_llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    query, key = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    angles = torch.randn(3, 4) * 10
    cos, sin = angles.cos(), angles.sin()
    expected = modeling_llama.apply_rotary_pos_emb(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos.repeat(1, 2)[None], sin.repeat(1, 2)[None]
    )
    reference.rotary(query, key, cos, sin)
    for got, want in zip((query, key), expected, strict=True):
        torch.testing.assert_close(got, want[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_reference_rounds_as_qwen3_does(dtype):
    modeling_qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    norm = modeling_qwen3.Qwen3RMSNorm(32, eps=1e-5).to(dtype)
    norm.weight.data = torch.randn(32).to(dtype)
    x = torch.randn(50, 4, 32).to(dtype)
    torch.testing.assert_close(reference.rms_norm(x, norm.weight, 1e-5), norm(x), rtol=0, atol=0)


def test_reference_normalises_heads_as_gemma_3_does():
    modeling_gemma3 = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    case = make_case((3, 4, 2, 32, 8), torch.bfloat16, norm="unit_offset")
    heads, expected = case["qkv"][:, :6], []
    for which, own in zip(("query", "key"), heads.split([4, 2], dim=1), strict=True):
        norm = modeling_gemma3.Gemma3RMSNorm(32, eps=1e-5)
        norm.weight.data = case[f"{which}_norm_weight"].cpu()
        expected.append(norm(own.cpu()).detach().to(DEVICE))
    reference.rotary(*expected, case["cos"], case["sin"])
    query = reference.rotary_store_kv(**case)
    torch.testing.assert_close(query, expected[0], rtol=0, atol=0)
    torch.testing.assert_close(heads[:, 4:], expected[1], rtol=0, atol=0)


def test_float64_reference_by_hand():
    """One token, one pair: norm, weight, quarter turn, slot 2 * 4 + 3."""
    qkv = torch.tensor([[[3.0, 4.0], [4.0, 3.0], [1.0, 2.0]]], dtype=torch.float64)
    caches = torch.zeros(2, 3, 4, 1, 2, dtype=torch.float64)
    query = reference.rotary_store_kv(
        qkv,
        torch.tensor([[0.0]]),
        torch.tensor([[1.0]]),
        *caches,
        torch.tensor([11]),
        query_norm_weight=torch.tensor([1.0, 2.0], dtype=torch.float64),
        key_norm_weight=torch.tensor([5.0, 1.0], dtype=torch.float64),
        eps=0.0,
    )
    rms = 12.5**0.5
    for got, expected in ((query[0, 0], [-8 / rms, 3 / rms]), (caches[0, 2, 3, 0], [-3 / rms, 20 / rms])):
        torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))
    assert caches[1, 2, 3, 0].tolist() == [1.0, 2.0]
    assert caches.count_nonzero() == 4


WRONG = {
    "qkv-dim": ({"qkv": torch.randn(2, 64)}, r"qkv must have shape \[any, any, any\], got \[2, 64\]"),
    "qkv-dtype": ({"qkv": torch.randn(2, 8, 16).double()}, "qkv must be one of .*, got torch.float64"),
    "qkv-heads": (
        {"qkv": torch.randn(2, 4, 16)},
        "qkv must have more than twice key_cache's heads, got 4 and 2",
    ),
    "qkv-stride": ({"qkv": torch.randn(2, 16, 8).mT}, "qkv must be contiguous in its last dimension"),
    "head_dim": ({"key_cache": torch.randn(4, 8, 2, 15)}, r"key_cache must have shape \[any, any, any, 16\]"),
    "cos": ({"cos": torch.randn(2, 16)}, r"cos must have shape \[2, 8\], got \[2, 16\]"),
    "sin": ({"sin": torch.randn(2, 8).half()}, "sin must be torch.float32, got torch.float16"),
    "value_cache": (
        {"value_cache": torch.randn(3, 8, 2, 16)},
        r"value_cache must have shape \[4, 8, 2, 16\]",
    ),
    "value_cache-stride": (
        {"value_cache": torch.randn(8, 4, 2, 16).transpose(0, 1)},
        "value_cache must have key_cache's strides",
    ),
    "slots": ({"slot_mapping": torch.zeros(2).int()}, "slot_mapping must be torch.int64, got torch.int32"),
    "slots-stride": ({"slot_mapping": torch.arange(4)[::2]}, "slot_mapping must be contiguous"),
    "device": (
        {"slot_mapping": torch.zeros(2, device="meta").long()},
        "slot_mapping must hold numbers, got a Tensor on meta",
    ),
    "qkv-expanded": (
        {"qkv": torch.randn(1, 8, 16, device=DEVICE).expand(2, -1, -1)},
        "qkv is written, and its elements must not",
    ),
    "cache-expanded": (
        {
            name: torch.zeros(1, 8, 2, 16, device=DEVICE).expand(4, -1, -1, -1)
            for name in ("key_cache", "value_cache")
        },
        "key_cache is written, and its elements must not share memory",
    ),
    "block_size": (
        {name: torch.zeros(4, 0, 2, 16) for name in ("key_cache", "value_cache")},
        "block_size must be greater than 0, got 0",
    ),
    "unit_offset": ({"unit_offset": None}, "unit_offset must be True or False, got None"),
    "weight": ({"key_norm_weight": torch.randn(8)}, r"key_norm_weight must have shape \[16\], got \[8\]"),
    "one-weight": ({"key_norm_weight": None}, "query_norm_weight and key_norm_weight must both be given"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_inputs_are_named(wrong):
    arguments, message = WRONG[wrong]
    case = make_case((2, 4, 2, 16, 8), torch.float32, norm=True)
    case |= {name: case[name].contiguous() for name in ("qkv", "key_cache", "value_cache")}
    moved = {
        name: x if not torch.is_tensor(x) or x.is_meta else x.to(DEVICE) for name, x in arguments.items()
    }
    with pytest.raises(ValueError, match=message):
        load_kernels("triton").rotary_store_kv(**{**case, **moved})


@pytest.mark.parametrize("name", ["torch", "numba"] if DEVICE == "cpu" else ["torch"])
def test_a_norm_of_queries_alone_is_refused(name):
    case = make_case((2, 4, 2, 64, 8), torch.float32, norm="norm") | {"key_norm_weight": None}
    with pytest.raises(ValueError, match="query_norm_weight and key_norm_weight must both be given"):
        load_kernels(name).rotary_store_kv(**case)


def test_odd_head_dim_is_named():
    case = make_case((2, 4, 2, 16, 8), torch.float32, norm=False)
    case |= {name: case[name][..., :15] for name in ("qkv", "key_cache", "value_cache")}
    with pytest.raises(ValueError, match="head_dim must be a multiple of the two halves, got 15 and 2"):
        load_kernels("triton").rotary_store_kv(**case)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantised_cache(shape, dtype):
    """What comes back is within half a step of what went in; on a CPU all have the reference's bits."""
    if dtype == torch.float8_e4m3fn and DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no e4m3")
    case = make_case(shape, torch.float32, norm=False)
    num_blocks, block_size, num_kv_heads, _ = case["key_cache"].shape
    plain = {name: case[name].clone() for name in ("key_cache", "value_cache")}
    reference.rotary_store_kv(**{**case, **plain, "qkv": case["qkv"].clone()})
    blocks, places = case["slot_mapping"] // block_size, case["slot_mapping"] % block_size
    triton_op, written = load_kernels("triton").rotary_store_kv, []
    names = ("torch", "numba") if DEVICE == "cpu" else ("torch",)
    others = (load_kernels(name).rotary_store_kv for name in names)
    for operation in (triton_op, reference.rotary_store_kv, *others):
        scales = torch.full((2, num_blocks, num_kv_heads, block_size), float("nan"), device=DEVICE)
        caches = torch.zeros(2, *case["key_cache"].shape, dtype=dtype, device=DEVICE)
        quantised = {"key_cache": caches[0], "value_cache": caches[1]}
        quantised |= {"key_scales": scales[0], "value_scales": scales[1]}
        operation(**{**case, **quantised, "qkv": case["qkv"].clone()})
        if DEVICE == "cpu" and operation is not triton_op:
            written.append((caches.view(torch.uint8), scales))
            torch.testing.assert_close(written[-1], written[0], rtol=0, atol=0, equal_nan=True)
        assert int(scales.isnan().logical_not().sum()) == 2 * num_kv_heads * shape[0]
        for i, name in enumerate(plain):
            stored = plain[name][blocks, places]  # [num_tokens, num_kv_heads, head_dim]
            scale = scales[i][blocks, :, places][..., None]
            code = caches[i][blocks, places].float()
            # int8 has steps of one scale, e4m3 three bits behind the first.
            step = scale if dtype == torch.int8 else torch.maximum(stored.abs() / 8, scale / 256)
            right = (code * scale - stored).abs() <= 0.501 * step
            if dtype == torch.float8_e4m3fn and in_interpreter() and operation is triton_op:
                # Its cast loses the carry where it rounds up to a power of two: 31.98 becomes 16.
                rounded = (stored / scale).to(dtype).float()
                right |= (rounded.abs().frexp().mantissa == 0.5) & (2 * code == rounded)
            assert right.all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("which", ["fixed_key_scales", "fixed_value_scales"])
def test_fixed_scales(dtype, which):
    """K or V by a scale for each head, clamped; all have the reference's bits, and the others' scales."""
    if dtype == torch.float8_e4m3fn and DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no e4m3")
    case = make_case(SHAPES[2], torch.float32, norm="norm")
    num_blocks, block_size, num_kv_heads, _ = case["key_cache"].shape
    fixed = torch.linspace(0.7, 1.3, num_kv_heads, device=DEVICE) / (50 if dtype == torch.int8 else 400)
    names = ("reference", "torch", "triton", "numba") if DEVICE == "cpu" else ("reference", "torch", "triton")
    written = []
    for name in names:
        operation = reference.rotary_store_kv if name == "reference" else load_kernels(name).rotary_store_kv
        scales = torch.full((2, num_blocks, num_kv_heads, block_size), 0.0, device=DEVICE)
        caches = torch.zeros(2, *case["key_cache"].shape, dtype=dtype, device=DEVICE)
        quantised = {"key_cache": caches[0], "value_cache": caches[1], which: fixed}
        quantised |= {"key_scales": scales[0], "value_scales": scales[1]}
        operation(**{**case, **quantised, "qkv": case["qkv"].clone()})
        written.append((caches.float(), scales))
    blocks, places = case["slot_mapping"] // block_size, case["slot_mapping"] % block_size
    own = int(which == "fixed_value_scales")
    most = 127.0 if dtype == torch.int8 else 448.0
    codes = written[0][0][own][blocks, places]
    stored = case["qkv"][:, -num_kv_heads:]
    if own:
        exact = (stored / fixed[:, None]).clamp(-most, most)
        assert torch.equal(
            codes, (exact.add(0.5).floor() if dtype == torch.int8 else exact).to(dtype).float()
        )
    assert (codes.abs() == most).any(), "some numbers are clamped"
    for name, (other_codes, scales) in zip(names, written, strict=True):
        assert torch.equal(scales[own][blocks, :, places], fixed.expand(len(stored), -1))
        assert (scales[1 - own][blocks, :, places] != fixed).all()
        if name == "triton" and (DEVICE == "cuda" or dtype == torch.float8_e4m3fn):
            # The interpreter's cast loses the carry where it rounds up to a power of two.
            assert (other_codes == written[0][0]).float().mean() > 0.95
        elif DEVICE == "cpu":
            close = torch.isclose(other_codes, written[0][0], rtol=0.13, atol=1.0)
            assert close.all()
            assert (other_codes == written[0][0]).float().mean() > 0.999


def test_fixed_scales_of_a_plain_cache_are_refused():
    case = make_case(SHAPES[0], torch.float32, norm=False) | {
        "fixed_key_scales": torch.ones(2, device=DEVICE)
    }
    with pytest.raises(ValueError, match="fixed_key_scales belong to a quantised cache"):
        load_kernels("triton").rotary_store_kv(**case)


@pytest.mark.skipif(DEVICE != "cpu", reason="numba kernels are for a CPU, tensors here are on a GPU")
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_every_number_is_rounded_as_torch_does(monkeypatch, dtype):
    """Halves and subnormals too: next to the largest of the dtype the scale is 1, and nothing for zeros.

    Triton for int8 alone: the interpreter's cast to e4m3 loses carries.
    """
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float().nan_to_num().sort().values
    middles = (codes[1:] + codes[:-1]) / 2
    numbers = torch.cat([codes, middles, middles.nextafter(codes[1:]), middles.nextafter(codes[:-1])])
    rows = numbers[: numbers.numel() // 31 * 31].clamp(-codes[-1], codes[-1]).view(-1, 31)
    value = torch.cat([torch.full((len(rows), 1), float(codes[-1])), rows], dim=1)
    value[-1] = 0.0
    qkv = torch.stack([torch.zeros_like(value), torch.zeros_like(value), value], dim=1)
    case = {"cos": torch.ones(len(rows), 16), "sin": torch.zeros(len(rows), 16)}
    names = ("torch", "numba", "triton") if dtype == torch.int8 else ("torch", "numba")
    operations, written = [load_kernels(name).rotary_store_kv for name in names], []
    # Nothing is left to torch.
    monkeypatch.delattr("paged.kernels.cpu.rows.rotary_store_kv.rotary_store_kv_by_torch")
    for operation in operations:
        caches, scales = torch.zeros(2, 8, 8, 1, 32).to(dtype), torch.full((2, 8, 1, 8), float("nan"))
        slots = torch.arange(len(rows))
        operation(
            qkv.clone(), **case, key_cache=caches[0], value_cache=caches[1], slot_mapping=slots,
            key_scales=scales[0], value_scales=scales[1],
        )  # fmt: skip
        written.append((caches.view(torch.uint8), scales))
    for own in written[1:]:
        torch.testing.assert_close(own, written[0], rtol=0, atol=0, equal_nan=True)
    assert set(scales[1].flatten().tolist()[: len(rows)]) == {0.0, 1.0}


# What int8 a NaN becomes does not matter: its scale is NaN.
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("name", ["torch", "triton", "numba"] if DEVICE == "cpu" else ["torch", "triton"])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_what_is_not_finite_shows_in_a_quantised_cache(name, wrong):
    case = make_case((3, 4, 2, 64, 8), torch.float32, norm=False)
    num_blocks, block_size, num_kv_heads, _ = case["key_cache"].shape
    case["qkv"][0, -1, 3] = wrong  # of a value head
    scales = torch.zeros(2, num_blocks, num_kv_heads, block_size, device=DEVICE)
    caches = torch.zeros(2, *case["key_cache"].shape, dtype=torch.int8, device=DEVICE)
    quantised = {"key_cache": caches[0], "value_cache": caches[1]}
    for fixed in (None, torch.ones(2, device=DEVICE)):
        scales.zero_()
        quantised |= {"key_scales": scales[0], "value_scales": scales[1], "fixed_value_scales": fixed}
        load_kernels(name).rotary_store_kv(**{**case, **quantised})
        assert int(scales.isnan().sum()) == 1


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([32, 0], "slot_mapping must be between 0 and 31, the cache's slots, got 0 to 32"),
        ([3, -1], "slot_mapping must be between 0 and 31, the cache's slots, got -1 to 3"),
        ([3, 3], r"slot_mapping must not name a place twice, got \[3\] more than once"),
    ],
    ids=str,
)
def test_debug_mode_checks_slots(monkeypatch, slots, message):
    monkeypatch.setenv("PAGED_DEBUG", "1")
    case = make_case((2, 4, 2, 16, 8), torch.float32, norm=False)
    rotary_store_kv = load_kernels("triton").rotary_store_kv
    rotary_store_kv(**{**case, "slot_mapping": torch.tensor([31, 0], device=DEVICE)})
    with pytest.raises(ValueError, match=message):
        rotary_store_kv(**{**case, "slot_mapping": torch.tensor(slots, device=DEVICE)})
