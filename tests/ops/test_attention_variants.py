"""Every option of attention, alone and in pairs, on small adversarial ragged batches."""

import random
from itertools import combinations

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paged.kernels import reference
from paged.kernels.backend import load_kernels
from paged.kernels.gpu.attention import launches
from paged.kernels.gpu.attention import paged_attention as triton_attention
from paged.kernels.gpu.attention.config import INTERPRETED_SPLIT
from paged.kernels.gpu.target import in_interpreter
from tests.support.error_bounds import assert_exact_enough
from tests.support.kernel_cases import (
    DEVICE,
    attend,
    last_keys_of,
    quantized,
    ragged_case,
    take_sequences,
)

OPTIONS = ("window", "softcap", "sinks", "int8", "fp8", "mla", "last_keys")
PAIRS = [pair for pair in combinations(OPTIONS, 2) if pair != ("int8", "fp8")]  # a cache has one dtype
# Around the edges of a tile (16), a Q-block (8 with two heads a group) and a split (64).
SEQ_LENS = [1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 47, 63, 64, 65]


@pytest.fixture(autouse=True, scope="module")
def short_splits():
    """Those of the interpreter, on a GPU too: else nothing here is split there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_attention, "split_size", lambda _: INTERPRETED_SPLIT)
        yield


def with_options(chosen, seq_lens, query_lens, generator, **shape):
    """Make a case with these options on."""
    num_heads = shape.get("num_heads", 4)
    if "mla" in chosen:
        shape |= {"head_dim": 48, "value_dim": 32, "value_in_key": True}
    case = ragged_case(seq_lens, query_lens, sliding_window=19 if "window" in chosen else None, **shape)
    if "int8" in chosen or "fp8" in chosen:
        case = quantized(case, torch.int8 if "int8" in chosen else torch.float8_e4m3fn)
    if "softcap" in chosen:
        case["softcap"] = 1.5
    if "sinks" in chosen:
        case["sinks"] = torch.randn(num_heads, device=DEVICE)
    if "last_keys" in chosen:
        case["last_keys"] = last_keys_of(seq_lens, query_lens, generator)
    if generator.random() < 0.5:
        group = num_heads // shape.get("num_kv_heads", 2)
        # The rows that every target's tiles have for such heads.
        rows = 64 if in_interpreter() else 16 if case["query"].dtype == torch.float32 else 32
        case["max_decode_q"] = generator.randint(1, rows // group)
    return case


@st.composite
def batches(draw):
    """Sequence lengths and new tokens of each: decodes, chunks, none; one huge among tiny ones."""
    seq_lens = draw(st.lists(st.sampled_from(SEQ_LENS), min_size=1, max_size=3))
    if draw(st.booleans()):
        seq_lens[draw(st.integers(0, len(seq_lens) - 1))] = draw(st.sampled_from([129, 150]))
    query_lens = [min(n, draw(st.sampled_from([0, 1, 1, 2, 7, 8, 9, 20]))) for n in seq_lens]
    return seq_lens, query_lens


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    batch=batches(),
    seed=st.integers(0, 2**16),
    heads=st.sampled_from([(2, 1), (7, 1), (3, 3), (4, 2)]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_pairs_of_options_match_float64(pair, batch, seed, heads, dtype):
    if "fp8" in pair and not in_interpreter() and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no e4m3")
    torch.manual_seed(seed)
    block_size = [8, 16, 32][seed % 3]
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "block_size": block_size, "dtype": dtype}
    case = with_options(pair, *batch, random.Random(seed), **sizes)
    assert_exact_enough(attend(triton_attention.paged_attention, **case), case, reference.paged_attention)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_weight_times_a_scale_is_not_rounded_to_float16(monkeypatch, kind):
    """It may be less than that holds. Triton's interpreter multiplies no bfloat16: its name must do."""
    monkeypatch.setattr(launches, "in_interpreter", lambda: False)
    monkeypatch.setattr(triton_attention, "current_target", lambda: "sm_90")
    launched = []

    def bind(_kernel, _grid, *, layer, **_):
        return lambda *_: launched.append(layer.WEIGHT_DTYPE)

    monkeypatch.setattr(launches, "BoundLaunch", bind)
    case = ragged_case([30, 40], [1, 9], dtype=torch.float16)
    attend(triton_attention.paged_attention, **case)
    attend(triton_attention.paged_attention, **quantized(case, kind))
    assert launched == [tl.float16, tl.float16, tl.bfloat16, tl.bfloat16]


@pytest.mark.gpu  # where products are of half precision
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_small_values_of_a_quantised_cache_survive_float16(kind):
    if kind == torch.float8_e4m3fn and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no e4m3")
    case = ragged_case([70, 40], [1, 9], dtype=torch.float16)
    case["value_cache"] = case["value_cache"].abs() * 1e-3
    case = quantized(case, kind)
    assert_exact_enough(attend(triton_attention.paged_attention, **case), case, reference.paged_attention)


@pytest.mark.parametrize("chosen", [("window", "sinks"), ("softcap", "int8"), ("mla", "sinks")], ids="+".join)
def test_neighbours_do_not_change_a_bit(chosen):
    """Each sequence alone or in other company."""
    query_lens = [1, 30, 1, 3, 8]
    case = with_options(chosen, [131, 30, 1, 65, 129], query_lens, random.Random(0))
    together = attend(triton_attention.paged_attention, **case).split(query_lens)
    for some in ([3], [4, 1], [3, 2, 0]):
        fewer = take_sequences(case, some)
        got = attend(triton_attention.paged_attention, **fewer)
        torch.testing.assert_close(got, torch.cat([together[i] for i in some]), rtol=0, atol=0)


def test_several_tokens_at_once_have_the_bits_of_one_at_a_time():
    """What a speculative decoder verifies is what it would have decoded.

    One head a group, for the interpreter's matrix product depends on a row's place in it.
    """
    case = ragged_case([200, 66], [4, 3], num_heads=1, num_kv_heads=1)
    together = attend(triton_attention.paged_attention, **case, max_decode_q=4)
    for token, (seq, seq_len) in enumerate(
        [(0, 197), (0, 198), (0, 199), (0, 200), (1, 64), (1, 65), (1, 66)]
    ):
        alone = {
            **case,
            "query": case["query"][token : token + 1],
            "block_tables": case["block_tables"][seq : seq + 1],
            "seq_lens": torch.tensor([seq_len], dtype=torch.int32, device=DEVICE),
            "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
            "max_seqlen_q": 1,
        }
        got = attend(triton_attention.paged_attention, **alone, max_decode_q=4)
        torch.testing.assert_close(got[0], together[token], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chosen", [("softcap", "sinks"), ("int8", "window")], ids="+".join)
def test_torch_backend_takes_every_option(chosen, dtype):
    case = with_options(chosen, [70, 20], [1, 5], random.Random(0), dtype=dtype)
    got = attend(load_kernels("torch").paged_attention, **case)
    assert_exact_enough(got, case, reference.paged_attention, "torch")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sinks": torch.ones(3)}, r"sinks must have shape \[4\], got \[3\]"),
        ({"last_keys": torch.ones(3).int()}, r"last_keys must have shape \[2\], got \[3\]"),
        ({"last_keys": torch.ones(2)}, r"last_keys must be torch.int32, got torch.float32"),
        ({"softcap": -1.0}, "softcap must be greater than 0, got -1.0"),
        ({"key_scales": torch.ones(1)}, "key_scales belong to a quantised cache; this one is torch.float32"),
        ({"max_decode_q": 33}, "max_decode_q must be between 1 and (8|32), got 33"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_impossible_combinations_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        attend(triton_attention.paged_attention, **{**ragged_case([3, 4], [1, 1]), **change})


@pytest.mark.parametrize("name", ["triton", "torch", "numba"] if DEVICE == "cpu" else ["triton", "torch"])
def test_quantised_cache_needs_its_scales(name):
    paged_attention = load_kernels(name).paged_attention
    case = quantized(ragged_case([3], [1]), torch.int8)
    with pytest.raises(ValueError, match=r"a cache of torch\.int8 needs value_scales"):
        attend(paged_attention, **{**case, "value_scales": None})
    half = {name: case[name].half() for name in ("query", "key_cache", "value_cache")}
    with pytest.raises(ValueError, match=r"key_scales belong to a quantised cache; this one is "):
        attend(paged_attention, **{**case, **half})
    half["query"] = half["query"].bfloat16()
    with pytest.raises(ValueError, match=r"key_cache must be one of torch\.bfloat16, .*, got torch\.float16"):
        attend(paged_attention, **{**case, **half})


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "gfx942", "gfx1100"])
def test_fp8_is_refused_where_there_is_none(monkeypatch, target):
    monkeypatch.setattr(triton_attention, "current_target", lambda: target)
    case = quantized(ragged_case([3], [1]), torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=rf"float8_e4m3fn needs sm_89 or newer, this is {target}; use"):
        attend(triton_attention.paged_attention, **case)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_tables": [[0, 99]]}, r"block_tables\[0\] must hold blocks below 5, got \[0, 99\]"),
        ({"seq_lens": [49]}, r"seq_lens\[0\] must hold its 2 new tokens and .* got 49"),
        ({"seq_lens": [1]}, r"seq_lens\[0\] must hold its 2 new tokens and .* got 1"),
        ({"cu_seqlens_q": [0, 3]}, r"cu_seqlens_q must rise from 0 to at most 2, got \[0, 3\]"),
        ({"max_seqlen_q": 1}, "max_seqlen_q is 1, and sequence 0 has 2 new tokens"),
        ({"min_seqlen_q": 3, "max_seqlen_q": 3}, "min_seqlen_q is 3, and sequence 0 has 2 new tokens"),
        ({"last_keys": [17, 19]}, "last_keys of position 18 of sequence 0 must be from 18 to 19, got 17"),
        ({"last_keys": [19, 20]}, "last_keys of position 19 of sequence 0 must be from 19 to 19, got 20"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_debug_mode_checks_what_tables_hold(monkeypatch, change, message):
    monkeypatch.setenv("PAGED_DEBUG", "1")
    case = ragged_case([20], [2])
    attend(triton_attention.paged_attention, **case)
    for name, value in change.items():
        is_number = isinstance(value, int)
        case[name] = value if is_number else torch.tensor(value, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        attend(triton_attention.paged_attention, **case)


@pytest.mark.parametrize("name", ["query", "key_cache", "value_cache"])
def test_what_32_bits_do_not_reach_is_refused(name):
    case = ragged_case([3], [1], dtype=torch.float16)
    memory = torch.from_numpy(np.zeros(2**31 + 64, np.float16)).to(DEVICE)  # of which none is touched
    far = memory.as_strided((*case[name].shape[:-2], 2, 32), (0,) * (case[name].dim() - 2) + (2**31, 1))
    with pytest.raises(ValueError, match=rf"{name} must span less than 2\*\*31 elements in each {name}\[i\]"):
        attend(triton_attention.paged_attention, **{**case, name: far})
