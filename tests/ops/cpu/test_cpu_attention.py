"""The CPU kernels for attention and rows: every option, batch invariance, threads."""

import itertools
import random
import threading

import numpy as np
import pytest
import torch
from numba import njit

from paged.kernels import reference
from paged.kernels.attention_options import MAX_GROUP
from paged.kernels.cpu import backend as numba_kernels
from paged.kernels.cpu.attention.paged_attention import (
    LEAST_ROWS,
    SPLIT_KEYS,
    paged_attention,
    plan_attention,
    plan_units,
)
from paged.kernels.cpu.compiled.simd.memory import load, store
from paged.kernels.cpu.compiled.simd.vectors import exp2, exp2_of_negative
from paged.kernels.cpu.launch import tasks
from paged.kernels.cpu.linear import linear as numba_linear
from paged.kernels.cpu.rows import take_rows as numba_lookup
from paged.kernels.cpu.target import HAS_TILES, LANES, VECTOR_BYTES
from paged.kernels.plain import backend as torch_kernels
from tests.ops.test_attention_variants import OPTIONS, PAIRS, with_options
from tests.support.error_bounds import assert_exact_enough
from tests.support.kernel_cases import DEVICE, attend, inputs_of, quantized, ragged_case, take_sequences

pytestmark = pytest.mark.skipif(
    DEVICE != "cpu", reason="numba kernels are for a CPU, tensors here are on a GPU"
)

QUANTIZED = (torch.int8, torch.float8_e4m3fn)
# In bfloat16 some CPUs multiply pairs, of which these are one and a half vectors, two, two and a half; the
# whole ones fill AMX's tiles, as do the three of the last. Caches of 8 bits become such tiles.
SHAPES = [
    (torch.float32, 32, None),
    *((torch.bfloat16, head_dim, None) for head_dim in (48, 64, 80, 96)),
    *((torch.float32, 32, kind) for kind in QUANTIZED),
    *((torch.bfloat16, head_dim, kind) for kind in QUANTIZED for head_dim in (64, 80, 96)),
]
SEQ_LENS = [1, 2, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129]  # around the edges of a tile


def case_over(cache, seq_lens, query_lens, **options):
    """Make a ragged batch over a cache of the same dtype, or of 8 bits."""
    case = ragged_case(seq_lens, query_lens, **options)
    return case if cache is None else quantized(case, cache)


def paged_attention_from_nan(**case):
    """Run attention with scratch memory full of NaN, and wrong block numbers wherever no block is needed."""
    sizes, case["block_tables"] = case["seq_lens"].tolist(), case["block_tables"].clone()
    for seq, (table, size) in enumerate(zip(case["block_tables"], sizes, strict=True)):
        block_size, new = case["key_cache"].shape[1], case["cu_seqlens_q"].diff()[seq]
        table[-(-size // block_size) :] = 2**31 - 1
        if case["sliding_window"] is not None:
            table[: max(0, size - new - case["sliding_window"] + 1) // block_size] = 2**31 - 1
    attend(paged_attention, **case)  # allocates the scratch memory
    tasks._local.buffer.fill_(255)
    return attend(paged_attention, **case)


@pytest.mark.parametrize("chosen", [(), *((option,) for option in OPTIONS), *PAIRS], ids="-".join)
def test_options_alone_and_in_pairs(chosen):
    generator = random.Random(str(chosen))
    seq_lens = generator.sample(SEQ_LENS, 5)
    query_lens = [generator.randint(0, min(n, 40)) for n in seq_lens]
    shape = {"num_heads": 6, "num_kv_heads": 2, "block_size": generator.choice([8, 16, 128])}
    case = with_options(chosen, seq_lens, query_lens, generator, **shape)
    assert_exact_enough(attend(paged_attention, **case), case, reference.paged_attention, "numba")


@pytest.mark.parametrize(("dtype", "head_dim", "cache"), SHAPES, ids=str)
def test_a_token_has_the_same_bits_alone_in_a_batch_in_chunks_and_as_a_decode(dtype, head_dim, cache):
    """Across splits, with a sliding window, with one head or many in a unit, with any number of threads."""
    for window in (None, 700):
        seq_len = 2 * SPLIT_KEYS + 70
        options = {"num_heads": 6, "head_dim": head_dim, "dtype": dtype, "sliding_window": window}
        case = case_over(cache, [seq_len, 5, 300], [90, 1, 300], **options)
        together = paged_attention_from_nan(**case)
        assert_exact_enough(together, case, reference.paged_attention, "numba")
        for first, end in ((0, 1), (1, 2), (2, 9), (0, 33), (33, 90), (89, 90)):
            alone = {
                **take_sequences(case, [0]),
                "query": case["query"][first:end],
                "seq_lens": torch.tensor([seq_len - 90 + end], dtype=torch.int32),
                "cu_seqlens_q": torch.tensor([0, end - first], dtype=torch.int32),
                "max_seqlen_q": end - first,
            }
            assert torch.equal(paged_attention_from_nan(**alone), together[first:end])


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 32), (torch.bfloat16, 64)], ids=str)
def test_tokens_that_see_later_ones_have_the_same_bits_in_chunks_and_with_any_neighbours(dtype, head_dim):
    """Across splits, with a window, where texts stand before, between and behind spans."""
    for window in (None, 700):
        seq_len = SPLIT_KEYS + 120
        options = {"num_heads": 6, "head_dim": head_dim, "dtype": dtype, "sliding_window": window}
        case = ragged_case([seq_len, 40], [300, 40], **options)
        first = seq_len - 300
        spans = [(first + 3, first + 8), (first + 40, first + 140), (first + 140, first + 240)]
        last_keys = [*range(first, seq_len), *range(40)]
        for start, end in spans:
            last_keys[start - first : end - first] = [end - 1] * (end - start)
        case["last_keys"] = torch.tensor(last_keys, dtype=torch.int32)
        together = paged_attention_from_nan(**case)
        assert_exact_enough(together, case, reference.paged_attention, "numba")
        texts = paged_attention_from_nan(**{**case, "last_keys": None})
        is_text = case["last_keys"] == torch.tensor([*range(first, seq_len), *range(40)])
        assert torch.equal(together[is_text], texts[is_text]), "a span changes the bits of texts"
        for start, end in ((0, 300), (0, 40), (40, 140), (140, 300), (3, 8), (240, 241)):
            alone = {
                **take_sequences(case, [0]),
                "query": case["query"][start:end],
                "seq_lens": torch.tensor([first + end], dtype=torch.int32),
                "cu_seqlens_q": torch.tensor([0, end - start], dtype=torch.int32),
                "max_seqlen_q": end - start,
                "last_keys": case["last_keys"][start:end],
            }
            assert torch.equal(paged_attention_from_nan(**alone), together[start:end])


@pytest.mark.parametrize("num_threads", [1, 4], ids="num_threads={}".format)
def test_splits_outside_of_the_window_weigh_nothing(num_threads):
    """Even if a unit has no other split, and whatever was in its memory before."""
    before = torch.get_num_threads()
    case = ragged_case(
        [4 * SPLIT_KEYS + 9], [1], num_heads=6, num_kv_heads=2, head_dim=32, sliding_window=100
    )
    try:
        torch.set_num_threads(num_threads)
        assert_exact_enough(paged_attention_from_nan(**case), case, reference.paged_attention, "numba")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("num_kv_heads", "shape"), [*zip(itertools.cycle([1, 4, 8]), SHAPES)], ids=str)
def test_decodes_have_the_same_bits_in_a_batch_and_alone(num_kv_heads, shape):
    """In turns, each kind of cache meets each number of heads."""
    dtype, head_dim, cache = shape
    seq_lens = [3, 64, 65, 1000, 130, 7, 900, 1025, 64, 12]
    options = {"num_heads": 8, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "dtype": dtype}
    case = case_over(cache, seq_lens, [1] * len(seq_lens), **options)
    together = attend(paged_attention, **case)
    assert_exact_enough(together, case, reference.paged_attention, "numba")
    for i in range(len(seq_lens)):
        assert torch.equal(attend(paged_attention, **take_sequences(case, [i])), together[i : i + 1])


def test_tiles_that_linux_refuses_are_not_used(monkeypatch):
    """Even by cached code, compiled in a process that was allowed to use them."""
    case = ragged_case([300, 70], [300, 1], head_dim=64, dtype=torch.bfloat16)
    allowed = attend(paged_attention, **case)
    monkeypatch.setattr("paged.kernels.cpu.attention.paged_attention.HAS_TILES", False)
    refused = attend(paged_attention, **case)
    assert_exact_enough(refused, case, reference.paged_attention, "numba")
    assert torch.equal(refused, allowed) is not HAS_TILES, "vectors give other last bits in places"


@pytest.mark.parametrize("group", [1, 3, 8, 16, 20], ids="group={}".format)
@pytest.mark.parametrize("window", [None, 37], ids="window={}".format)
def test_decodes_have_the_same_bits_over_blocks_of_any_size(group, window):
    """AMX reads K in the cache if blocks are a multiple of 16 tokens and at most 16 rows share a KV head."""
    seq_lens, shape = [1, 16, 17, 47, 100, 129, 1030], {"num_heads": 2 * group, "num_kv_heads": 2}
    case = ragged_case(
        seq_lens, [1] * 7, head_dim=64, dtype=torch.bfloat16, block_size=8, sliding_window=window, **shape
    )
    expected = paged_attention_from_nan(**case)
    assert_exact_enough(expected, case, reference.paged_attention, "numba")
    for block_size in (16, 48, 128):
        other = ragged_case(
            seq_lens,
            [1] * 7,
            head_dim=64,
            dtype=torch.bfloat16,
            block_size=block_size,
            sliding_window=window,
            **shape,
        )
        for seq, seq_len in enumerate(seq_lens):
            tokens = torch.arange(0 if window is None else max(0, seq_len - window), seq_len)
            to, source = (
                (c["block_tables"][seq, tokens // size].long(), tokens % size)
                for c, size in ((other, block_size), (case, 8))
            )
            for name in ("key_cache", "value_cache"):
                other[name][to] = case[name][source]
        assert torch.equal(paged_attention_from_nan(**{**other, "query": case["query"]}), expected)


@pytest.mark.parametrize("num_threads", [1, 3, 8], ids="num_threads={}".format)
def test_units_cover_every_row_head_and_split_once(num_threads):
    generator = np.random.default_rng(num_threads)
    for _ in range(50):
        num_kv_heads = int(generator.integers(1, 5))
        group = int(generator.choice([1, 3, 16]))
        seq_lens = generator.integers(1, 5000, size=int(generator.integers(1, 30))).astype(np.int32)
        query_lens = np.minimum(seq_lens, generator.choice([0, 1, 1, 1, 3, 70, 500], size=len(seq_lens)))
        cu = np.concatenate([[0], query_lens.cumsum()]).astype(np.int32)
        plan = plan_units(seq_lens, cu, num_kv_heads * group, num_kv_heads, num_threads)
        seen = set()
        for seq, first, end, head, end_head, split, end_split, _part in plan.units.tolist():
            for place in np.ndindex(end - first, end_head - head, end_split - split):
                where = (seq, first + place[0], head + place[1], split + place[2])
                assert where not in seen
                seen.add(where)
            assert (end - first) * group * (end_head - head) <= plan.max_rows
        assert len(seen) == sum(
            int(q) * num_kv_heads * -(-int(n) // SPLIT_KEYS)
            for n, q in zip(seq_lens, query_lens, strict=True)
        )
        parts = sorted(unit[7] for unit in plan.units.tolist() if unit[7] >= 0)
        assert len(parts) == len(set(parts)) == sum(int(merge[1]) for merge in plan.merges)


@pytest.mark.parametrize(
    ("num_threads", "num_units"),
    [(1, 32), (16, 64), (17, 128), (100, 256)],
    ids=["1-in-32", "16-in-64", "17-in-128", "100-in-256"],
)
@pytest.mark.parametrize("num_decodes", [0, 50], ids="num_decodes={}".format)
def test_a_prompt_is_cut_smaller_where_threads_would_have_no_unit(num_threads, num_units, num_decodes):
    """No matter how many short decodes are beside it."""
    lengths = np.array([512] + [1] * num_decodes, np.int32)
    plan = plan_units(lengths, np.concatenate([[0], lengths.cumsum()]).astype(np.int32), 32, 4, num_threads)
    assert (plan.units[:, 0] == 0).sum() == num_units


def test_two_threads_at_once_do_not_share_scratch_memory():
    cases = [ragged_case([200 + i, 50], [200 + i, 1]) for i in range(2)]
    expected = [attend(paged_attention, **case) for case in cases]
    wrong = []

    def work(i):
        for _ in range(20):
            if not torch.equal(attend(paged_attention, **cases[i]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("query_lens", [[1] * 12, [3, 1, 20], [0, 0]], ids=str)
def test_more_heads_share_keys_than_a_unit_has_rows(query_lens):
    """Then a unit has one token with all its heads."""
    assert MAX_GROUP > LEAST_ROWS
    seq_lens = [20 if query_len else 0 for query_len in query_lens]
    case = ragged_case(seq_lens, query_lens, num_heads=MAX_GROUP, num_kv_heads=1, head_dim=16)
    assert_exact_enough(attend(paged_attention, **case), case, reference.paged_attention, "numba")


def test_a_plan_is_for_tables_of_one_width():
    case = ragged_case([130, 70], [5, 1])
    plan = plan_attention(*inputs_of(case))
    assert torch.equal(attend(paged_attention, plan, **case), attend(paged_attention, **case))
    wider = torch.nn.functional.pad(case["block_tables"], (0, 3))
    with pytest.raises(ValueError, match="made for tensors of another layout"):
        attend(paged_attention, plan, **{**case, "block_tables": wider})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_normalized_rows_of_whole_pages_are_padded(dtype):
    """And have the same bits as few rows."""
    x, weight = torch.randn(70, 2048, dtype=dtype), torch.randn(2048, dtype=dtype)
    residual = torch.randn_like(x)
    halves = zip(x.split(35), residual.clone().split(35), strict=True)
    parts = [numba_kernels.rms_norm(half, weight, 1e-6, added) for half, added in halves]
    out = numba_kernels.rms_norm(x, weight, 1e-6, residual)
    assert out.stride() == (2048 + 64 // x.itemsize, 1)
    assert torch.equal(out, torch.cat(parts))
    assert all(part.is_contiguous() for part in parts)


def test_powers_of_2_to_a_unit_in_the_last_place():
    @njit
    def powers(source, to, count, negative):
        for at in range(0, 4 * count, VECTOR_BYTES):
            x = load(source + at)
            store(to + at, exp2_of_negative(x) if negative else exp2(x))

    x = np.linspace(-126, 127.4, 2**18, dtype=np.float32)
    x[:6] = 0.0, -0.0, 1.0, -126.0, 127.0, -1e-30
    for negative in (False, True):
        own = np.minimum(x, 0) if negative else x
        expected, out = np.exp2(own.astype(np.float64)), np.empty_like(own)
        powers(own.ctypes.data, out.ctypes.data, len(own), negative)
        assert (np.abs(out - expected) <= np.spacing(expected.astype(np.float32))).all()
    ends = np.resize(np.float32([-126.6, -1e9, -np.inf, 127.6, 1e9, np.inf, np.nan]), 7 * LANES)
    out = np.empty_like(ends)
    powers(ends.ctypes.data, out.ctypes.data, len(ends), False)
    assert np.array_equal(out[:7], np.float32([0, 0, 0, np.inf, np.inf, np.inf, np.nan]), equal_nan=True)


def test_rows_that_the_kernels_would_misread_are_left_to_torch():
    """The kernels would read or write beyond the end of each of these, if they took any."""
    x, strided = torch.randn(5, 64), torch.randn(64, 2)[:, 0]
    assert torch.equal(numba_kernels.rms_norm(x, strided, 1e-6), torch_kernels.rms_norm(x, strided, 1e-6))
    other = torch.randn(64, 5).T
    added = other + x
    numba_kernels.rms_norm(x, torch.ones(64), 1e-6, other)
    assert torch.equal(other, added)

    cos, caches = torch.randn(16, 5).T, torch.zeros(2, 2, 4, 2, 32)
    slots, qkv, expected = torch.arange(5), torch.randn(5, 8, 32), torch.zeros(2, 2, 4, 2, 32)
    torch_kernels.rotary_store_kv(qkv.clone(), cos, cos, *expected, slots)
    numba_kernels.rotary_store_kv(qkv.clone(), cos, cos, *caches, slots)
    assert torch.equal(caches, expected)
    scales = torch.zeros(2, 2, 4, 2)  # as the cache has them, not [num_blocks, num_kv_heads, block_size]
    with pytest.raises(ValueError, match=r"key_scales must have shape \[2, 2, 4\], got \[2, 4, 2\]"):
        numba_kernels.rotary_store_kv(
            qkv.clone(), cos, cos, *caches.to(torch.int8), slots, key_scales=scales[0], value_scales=scales[1]
        )
    for dtype in (torch.int8, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match="needs key_scales"):
            numba_kernels.rotary_store_kv(qkv.clone(), cos, cos, *caches.to(dtype), slots)


@pytest.mark.parametrize("size", [1, 7, 8, 24, 37], ids="size={}".format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_of_any_length_are_not_left_to_torch(size, dtype, monkeypatch):
    """A step with a torch operation in it cannot be recorded. Other tests compare the results."""
    x, weight = torch.randn(3, 2 * size).to(dtype), torch.ones(2 * size, dtype=dtype)
    angles, slots = torch.randn(3, size), torch.arange(3)
    cache = torch.zeros(2, 2, 4, 1, 2 * size + 1, dtype=dtype)
    caches = cache[..., :-1]
    for name in ("rms_norm", "rms_norm_into", "gelu", "add", "scale_and_cap", "scale_rows"):
        monkeypatch.delattr(reference, name)
    for place in (
        "row_kernels.silu_and_mul",
        "activations.gelu_and_mul",
        "layer_norm.layer_norm",
        "rotary_store_kv.rotary_store_kv",
    ):
        monkeypatch.delattr(f"paged.kernels.cpu.rows.{place}_by_torch")
    numba_kernels.rms_norm_into(x, weight, 1e-6, x.clone())
    numba_kernels.gelu_and_mul(x)
    numba_kernels.layer_norm(x, weight, weight, 1e-6, x.clone())
    numba_kernels.gelu(x.clone(), tanh=False)
    numba_kernels.add(x, x.clone())
    numba_kernels.scale_and_cap(x.clone(), 2.0, 3.0)
    numba_kernels.scale_rows(x.clone(), angles[:, 0].contiguous())
    numba_kernels.rms_norm(x, weight, 1e-6, x.clone())
    numba_kernels.silu_and_mul(x)
    heads = x.repeat(4, 1, 1).transpose(0, 1).contiguous()
    numba_kernels.rotary_store_kv(heads, angles, angles, *caches, slots)
    assert torch.equal(caches[1, 0, :3, 0], x)
    assert not cache[..., -1].any()


def test_wrong_inputs_are_named():
    case = ragged_case([3], [1])
    with pytest.raises(ValueError, match="sliding_window"):
        attend(paged_attention, **{**case, "sliding_window": 0})
    with pytest.raises(ValueError, match="seq_lens"):
        attend(paged_attention, **{**case, "seq_lens": case["seq_lens"].long()})
    with pytest.raises(ValueError, match="query must hold numbers, got a Tensor on meta"):
        attend(paged_attention, **{**case, "query": case["query"].to("meta")})


def test_nan_reaches_its_own_row_alone():
    case = ragged_case([70, 40], [1, 1])
    case["query"] = case["query"].clone()
    case["query"][0] = float("nan")
    out = attend(paged_attention, **case)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("size", [1, 5, 8, 37], ids="size={}".format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rows_of_tables(size, dtype):
    """Rows of any length, of strided tables and by strided indices; an index out of range raises."""
    table, numbers = torch.randn(50, size).to(dtype), torch.randint(50, (2, 40))
    for indices in (numbers[0], numbers[0, ::3], numbers.T[:, 1], numbers[0, :0]):
        for strided in (table, torch.cat([table, table], 1)[:, :size], table.T.contiguous().T):
            taken, out = table[indices], torch.full((len(indices), size), 7.0, dtype=dtype)
            assert torch.equal(numba_lookup.take_rows(strided, indices), taken)
            assert numba_lookup.take_rows(strided, indices, out) is out
            assert torch.equal(out, taken)
            assert torch.equal(reference.take_rows(strided, indices), taken)
        panels = numba_linear.pack(table)
        assert torch.equal(numba_lookup.take_panel_rows(panels, indices, dtype), table[indices])
    with pytest.raises(ValueError, match="indices must be between 0 and 49, the table's rows, got 50 to 50"):
        numba_lookup.take_rows(table, torch.tensor([50]))
    for out in (torch.empty(1, size + 1, dtype=dtype), torch.empty(2, size, dtype=dtype), table[:1].double()):
        with pytest.raises(ValueError, match="out must "):
            numba_lookup.take_rows(table, torch.tensor([0]), out)
