"""The kernels compiled for GPUs that are not here: what the binaries must and must not contain."""

import re
from importlib.metadata import version

import pytest
from aot import ROOT, SHARED_LIMITS, TARGETS, readme, reports

SAMPLING = {"penalties", "maxima", "coarse", "gather", "search", "mask", "best", "pick"}


@pytest.fixture(scope="module")
def compiled():
    return reports()


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_spills_and_everything_fits(compiled, target):
    for row in compiled[target]["rows"]:
        assert row["stack"] == 0, row
        assert row["shared"] <= SHARED_LIMITS[target], row


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_is_compiled(compiled, target):
    kernels = {row["kernel"] for row in compiled[target]["rows"]}
    others = {"rms_norm", "rotary_store_kv", "silu_and_mul", "copy_blocks"}
    assert kernels == {"prefill", "decode", "plan", "merge"} | others | SAMPLING


@pytest.mark.parametrize("target", TARGETS)
def test_attention_uses_the_tensor_cores(compiled, target):
    for row in compiled[target]["rows"]:
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
def test_decode_hides_latency_with_several_blocks_an_sm(compiled, target):
    for row in compiled[target]["rows"]:
        if row["kernel"] == "decode" and "float32" not in row["case"]:
            assert row["blocks_per_sm"] >= 2, row


@pytest.mark.parametrize("target", TARGETS)
def test_what_only_moves_bytes_moves_16_at_a_time(compiled, target):
    """A slot, or the pair of blocks to copy, is the only thing that a thread loads by itself."""
    scalars = {"rotary_store_kv": 1, "copy_blocks": 2}
    for row in compiled[target]["rows"]:
        if row["kernel"] in {"prefill", "decode", "plan", "merge"} | SAMPLING:
            continue
        assert row["loads_16B"] > 0, row
        assert row["loads_narrow"] <= scalars.get(row["kernel"], 0), row
        assert row["stores_16B"] > 0, row
        assert row["stores_narrow"] == 0, row


@pytest.mark.parametrize("target", TARGETS)
def test_logits_move_16_bytes_at_a_time(compiled, target):
    """But for what reads a list of a few logits, or the best of each block; most store figures of a row."""
    for row in compiled[target]["rows"]:
        if row["kernel"] in SAMPLING - {"search", "pick"}:
            assert row["loads_16B"] > 0, row
        if row["kernel"] in ("penalties", "mask"):
            assert row["stores_16B"] > 0, row
            assert row["stores_narrow"] == 0, row


@pytest.mark.parametrize("target", [target for target in TARGETS if target != "gfx942"])
def test_enough_bytes_in_flight(compiled, target):
    """Little's law on an H200: 4.8 TB/s for 700 ns are 25 KB an SM; a block of rotary_store_kv reads 4 KB."""
    for row in compiled[target]["rows"]:
        if row["kernel"] == "rotary_store_kv":
            assert row["blocks_per_sm"] >= 8, row
            assert row["shared"] == 0, row
        if row["kernel"] == "rms_norm":  # of 4096: 8 KB, or 16 with the residual
            assert row["blocks_per_sm"] >= 6, row
            assert row["loads_behind_barrier"] == 0, row


def test_table_of_figures_is_fresh(compiled):
    path = ROOT / "kernels" / "README.md"
    if f"Triton {version('triton')} " not in path.read_text():
        pytest.skip(f"kernels/README.md was made with another Triton than {version('triton')}")
    made = readme({target: compiled[target]["rows"] for target in TARGETS})
    # AMD's compiler does not give the same code every time: numbers may differ by 2 %.
    (kept, numbers), (words, figures) = (
        (pieces[::2], [*map(int, pieces[1::2])])
        for pieces in (re.split(r"(\d+)", text) for text in (path.read_text(), made))
    )
    stale = "run `python -m tests.aot --write` and look at what changed"
    assert kept == words, stale
    assert all(abs(n - figure) <= 0.02 * figure for n, figure in zip(numbers, figures, strict=True)), stale


@pytest.mark.parametrize("target", TARGETS)
def test_batches_do_not_multiply_binaries(compiled, target):
    """One model's batches of any size: a handful of binaries, all of them made by a warm-up."""
    assert compiled[target]["variants"] == {
        "prefill_kernel": 1,
        "decode_kernel": 1,
        "_plan_kernel": 1,
        "_merge_kernel": 1,
        "_rms_norm_kernel": 2,  # with residual and without
        "_rotary_store_kv_kernel": 1,
        "_silu_and_mul_kernel": 1,
        "_copy_blocks_kernel": 1,
        "_penalties_kernel": 1,
        "_maxima_kernel": 2,  # with the deviation of a row and without
        "_coarse_kernel": 1,
        "_gather_kernel": 1,
        "search_kernel": 1,
        "_mask_kernel": 1,
        "_best_kernel": 2,  # with filters and without
        "_pick_kernel": 1,
    }


@pytest.mark.parametrize("target", TARGETS)
def test_warm_up_compiles_all_that_batches_need(compiled, target):
    warm_up = compiled[target]["warm_up"]
    assert warm_up["later"] == []
    # What is compiled already in this process is not compiled again.
    assert 1 <= warm_up["num_compiled"] <= warm_up["ready"] == 18, warm_up
