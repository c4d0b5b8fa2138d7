import math
from itertools import accumulate

import numpy as np
import pytest
import torch

from benchmarks.costs import paged_attention_cost
from paged.kernels import reference
from paged.kernels.attention_options import AttentionOptions
from paged.kernels.backend import load_kernels
from paged.kernels.gpu.attention import launches
from paged.kernels.gpu.attention import paged_attention as triton_attention
from paged.kernels.gpu.attention.config import FAMILIES, choose_config, largest_head_dim, split_size
from paged.kernels.gpu.attention.split_kv import MAX_SPLITS, Splits, plan_decodes
from paged.kernels.gpu.target import in_interpreter
from tests.support.error_bounds import SAME_IN_FLOAT64, assert_exact_enough
from tests.support.kernel_cases import (
    DEVICE,
    IMPLEMENTATIONS,
    attend,
    cu_seqlens,
    inputs_of,
    ragged_case,
    take_sequences,
)

# Lengths on both sides of a tile (16 in the interpreter), a block and a split (64); one with nothing to do.
DECODES = ([1, 15, 16, 17, 63, 64, 65, 128, 131, 0], [1] * 9 + [0])
CHUNKS = ([1, 16, 17, 33, 50, 40], [1, 16, 17, 5, 0, 32])
MIXED = ([70, 17, 33, 9, 66], [1, 17, 2, 0, 1])

CASES = [
    pytest.param(*DECODES, {}, id="decodes"),
    pytest.param(*CHUNKS, {}, id="chunks"),
    pytest.param(*MIXED, {"num_heads": 7, "num_kv_heads": 1, "block_size": 8}, id="mixed-7/1-block8"),
    pytest.param(*MIXED, {"num_heads": 6, "num_kv_heads": 2, "head_dim": 80}, id="mixed-6/2-dim80"),
    pytest.param(*MIXED, {"num_heads": 3, "num_kv_heads": 3, "head_dim": 96}, id="mixed-3/3-dim96"),
    pytest.param([67, 20], [1, 11], {"num_heads": 16, "num_kv_heads": 1, "head_dim": 256}, id="16/1-dim256"),
    pytest.param(
        [300, 20], [1, 2], {"num_heads": 5, "num_kv_heads": 1, "block_size": 256}, id="5/1-block256"
    ),
    pytest.param(*DECODES, {"sliding_window": 1}, id="decodes-window1"),
    pytest.param(*DECODES, {"sliding_window": 17, "block_size": 8}, id="decodes-window17"),
    pytest.param([200, 81, 40], [1] * 3, {"sliding_window": 64}, id="decodes-window-of-2-splits"),
    pytest.param(*CHUNKS, {"sliding_window": 7, "block_size": 32}, id="chunks-window7"),
    pytest.param([90, 70], [40, 70], {"sliding_window": 33}, id="chunks-window33"),
]
# Keys and values of different widths, and wide ones: (head_dim, value_dim, whether values lie in the keys).
WIDTHS = [
    (48, 32, False),
    (32, 80, False),
    (72, 40, False),
    (192, 128, False),
    (320, 320, False),
    (576, 512, True),
    (576, 512, False),
    (576, 576, False),
]
CASES += [
    pytest.param(
        [19, 70, 5],
        [1, 2, 5],
        {
            "num_heads": 3,
            "num_kv_heads": 1,
            "head_dim": head_dim,
            "value_dim": value_dim,
            "value_in_key": value_in_key,
        },
        id=f"dim{head_dim}-{value_dim}{'-in-key' * value_in_key}",
    )
    for head_dim, value_dim, value_in_key in WIDTHS
]


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize(("seq_lens", "query_lens", "shape"), CASES)
def test_matches_float64(name, dtype, seq_lens, query_lens, shape):
    case = ragged_case(seq_lens, query_lens, dtype=dtype, **shape)
    got = attend(load_kernels(name).paged_attention, **case)
    assert got.is_contiguous()
    assert_exact_enough(got, case, reference.paged_attention, name)


@pytest.mark.parametrize("window", [None, 9], ids="window={}".format)
def test_reference_is_dense_attention(window):
    """One sequence whose blocks lie in order, against torch in float64."""
    case = ragged_case([37], [20], dtype=torch.float64, num_heads=6, sliding_window=window)
    key, value = (
        case[cache][case["block_tables"][0, :3].long()]
        .flatten(0, 1)[:37]
        .repeat_interleave(3, 1)
        .nan_to_num()
        for cache in ("key_cache", "value_cache")
    )  # [37, 6, 32]
    mask = torch.ones(37, 37, dtype=torch.bool, device=DEVICE).tril()
    if window is not None:
        mask &= ~torch.ones_like(mask).tril(-window)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (case["query"], key, value)), attn_mask=mask[17:], scale=case["scale"]
    )
    got = attend(reference.paged_attention, **case)
    torch.testing.assert_close(got, expected.transpose(0, 1), **SAME_IN_FLOAT64)


@pytest.mark.parametrize("window", [None, 70], ids="window={}".format)
def test_neighbours_do_not_change_a_bit(window):
    """Each sequence alone, or in other company and order: other grids, splits bounds and Q-block numbers."""
    query_lens = [1, 30, 1, 3, 1, 1]
    case = ragged_case([131, 30, 1, 65, 40, 129], query_lens, sliding_window=window)
    together = attend(triton_attention.paged_attention, **case).split(query_lens)
    for chosen in ([0], [3], [5, 3, 0], [1, 0, 4, 3]):
        fewer = take_sequences(case, chosen)
        fewer["block_tables"] = fewer["block_tables"][:, : -(-int(fewer["seq_lens"].max()) // 16)]
        got = attend(triton_attention.paged_attention, **fewer)
        torch.testing.assert_close(got, torch.cat([together[i] for i in chosen]), rtol=0, atol=0)


def test_chunks_do_not_change_a_bit():
    """A prompt in one piece or in chunks of several tokens: a row sees its tiles in the same order.

    Chunks of whole Q-blocks (8 tokens) and more than a decode has, for the interpreter's matrix product
    depends on a row's place in it.
    """
    whole = ragged_case([61], [61])
    expected = attend(triton_attention.paged_attention, **whole)
    for start, end in [(0, 16), (16, 40), (40, 61)]:
        chunk = {
            **whole,
            "query": whole["query"][start:end],
            "seq_lens": torch.tensor([end], dtype=torch.int32, device=DEVICE),
            "cu_seqlens_q": torch.tensor([0, end - start], dtype=torch.int32, device=DEVICE),
        }
        got = attend(triton_attention.paged_attention, **chunk)
        torch.testing.assert_close(got, expected[start:end], rtol=0, atol=0)


def test_splits_are_capped(monkeypatch):
    """A context of more than MAX_SPLITS splits: they get longer, and the merge takes chunks of them."""
    split = choose_config(32, 2, torch.float32, "decode", triton_attention.current_target()).TILE
    monkeypatch.setattr(triton_attention, "split_size", lambda _: split)
    seq_lens = [split * (MAX_SPLITS + 3), split * 20 + 1]
    case = ragged_case(seq_lens, [1, 1], num_heads=2, num_kv_heads=1, block_size=64)
    got = attend(triton_attention.paged_attention, **case)
    assert_exact_enough(got, case, reference.paged_attention)


@pytest.mark.parametrize("name", ["triton", "numba"] if DEVICE == "cpu" else ["triton"])
@pytest.mark.parametrize("block_size", [8, 16], ids="block_size={}".format)
def test_offsets_of_more_than_32_bits(name, block_size):
    """Blocks 2^30 numbers apart, of which only what is written takes memory: the bits of a small cache."""
    kernels, results = load_kernels(name), []
    memory = torch.from_numpy(np.zeros(2**31 + 2**14, np.int8)).to(DEVICE)
    seq_len = block_size - 1
    slots = 2 * block_size + torch.arange(seq_len, device=DEVICE)
    qkv = torch.randn(seq_len, 4, 32, device=DEVICE)
    angles = torch.randn(seq_len, 16, device=DEVICE)
    lengths = torch.tensor([seq_len], dtype=torch.int32, device=DEVICE)
    for stride in (2**12, 2**30):
        # [planes of K and V, num_blocks, block_size, num_kv_heads, head_dim]
        caches = memory.as_strided((2, 3, block_size, 1, 32), (2**10, stride, 32, 32, 1))
        caches[:, 2], scales = 0, torch.zeros(2, 3, 1, block_size, device=DEVICE)
        options = {"key_scales": scales[0], "value_scales": scales[1]}
        query = kernels.rotary_store_kv(qkv.clone(), angles, angles, *caches, slots, **options)
        out = kernels.paged_attention(
            query, *caches, torch.full((1, 1), 2, dtype=torch.int32, device=DEVICE), lengths,
            cu_seqlens([seq_len]), AttentionOptions(scale=0.2, max_seqlen_q=seq_len, **options),
        )  # fmt: skip
        kernels.copy_blocks(caches, torch.tensor([[2, 1]], device=DEVICE))
        results.append((out, caches[:, 1:].clone(), scales))
    assert results[0][1].any()
    assert torch.equal(results[0][1][:, 0], results[0][1][:, 1])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@pytest.mark.parametrize("window", [0, 40], ids="window={}".format)
def test_plan_lists_every_split_of_every_decode_once(window):
    seq_lens = torch.tensor([5, 64, 65, 300, 9, 130, 0], dtype=torch.int32, device=DEVICE)
    query_lens = [1, 4, 1, 2, 9, 3, 0]
    sizes = {"max_keys": 320, "decode_q": 8, "window": window, "tile": 16, "split": 64}
    splits = Splits(len(seq_lens), **sizes)
    plan = plan_decodes(seq_lens, cu_seqlens(query_lens), splits)
    expected = []
    for seq, (seq_len, query_len) in enumerate(zip(seq_lens.tolist(), query_lens, strict=True)):
        first = max(0, seq_len - query_len - window + 1) // 16 * 16 if window else 0
        num_splits = -(-(seq_len - first) // 64) if 1 <= query_len <= 8 else 0
        expected.append([(seq, split) for split in range(num_splits)])
    work = [item for items in expected for item in items]
    *first_item, num_work = plan.first_item.tolist()
    assert [tuple(item) for item in plan.work.tolist()[:num_work]] == work
    assert first_item == [0, *accumulate(map(len, expected))]
    assert splits.most_splits * len(query_lens) >= num_work


def test_layers_of_a_batch_share_a_plan(monkeypatch):
    planned = []
    monkeypatch.setattr(triton_attention, "plan_decodes", lambda *a: planned.append(a[2]) or plan_decodes(*a))
    plans: dict = {}
    for sliding_window in (None, 9, None, 9):  # the layers of a model that mixes them
        case = ragged_case(*MIXED, sliding_window=sliding_window)
        if sliding_window not in plans:
            plans[sliding_window] = triton_attention.plan_attention(*inputs_of(case))
        got = attend(triton_attention.paged_attention, plans[sliding_window], **case)
        assert_exact_enough(got, case, reference.paged_attention)
    assert len(planned) == 2, "one without a window, and one with it"


@pytest.mark.parametrize("name", ["triton", "numba"] if DEVICE == "cpu" else ["triton"])
def test_the_plan_of_another_batch_is_not_taken(name, monkeypatch):
    """Of another number of sequences never; of other lengths it is named in debug mode."""
    kernels = load_kernels(name)
    paged_attention = kernels.paged_attention
    plan = kernels.plan_attention(*inputs_of(ragged_case([600], [2], extra_blocks=8) | {"max_decode_q": 2}))
    case = ragged_case([600, 70], [1, 1]) | {"max_decode_q": 2}  # two splits and one, on a GPU too
    with pytest.raises(ValueError, match="made for tensors of another layout"):
        attend(paged_attention, plan, **case)
    plan = kernels.plan_attention(*inputs_of(case))
    with pytest.raises(ValueError, match="or for other options"):
        attend(paged_attention, plan, **{**case, "softcap": 5.0})
    got = attend(paged_attention, plan, **case)
    assert_exact_enough(got, case, reference.paged_attention, name)
    monkeypatch.setenv("PAGED_DEBUG", "1")
    assert torch.equal(attend(paged_attention, plan, **case), got)
    others = {**case, "seq_lens": case["seq_lens"].flip(0), "block_tables": case["block_tables"].flip(0)}
    with pytest.raises(ValueError, match="made for the lengths of another batch"):
        attend(paged_attention, plan, **others)


def test_batch_without_decodes_looks_for_none(monkeypatch):
    monkeypatch.setattr(triton_attention, "plan_decodes", None)
    case = ragged_case([70, 17, 9], [2, 17, 0])
    got = attend(triton_attention.paged_attention, **case, min_seqlen_q=2)
    assert_exact_enough(got, case, reference.paged_attention)


@pytest.mark.parametrize("block_size", [16, 128], ids="block_size={}".format)
@pytest.mark.parametrize("target", ["sm_90", "sm_120", "gfx942", "gfx1100"])
def test_tiles_of_a_gpu(monkeypatch, target, block_size):
    """The tiles a GPU gets, whatever this machine is: longer than a block, and shorter."""
    monkeypatch.setattr(triton_attention, "current_target", lambda: target)
    case = ragged_case(
        [600, 200, 129], [1, 70, 129], num_heads=4, num_kv_heads=1, block_size=block_size, dtype=torch.float16
    )
    got = attend(triton_attention.paged_attention, **case)
    assert_exact_enough(got, case, reference.paged_attention)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": 0.0}, "scale must be greater than 0, got 0.0"),
        ({"max_seqlen_q": 0}, "max_seqlen_q must be between 1 and 2147483647, got 0"),
        ({"max_seqlen_q": 2.5}, "max_seqlen_q must be an int, got 2.5"),
        ({"min_seqlen_q": None}, "min_seqlen_q must be an int, got None"),
        ({"max_decode_q": 1.5}, "max_decode_q must be an int, got 1.5"),
        ({"seq_lens": torch.tensor(3).int()}, r"seq_lens must have shape \[any\], got \[\]"),
        (
            {name: torch.zeros(4, 0, 2, 32) for name in ("key_cache", "value_cache")},
            "block_size must be greater",
        ),
        ({"block_tables": torch.zeros(1, 0).int()}, r"block_tables.shape\[1\] must be greater than 0, got 0"),
        ({"query": [[1.0]]}, "query must be a tensor, got list"),
        ({"seq_lens": torch.tensor([3])}, "seq_lens must be torch.int32, got torch.int64"),
        ({"block_tables": torch.zeros(2, 1, dtype=torch.int32)}, r"block_tables must have shape \[1, any\]"),
        ({"query": torch.zeros(1, 3, 32)}, "num_heads must be a multiple of num_kv_heads, got 3 and 2"),
        ({"query": torch.zeros(1, 4, 32).double()}, "query must be one of .*, got torch.float64"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_inputs_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        attend(load_kernels("triton").paged_attention, **{**ragged_case([3], [1]), **change})


@pytest.mark.parametrize("name", ["triton", "torch", "numba"] if DEVICE == "cpu" else ["triton", "torch"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": math.inf}, r"scale must be a float between 2\*\*-126 and 2\*\*126, got inf"),
        ({"scale": math.nan}, "scale must be greater than 0, got nan"),
        ({"scale": 1e-320}, r"scale must be a float between 2\*\*-126 and 2\*\*126, got 1e-320"),
        ({"scale": None}, "scale must be a number, got None"),
        ({"softcap": math.inf}, r"softcap must be a float between 2\*\*-126 and 2\*\*13, got inf"),
        ({"softcap": torch.ones(1)}, r"softcap must be a number, got tensor"),
        ({"sliding_window": 0}, "sliding_window must be between 1 and 2147483647, got 0"),
        ({"sliding_window": 2.5}, "sliding_window must be an int, got 2.5"),
        ({"sliding_window": True}, "sliding_window must be an int, got True"),
    ],
    ids=str,
)
def test_numbers_no_kernel_computes_with_are_named(name, change, message):
    with pytest.raises(ValueError, match=message):
        attend(load_kernels(name).paged_attention, **{**ragged_case([3], [1]), **change})


def test_tokens_of_no_sequence_read_nothing(monkeypatch):
    """Their rows are undefined, and cu_seqlens_q has no second entry to look at."""
    for kernel in ("prefill_kernel", "decode_kernel"):
        monkeypatch.setattr(launches, kernel, None)
    case = ragged_case([3], [3])
    for name in ("seq_lens", "block_tables"):
        case[name] = case[name][:0]
    assert attend(triton_attention.paged_attention, **case | {"cu_seqlens_q": cu_seqlens([])}).shape == (
        3,
        4,
        32,
    )


@pytest.mark.parametrize("where", ["first", "last"])
def test_skewed_batch_costs_at_most_a_fifth_more_than_its_bytes(where):
    """1 sequence of 64k beside 63 of 500: bytes with partial results, and those of the busiest SM."""
    seq_lens = [500] * 63
    seq_lens.insert(0 if where == "first" else 63, 65536)
    config = choose_config(128, 8, torch.bfloat16, "decode", "sm_90")
    num_kv_heads, group, dim, num_sms = 4, 8, 128, 132
    sizes = {"max_keys": 65536, "decode_q": 1, "window": 0, "tile": config.TILE, "split": split_size("sm_90")}
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
    plan = plan_decodes(lengths, cu_seqlens([1] * 64), Splits(64, **sizes))
    num_work = int(plan.first_item[-1])
    own, _ = paged_attention_cost([1] * 64, seq_lens, num_kv_heads * group, num_kv_heads, dim, 2)
    moved, on_sm = 0, [0] * num_sms
    step = 65536 // MAX_SPLITS
    for item, (seq, split) in enumerate(plan.work[:num_work].tolist()):
        keys = min(seq_lens[seq] - split * step, step)
        read = -(-keys // config.TILE) * config.TILE * 2 * dim * 2 + group * dim * 2
        written = group * (2 * (dim + 2) * 4 if seq_lens[seq] > step else dim * 2)  # partials are read again
        for head in range(num_kv_heads):
            moved += read + written
            on_sm[(item * num_kv_heads + head) % num_sms] += read + written
    assert moved <= 1.2 * own
    assert max(on_sm) <= 1.2 * own / num_sms


def test_config_depends_on_the_model_alone():
    for target in ("sm_90", "sm_100"):
        for head_dim in range(16, 577, 8):
            for group in range(1, 129):
                # Keys of more than 512 dimensions have values of 512, as in MLA.
                dims = head_dim, group, torch.bfloat16, "prefill", target, min(head_dim, 512)
                assert choose_config(*dims).BLOCK_M >= 64, ("wgmma and tcgen05 need 64 rows", dims)
        prefill = choose_config(128, 4, torch.bfloat16, "prefill", target)
        assert prefill.BLOCK_Q * 4 == prefill.BLOCK_M
        # 64 rows of 1024 float32 would be all of an SM's registers.
        assert choose_config(576, 4, torch.bfloat16, "prefill", target).BLOCK_M == 16
        # A narrower cache takes registers of its own, which a tile leaves it.
        assert choose_config(128, 4, torch.float32, "decode", target).num_stages == 2
        for cache_dtype in (torch.float16, torch.int8):
            narrow = choose_config(128, 4, torch.float32, "decode", target, None, cache_dtype)
            assert narrow.num_stages == 1
        assert choose_config(576, 16, torch.bfloat16, "prefill", target, 512, torch.int8).BLOCK_M == 32
    for group in (1, 3, 5, 7, 16, 20, 128):
        for target in (*FAMILIES, "interpreter"):
            for use in ("prefill", "decode"):
                for head_dim, value_dim in [(80, None), (576, 512), (16, 256), (128, 64)]:
                    if max(head_dim, value_dim or 0) > largest_head_dim(target):
                        continue
                    config = choose_config(head_dim, group, torch.float16, use, target, value_dim)
                    assert 1 <= config.BLOCK_Q * config.BLOCK_G <= config.BLOCK_M
                    assert split_size(target) % config.TILE == 0
    with pytest.raises(ValueError, match="head_dim must be between 16 and 576 on sm_90, got 577"):
        choose_config(577, 4, torch.bfloat16, "decode", "sm_90")
    for dims in [(129, None), (64, 129)]:
        with pytest.raises(ValueError, match=r"_dim must be .* 16 and 128 on gfx1100, got 129; .* 'torch'"):
            choose_config(dims[0], 4, torch.bfloat16, "decode", "gfx1100", dims[1])
    for target in ("sm_75", "gfx1030"):
        with pytest.raises(ValueError, match=rf"made for sm_80, .*, this is {target}; use .*torch"):
            choose_config(64, 4, torch.bfloat16, "decode", target)
    with pytest.raises(ValueError, match="group must be between 1 and 128, got 129"):
        choose_config(64, 129, torch.bfloat16, "decode", "sm_90")


@pytest.mark.gpu
def test_compiled_on_a_gpu():
    assert not in_interpreter()
