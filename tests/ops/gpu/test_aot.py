"""The kernels compiled for GPUs that are not here: what the binaries must and must not contain."""

import collections
import re
from importlib.metadata import version

import pytest
import torch
from packaging.version import Version

from paged.kernels.gpu.attention.config import choose_config
from paged.kernels.gpu.linear.config import ROW_COUNTS
from tests.aot import SHARES, TABLE, figures_of, known_figures, readme, reports
from tests.support.absent_gpu import CONSUMER_TARGETS, DATA_CENTER_TARGETS, TARGETS
from tests.support.binary_figures import SHARED_LIMITS
from tests.support.kernel_launches import ATTENTION_CASES, COMMON_CASES, DTYPES, has_case

# What makes a batch of an upload: numbers that threads load and store one by one, a few KB a step.
UNPACK = {"unpack", "take_parameters"}
# Chains over tokens: few columns a thread, so that blocks share a sequence, and numbers of each token.
CHAINS = {"short_conv", "gated_delta", "mamba2_scan"}
# Products and lookups of weights in codes, whose factors are a few bytes for each output.
CODED = {"coded_linear", "add_splits", "coded_rows"}
# Products of adapters, and their slots: numbers of each token.
LORA = {"add_lora"}
# Products of experts, and what decides over their rows: numbers of each token and expert.
EXPERTS = {"grouped_linear", "route", "sort_by_expert"}
SAMPLING = {"penalties", "maxima", "coarse", "gather", "search", "best", "pick"}
# Bytes of the stack: one odd shape of heads, since tokens without a slot are not stored; four numbers around
# the loops of a run of drafts.
SPILLS = {
    ("sm_100", "rotary_store_kv", "7/1x16 float16 norm"): 8,
    ("sm_86", "mamba2_scan", "bfloat16 runs"): 16,
    ("sm_89", "mamba2_scan", "bfloat16 runs"): 16,
}
KNOWN = known_figures()
AMD = [target for target in TARGETS if target.startswith("gfx")]
NVIDIA = [target for target in TARGETS if target not in AMD]


@pytest.fixture(scope="module")
def compiled():
    return reports(KNOWN)


@pytest.mark.parametrize("target", TARGETS)
def test_what_spills_is_known_and_everything_fits(compiled, target):
    """Without a stack and local memory there is nothing that ld.local and st.local could mean."""
    rows = compiled[target]
    spilling = {(target, r["kernel"], r["case"]): r["stack"] for r in rows if r["stack"] or r["local"]}
    assert spilling == {case: size for case, size in SPILLS.items() if case[0] == target}
    assert [row for row in rows if row["shared"] > SHARED_LIMITS[target]] == []


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_is_compiled(compiled, target):
    kernels = {row["kernel"] for row in compiled[target]}
    rows = {"norm", "activation", "rotary_store_kv", "scale_and_cap", "scale_rows"}
    rows |= {*CHAINS, "gated_norm", "scale_by_sigmoid"}
    known = {"prefill", "decode", "plan", "merge", "copy_blocks", "sum_experts"} | rows
    assert kernels == known | SAMPLING | UNPACK | CODED | EXPERTS | LORA


def row_of_the_table(use, head_dim, value_dim, dtype, cache_dtype, group, target):
    """Return a choice of choose_config and what it depends on, but how rows are shared out."""
    config = choose_config(head_dim, group, dtype, use, target, value_dim, cache_dtype)
    widths = (64, 128, 256, 576) if value_dim <= 512 else (1024,)
    width = next(width for width in widths if max(head_dim, value_dim) <= width)
    # A tile of more than 512 values is the same for any cache.
    converted = cache_dtype != dtype and width != 1024
    shape = config.BLOCK_M, config.TILE, config.num_warps, config.num_stages
    return use, width, dtype == torch.float32, converted, *shape


@pytest.mark.parametrize("target", CONSUMER_TARGETS)
def test_common_cases_are_compiled(compiled, target):
    assert all(case in ATTENTION_CASES for case in COMMON_CASES)
    expected = [case for case in COMMON_CASES if has_case(target, case)]
    found = {row["case"] for row in compiled[target] if row["kernel"] == "decode"}
    assert len(found) == len(expected) == {"sm_86": 15, "gfx1100": 12}.get(target, 17)


@pytest.mark.parametrize("target", DATA_CENTER_TARGETS)
def test_every_row_that_choose_config_can_return_is_compiled(target):
    compiled_rows = set()
    for case in ATTENTION_CASES:
        if not has_case(target, case):
            continue
        head_dim, group, dtype, _, options = case
        dtypes = DTYPES[dtype], DTYPES[options.get("cache", dtype)]
        for use in ("decode",) if options.get("decodes") else ("prefill", "decode"):
            value_dim = options.get("value_dim", head_dim)
            compiled_rows.add(row_of_the_table(use, head_dim, value_dim, *dtypes, group, target))
    half, single = torch.bfloat16, torch.float32
    caches = [(half, half), (half, torch.int8), (single, single), (single, half), (single, torch.int8)]
    possible = {
        row_of_the_table(use, head_dim, value_dim, *dtypes, group, target)
        for head_dim in range(16, 577, 16)
        for value_dim in {head_dim, 128, 512}
        for group in (1, 3, 8, 16, 17, 20, 32, 64, 128)
        for dtypes in caches
        for use in ("prefill", "decode")
    }
    assert possible == compiled_rows


@pytest.mark.parametrize("target", TARGETS)
def test_attention_uses_the_tensor_cores(compiled, target):
    for row in compiled[target]:
        if row["kernel"] not in ("prefill", "decode") or "float32" in row["case"]:
            continue
        if target in AMD:
            assert row["wmma" if target == "gfx1100" else "mfma"] > 0, row
            assert row["loads_16B"] > 0, row
            continue
        best = {"sm_90": "wgmma", "sm_100": "tcgen05"}.get(target, "mma")
        # 64 rows make the best; a decode has fewer, unless its group is large.
        head_dim, few_rows = int(row["case"].split("x")[0]), row["kernel"] == "decode"
        # 64 rows of 1024 partial results would be all registers, and 8 bits need some on their way.
        few_rows |= head_dim > 512 and "value_dim" not in row["case"]
        wide_8_bits = head_dim > 256 and " cache " in row["case"]
        assert row[best] + (row["mma"] if few_rows or wide_8_bits else 0) > 0, row
        assert row["async_copies"] + (row["loads_16B"] if wide_8_bits else 0) > 0, row
        assert row["loads_2B"] == 0, row


def products(compiled, target):
    """Yield the rows of products with codes or of experts, each with how many rows of x it takes."""
    for row in compiled[target]:
        if row["kernel"] in ("coded_linear", "grouped_linear"):
            weight, _, num_rows = row["case"].partition(", ")
            yield f"{row['kernel']} {weight}", num_rows.removesuffix(" rows"), row


@pytest.mark.parametrize("target", TARGETS)
def test_weights_are_loaded_in_16_bytes(compiled, target):
    """Of few rows nothing else is so wide, as x has 2 to 4 bytes for each thread."""
    for _, num_rows, row in products(compiled, target):
        if num_rows == "few":
            assert row["loads_16B" if target in AMD else "async_copies"] > 0, row
    for row in compiled[target]:
        if row["kernel"] == "coded_rows":
            assert row["loads_16B"] > 0, row


@pytest.mark.parametrize("target", TARGETS)
def test_weights_are_multiplied_by_the_same_instruction_for_any_number_of_rows(compiled, target):
    """By the tensor cores' best, but in float32; so a row's bits do not depend on its batch."""
    best = {"sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma", "gfx1100": "wmma"}.get(target, "mma")
    kinds = collections.defaultdict(set)
    for weight, num_rows, row in products(compiled, target):
        found = {name for name in ("wgmma", "tcgen05", "mfma", "wmma", "mma") if row.get(name)}
        assert found == {best} or "float32" in weight, row
        kinds[weight].add((num_rows, *sorted(found)))
    assert kinds
    for weight, found in kinds.items():
        most = {"most"} if weight.startswith("grouped") else set()  # whose tiles are those of many rows
        assert {num_rows for num_rows, *_ in found} == set(ROW_COUNTS) - most, weight
        assert len({tuple(names) for _, *names in found}) == 1, weight


@pytest.mark.parametrize("target", TARGETS)
def test_few_rows_keep_weights_in_flight(compiled, target):
    """As much as LEAST_BLOCKS says, by tiles of 4 KB, or 8 of numbers: in a block three, or one on AMD."""
    for weight, num_rows, row in products(compiled, target):
        if num_rows == "few" and "float32" not in weight:
            tiles, least = (1, 14) if target in AMD else (3, 25)
            assert row["blocks_per_sm"] * tiles * (8 if "numbers" in weight else 4) >= least, row


# What each kernel is designed for: the least of its blocks that an SM, or AMD's CU, holds at once. By
# Little's law an H200's SM needs 25 KB in flight (4.8 TB/s for 700 ns), an MI300's CU 14 KB (5.3 TB/s for
# 800 ns).
LEAST_BLOCKS = {
    "prefill": (1, 1),  # and see test_attention_has_warps_for_every_scheduler
    "decode": (1, 1),  # likewise
    "merge": (3, 3),  # 16 splits, of 128 values 8 KB, out of the L2: half the latency
    "plan": (8, 8),  # of one sequence each, which waits for a few lengths
    "rotary_store_kv": (8, 8),  # 4 KB
    "rotary_store_kv float32": (4, 4),  # 8 KB
    "norm": (6, 6),  # of 4096: 8 KB, or 16 with the residual or what it is added to
    "activation": (8, 8),  # 4 KB, with a gate 8, and an exponential or erf on their way
    "scale_and_cap": (8, 8),  # 4 KB of embeddings, or 8 of logits
    "scale_rows": (8, 8),  # 4 KB
    "copy_blocks": (8, 8),  # 4 KB
    "short_conv": (8, 8),  # of 256 columns, one token after another
    "gated_delta": (4, 4),  # 16 KB of a state in registers, one token after another
    "mamba2_scan": (4, 4),  # 16 KB of a state in registers, one token after another
    "gated_norm": (8, 8),  # 4 KB
    "add_lora": (2, 2),  # tiles of x and A, and then of B
    "scale_by_sigmoid": (8, 8),  # 4 KB
    "unpack": (8, 8),  # of one sequence each, which waits for its row and then for its entries
    "take_parameters": (8, 8),  # of one row each: a few numbers
    "coded_linear": (1, 1),  # and see test_few_rows_keep_weights_in_flight
    "add_splits": (8, 8),  # 4 KB for each split, out of the L2
    "coded_rows": (8, 8),  # 1 KB of codes
    "grouped_linear": (1, 1),  # and see test_few_rows_keep_weights_in_flight
    "route": (16, 16),  # of one token and warp each, which chooses one expert after the other
    "sort_by_expert": (4, 4),  # of one expert each, whose 8 KB come out of the L2
    "sum_experts": (6, 6),  # 4 KB of each of a token's experts
    "penalties": (2, 2),  # 32 KB behind 4 KB that say whether they are needed: one waits while one moves
    "maxima": (8, 8),  # 4 KB, with or without the moments
    "coarse": (4, 4),  # 4 KB, out of the L2: half the latency
    "gather": (8, 8),  # 4 KB, of which most are not needed
    "search": (1, 1),  # one block a row, as far as there are rows
    "best": (8, 8),  # of two warps, that compute: Philox for every token
    "pick": (8, 8),  # 1 block a row
}


@pytest.mark.parametrize("target", TARGETS)
def test_an_sm_holds_as_many_blocks_as_designed(compiled, target):
    def least(row):
        in_float32 = f"{row['kernel']} float32" if "float32" in row["case"] else ""
        return LEAST_BLOCKS.get(in_float32, LEAST_BLOCKS[row["kernel"]])[target in AMD]

    assert [row for row in compiled[target] if row["blocks_per_sm"] < least(row)] == []


@pytest.mark.parametrize("target", TARGETS)
def test_attention_has_warps_for_every_scheduler(compiled, target):
    """Two on NVIDIA's, of one block or two: one computes weights while the other's products run. AMD: one."""
    for row in attention_rows({target: compiled[target]}):
        assert row["blocks_per_sm"] * row["warps"] >= (4 if target in AMD else 8), row


@pytest.mark.parametrize("target", NVIDIA)
def test_decodes_of_whole_tiles_load_by_descriptors(compiled, target):
    """Both loops of it, K and V, in no more registers than leave room for 3 blocks an SM, 2 if quantised."""
    described = set()
    for row in compiled[target]:
        if row.get("tma", 0) > 0:
            described.add((row["kernel"], row["case"].partition(" block")[0]))
            assert row["tma"] >= 4, row
            assert row["blocks_per_sm"] >= (2 if "cache" in row["case"] else 3), row
    expected = {("decode", case) for case in ("128x7 float16", "128x4 bfloat16", "256x4 bfloat16")}
    assert described == (expected if target in ("sm_90", "sm_100") else set())


@pytest.mark.parametrize("target", NVIDIA)
def test_decode_hides_latency_with_several_blocks_an_sm(compiled, target):
    for row in compiled[target]:
        if row["kernel"] == "decode" and row["warps"] == 4:
            assert row["blocks_per_sm"] >= 2, row


@pytest.mark.parametrize("target", TARGETS)
def test_what_only_moves_bytes_moves_16_at_a_time(compiled, target):
    """A thread loads by itself only slots, a row's factor, blocks to copy, and where experts' rows are."""
    # Of each of 8 experts the place and the weight, and the gate of what is shared.
    scalars = {"rotary_store_kv": 1, "scale_rows": 1, "gated_norm": 1, "copy_blocks": 2, "sum_experts": 17}
    fixed = 2  # scales of a head's K and V
    for row in compiled[target]:
        if (
            row["kernel"]
            in {"prefill", "decode", "plan", "merge"} | SAMPLING | UNPACK | CODED | EXPERTS | CHAINS | LORA
        ):
            continue
        assert row["loads_16B"] > 0, row
        most = scalars.get(row["kernel"], 0) + fixed * (" fixed " in row["case"])
        assert row["loads_narrow"] <= most, row
        if " cache " in row["case"]:  # of 8 bits: a thread's 8 values are 8 bytes, and there is a scale
            continue
        assert row["stores_16B"] > 0, row
        assert row["stores_narrow"] == 0, row


@pytest.mark.parametrize("target", TARGETS)
def test_logits_move_16_bytes_at_a_time(compiled, target):
    """But for what reads a list of a few logits, or the best of each block; most store figures of a row."""
    for row in compiled[target]:
        if row["kernel"] in SAMPLING - {"search", "pick"}:
            assert row["loads_16B"] > 0, row
        if row["kernel"] == "penalties":
            assert row["stores_16B"] > 0, row
            assert row["stores_narrow"] == 0, row


@pytest.mark.parametrize("target", TARGETS)
def test_loads_do_not_wait_for_each_other(compiled, target):
    for row in compiled[target]:
        if row["kernel"] == "rotary_store_kv" and " cache " not in row["case"]:
            assert row["shared"] == 0, row
        if row["kernel"] == "norm" and target not in AMD:
            assert row["loads_behind_barrier"] == 0, row


def same_numbers(made: str, kept: str) -> bool:
    """Whether two texts are the same, but that numbers may differ by 2 %: AMD's compiler gives other code."""
    (words, figures), (kept_words, numbers) = (
        (pieces[::2], [*map(int, pieces[1::2])])
        for pieces in (re.split(r"(\d+)", text) for text in (made, kept))
    )
    return words == kept_words and all(
        abs(n - figure) <= 0.02 * figure for n, figure in zip(numbers, figures, strict=True)
    )


STALE = "run `python -m tests.aot --write` and look at what changed"


@pytest.fixture(scope="module")
def kept():
    """Return the table; skip with a Triton older than it was made with, fail with a newer one."""
    text, installed = TABLE.read_text(), version("triton")
    (made_with,) = re.findall(r"with Triton (\S+) ", text)
    if Version(installed) < Version(made_with):
        pytest.skip(f"{TABLE.name} was made with Triton {made_with}, this is {installed}")
    assert installed == made_with, STALE
    return text


def test_table_of_figures_is_fresh(compiled, kept):
    assert same_numbers(readme(compiled), kept), STALE


def attention_rows(compiled):
    return [row for rows in compiled.values() for row in rows if row["kernel"] in ("prefill", "decode")]


def test_what_is_compiled_has_the_known_figures(compiled):
    """Every kernel in a share of its cases, each on one target. `--write` compiles all."""
    rows = [row for rows in compiled.values() for row in rows]
    compiled_now = [row for row in rows if row["compiled"]]
    assert {row["kernel"] for row in compiled_now} == {row["kernel"] for row in rows}
    assert len(compiled_now) >= len(ATTENTION_CASES) / SHARES
    for row in compiled_now:
        if row["key"] in KNOWN:
            assert same_numbers(str(figures_of(row)), str(KNOWN[row["key"]])), (row, STALE)


@pytest.mark.usefixtures("kept")
def test_every_kernel_is_known(compiled):
    """Else each run would compile it for all targets, which takes minutes."""
    assert {row["key"] for rows in compiled.values() for row in rows} == set(KNOWN), STALE
