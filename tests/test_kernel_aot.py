"""The kernels compiled for GPUs that are not here: what the binaries must and must not contain."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

TARGETS = ("sm_90", "gfx942", "sm_80", "sm_100")
# Shared memory one block may use, in bytes.
SHARED_LIMITS = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}


def _compile(target: str, cache: Path) -> dict:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache / target)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.aot", target, "--json"],
        env=environment,
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    cache = tmp_path_factory.mktemp("triton")
    with ThreadPoolExecutor(max_workers=2) as pool:
        reports = pool.map(lambda target: _compile(target, cache), TARGETS)
    return dict(zip(TARGETS, reports, strict=True))


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_spills_and_everything_fits(compiled, target):
    for row in compiled[target]["rows"]:
        assert row["stack"] == row["local"] == 0, row
        assert row["shared"] <= SHARED_LIMITS[target], row


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_is_compiled(compiled, target):
    kernels = {row["kernel"] for row in compiled[target]["rows"]}
    others = {"rms_norm", "rotary_store_kv", "silu_and_mul", "copy_blocks"}
    assert kernels == {"prefill", "decode", "_merge_kernel"} | {f"_{name}_kernel" for name in others}


@pytest.mark.parametrize("target", TARGETS)
def test_attention_uses_the_tensor_cores(compiled, target):
    for row in compiled[target]["rows"]:
        if row["kernel"] not in ("prefill", "decode") or "float32" in row["case"]:
            continue
        if target == "gfx942":
            assert row["mfma"] > 0, row
            assert row["loads_16B"] > 0, row
            continue
        instruction = "mma"
        if row["kernel"] == "prefill":
            instruction = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05"}[target]
        assert row[instruction] > 0, row
        assert row["async_copies"] > 0, row
        assert row["loads_2B"] == 0, row


def test_blocks_per_sm_on_sm_90(compiled):
    """Decode hides latency with several blocks an SM."""
    for row in compiled["sm_90"]["rows"]:
        if row["kernel"] == "decode":
            assert row["blocks_per_sm"] >= 2, row


@pytest.mark.parametrize("target", TARGETS)
def test_what_only_moves_bytes_moves_16_at_a_time(compiled, target):
    """A slot, or the pair of blocks to copy, is the only thing that a thread loads by itself."""
    scalars = {"_rotary_store_kv_kernel": 1, "_copy_blocks_kernel": 2}
    for row in compiled[target]["rows"]:
        if row["kernel"] in ("prefill", "decode", "_merge_kernel"):
            continue
        assert row["loads_16B"] > 0, row
        assert row["loads_narrow"] <= scalars.get(row["kernel"], 0), row
        assert row["stores_16B"] > 0, row
        assert row["stores_narrow"] == 0, row


@pytest.mark.parametrize("target", [target for target in TARGETS if target != "gfx942"])
def test_enough_bytes_in_flight(compiled, target):
    """Little's law on an H200: 4.8 TB/s for 700 ns are 25 KB an SM; a block of rotary_store_kv reads 4 KB."""
    for row in compiled[target]["rows"]:
        if row["kernel"] == "_rotary_store_kv_kernel":
            assert row["blocks_per_sm"] >= 8, row
            assert row["shared"] == 0, row
        if row["kernel"] == "_rms_norm_kernel":  # of 4096: 8 KB, or 16 with the residual
            assert row["blocks_per_sm"] >= 6, row
            assert row["loads_behind_barrier"] == 0, row


@pytest.mark.parametrize("target", TARGETS)
def test_batches_do_not_multiply_binaries(compiled, target):
    """One model's batches of any size: a handful of binaries, all of them made by a warm-up."""
    assert compiled[target]["variants"] == {
        "_attention_kernel": 2,  # prefill and decode
        "_merge_kernel": 1,
        "_rms_norm_kernel": 2,  # with residual and without
        "_rotary_store_kv_kernel": 1,
        "_silu_and_mul_kernel": 1,
        "_copy_blocks_kernel": 1,
    }
