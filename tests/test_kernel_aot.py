"""The kernels compiled for GPUs that are not here: what the binaries must and must not contain."""

import re
from importlib.metadata import version

import pytest
import torch

from paged.kernels.attention_config import choose_config
from tests.absent_gpu import TARGETS
from tests.aot import TABLE, figures_of, known_figures, readme, reports
from tests.binary_figures import SHARED_LIMITS
from tests.kernel_launches import ATTENTION_CASES, DTYPES, FP8_TARGETS

SAMPLING = {"penalties", "maxima", "coarse", "gather", "search", "mask", "best", "pick"}
KNOWN = known_figures()


@pytest.fixture(scope="module")
def compiled():
    return reports(KNOWN)


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_spills_and_everything_fits(compiled, target):
    for row in compiled[target]:
        assert row["stack"] == 0, row
        assert row["shared"] <= SHARED_LIMITS[target], row


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_is_compiled(compiled, target):
    kernels = {row["kernel"] for row in compiled[target]}
    others = {"rms_norm", "rotary_store_kv", "silu_and_mul", "copy_blocks"}
    assert kernels == {"prefill", "decode", "plan", "merge"} | others | SAMPLING


def tiles(head_dim, group, dtype, use, target, value_dim=None):
    """What choose_config has decided, without how rows are shared out among heads; SHARED is a constexpr."""
    config = choose_config(head_dim, group, dtype, use, target, value_dim)
    width = next(width for width in (64, 128, 256, 576) if head_dim <= width)
    shape = config.BLOCK_M, config.TILE, config.num_warps, config.num_stages
    return use, width, dtype == torch.float32, *shape


@pytest.mark.parametrize("target", TARGETS)
def test_every_row_that_choose_config_can_return_is_compiled(target):
    compiled_tiles = set()
    for head_dim, group, dtype, _, options in ATTENTION_CASES:
        if options.get("cache") == "float8_e4m3fn" and target not in FP8_TARGETS:
            continue
        for use in ("shared", "decode") if options.get("shared") else ("prefill", "decode"):
            value_dim = options.get("value_dim")
            compiled_tiles.add(tiles(head_dim, group, DTYPES[dtype], use, target, value_dim))
    possible = {
        tiles(head_dim, group, dtype, use, target)
        for head_dim in range(16, 577, 16)
        for group in range(1, 129)
        for dtype in (torch.float32, torch.bfloat16)
        for use in ("prefill", "decode", "shared")
    }
    assert possible <= compiled_tiles


@pytest.mark.parametrize("target", TARGETS)
def test_attention_uses_the_tensor_cores(compiled, target):
    for row in compiled[target]:
        if row["kernel"] not in ("prefill", "decode") or "float32" in row["case"]:
            continue
        if target == "gfx942":
            assert row["mfma"] > 0, row
            assert row["loads_16B"] > 0, row
            continue
        best = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05"}[target]
        # 64 rows make the best; a decode has fewer, unless its group is large or a prefix is shared.
        assert row[best] + (row["mma"] if row["kernel"] == "decode" else 0) > 0, row
        assert row["async_copies"] > 0, row
        assert row["loads_2B"] == 0, row


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_decodes_of_whole_tiles_load_by_descriptors(compiled, target):
    """Both loops of it, K and V: and 3 blocks an SM, where pointers to a quantised cache leave 2."""
    described = set()
    for row in compiled[target]:
        if row.get("tma", 0) > 0:
            described.add((row["kernel"], row["case"].partition(" block")[0]))
            assert row["tma"] >= 4, row
            assert row["blocks_per_sm"] >= 3, row
    expected = {("decode", case) for case in ("128x7 float16", "128x4 bfloat16", "256x4 bfloat16")}
    assert described == (set() if target == "sm_80" else expected)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_decode_hides_latency_with_several_blocks_an_sm(compiled, target):
    for row in compiled[target]:
        if row["kernel"] == "decode" and "float32" not in row["case"]:
            # Many rows of a wide head: 8 warps in one block, where others have 4 in each of two.
            many_wide_rows = row["case"].endswith("shared") and int(row["case"].split("x")[0]) > 128
            assert row["blocks_per_sm"] >= (1 if many_wide_rows else 2), row


@pytest.mark.parametrize("target", TARGETS)
def test_what_only_moves_bytes_moves_16_at_a_time(compiled, target):
    """A slot, or the pair of blocks to copy, is the only thing that a thread loads by itself."""
    scalars = {"rotary_store_kv": 1, "copy_blocks": 2}
    for row in compiled[target]:
        if row["kernel"] in {"prefill", "decode", "plan", "merge"} | SAMPLING:
            continue
        assert row["loads_16B"] > 0, row
        assert row["loads_narrow"] <= scalars.get(row["kernel"], 0), row
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
        if row["kernel"] in ("penalties", "mask"):
            assert row["stores_16B"] > 0, row
            assert row["stores_narrow"] == 0, row


@pytest.mark.parametrize("target", [target for target in TARGETS if target != "gfx942"])
def test_enough_bytes_in_flight(compiled, target):
    """Little's law on an H200: 4.8 TB/s for 700 ns are 25 KB an SM; a block of rotary_store_kv reads 4 KB."""
    for row in compiled[target]:
        if row["kernel"] == "rotary_store_kv":
            assert row["blocks_per_sm"] >= 8, row
            assert row["shared"] == 0, row
        if row["kernel"] == "rms_norm":  # of 4096: 8 KB, or 16 with the residual
            assert row["blocks_per_sm"] >= 6, row
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
    """The table, if it was made with this Triton."""
    text = TABLE.read_text()
    if f"Triton {version('triton')} " not in text:
        pytest.skip(f"{TABLE.name} was made with another Triton than {version('triton')}")
    return text


def test_table_of_figures_is_fresh(compiled, kept):
    assert same_numbers(readme(compiled), kept), STALE


def attention_rows(compiled):
    return [row for rows in compiled.values() for row in rows if row["kernel"] in ("prefill", "decode")]


def test_every_attention_kernel_is_compiled_for_a_target(compiled):
    """And for all targets, if it is not known. The figures known of it are those it has."""
    rows = attention_rows(compiled)
    compiled_now = [row for row in rows if row["compiled"]]
    assert {(row["kernel"], row["case"]) for row in rows} == {
        (row["kernel"], row["case"]) for row in compiled_now
    }
    for row in compiled_now:
        if row["key"] in KNOWN:
            assert same_numbers(str(figures_of(row)), str(KNOWN[row["key"]])), (row, STALE)


@pytest.mark.usefixtures("kept")
def test_every_attention_kernel_is_known(compiled):
    """Else each run would compile it for all targets, which takes minutes."""
    assert {row["key"] for row in attention_rows(compiled)} == set(KNOWN), STALE
