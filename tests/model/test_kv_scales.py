"""The scales of K and V in a quantised checkpoint, which a cache in fp8 takes."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paged import CheckpointError, SamplingParams
from tests.support.checkpoints import checkpoint, edit_json, new_engine, ragged_prompts
from tests.support.quantised import Sizes, compressed, int_group, integers, quantised_checkpoint

KV_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    config = compressed("int-quantized", int_group(8, -1), kv_cache_scheme=KV_FP8)
    writer = integers(Sizes(scale=0.001))
    root = tmp_path_factory.mktemp("scales")
    return quantised_checkpoint(
        checkpoint("llama"), root, config, lambda name: writer if ".layers." in name else None
    )[0]


def with_scales(plain: Path, to: Path, scales: dict[str, Any], **config: Any) -> Path:
    """Add tensors to layer 0's attention."""
    directory = Path(shutil.copytree(plain, to / "model"))
    file = directory / "model.safetensors"
    own = {f"model.layers.0.self_attn.{name}": torch.as_tensor(x) for name, x in scales.items()}
    save_file(load_file(file) | own, file, metadata={"format": "pt"})
    if config:
        edit_json(
            directory / "config.json",
            quantization_config=compressed("int-quantized", int_group(8, -1), **config),
        )
    return directory


def cache_of(directory: Path, **options: Any):
    """Return what layer 0 keeps of a prompt."""
    engine = new_engine(directory, num_blocks=8, **options)
    engine.generate(ragged_prompts([17]), SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    return engine.runner.kv_cache.layer(0)


SPELLINGS = [
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale", "kv_scale"),
]


@pytest.mark.parametrize(("key", "value"), SPELLINGS, ids=str)
@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_an_fp8_cache_has_the_scales_of_the_checkpoint(plain, tmp_path, caplog, backend, key, value):
    """A number is number / scale in e4m3, clamped; the scale is multiplied back where it is read."""
    exact = cache_of(plain, attention_backend=backend)
    is_used = exact.key.isfinite().all(-1).all(-1)
    # Half of the largest number is the largest of the cache. bfloat16, as ModelOpt writes it.
    scale = torch.tensor(float(exact.key[is_used].abs().max()) / 2 / 448, dtype=torch.bfloat16)
    other = scale if key == value else torch.tensor([0.003])
    directory = with_scales(plain, tmp_path, {key: scale, value: other})
    with caplog.at_level(logging.INFO, "paged"):
        cache = cache_of(directory, attention_backend=backend, kv_cache_dtype="fp8")
    assert "K and V have the checkpoint's scales in 1 layers" in caplog.text
    assert "are not used" not in caplog.text
    for codes, numbers, scales, own in (
        (cache.key, exact.key, cache.key_scales, scale),
        (cache.value, exact.value, cache.value_scales, other),
    ):
        assert (scales.transpose(1, 2)[is_used] == own.float()).all()
        wanted = (numbers[is_used] / own.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(codes[is_used].float(), wanted.float())
    assert (cache.key[is_used].float().abs() == 448).any()


def test_a_scale_for_each_head(plain, tmp_path):
    scales = torch.tensor([0.01, 0.02])
    directory = with_scales(plain, tmp_path, {"k_scale": scales.view(2, 1, 1)})
    cache = cache_of(directory, kv_cache_dtype="fp8")
    assert {*cache.key_scales[:, 0].unique().tolist()} >= {float(scales[0])}
    assert float(scales[1]) not in cache.key_scales[:, 0]
    assert not set(scales.tolist()) & set(cache.value_scales.unique().tolist())


@pytest.mark.parametrize("cache", ["auto", "int8"])
def test_other_caches_do_without_them(plain, tmp_path, caplog, cache):
    directory = with_scales(plain, tmp_path, {"k_scale": torch.nan, "v_scale": torch.ones(3)})
    with caplog.at_level(logging.INFO, "paged"):
        new_engine(directory, kv_cache_dtype=cache)
    assert "2 scales of activations, K and V in the checkpoint are not used" in caplog.text


def test_scales_that_are_not_of_fp8_are_not_used(plain, tmp_path, caplog):
    scales = {"k_scale": 0.5, "v_scale": 0.5}
    directory = with_scales(plain, tmp_path, scales, kv_cache_scheme={"num_bits": 8, "type": "int"})
    with caplog.at_level(logging.INFO, "paged"):
        new_engine(directory, kv_cache_dtype="fp8")
    assert "2 scales of activations, K and V in the checkpoint are not used" in caplog.text


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (
            {"k_scale": torch.nan},
            r"self_attn\.k_scale is nan at \[0\], but must be finite and greater than 0",
        ),
        ({"v_scale": torch.inf}, r"self_attn\.v_scale is inf at \[0\]"),
        ({"k_proj.output_scale": 0.0}, r"k_proj\.output_scale is 0 at \[0\]"),
        ({"v_scale": [1.0, -2.0]}, r"v_scale is -2 at \[1\]"),
        ({"k_scale": 1e-39}, r"k_scale is 1e-39 at \[0\]"),
        (
            {"k_scale": torch.ones(3)},
            r"k_scale has shape \[3\], but must have one number, or one for each of 2",
        ),
        ({"k_scale": torch.ones(2, 2)}, r"k_scale has shape \[2, 2\]"),
        ({"k_scale": torch.ones(0)}, r"k_scale has shape \[0\]"),
        ({"k_scale": 1}, r"k_scale is torch\.int64; supported are torch\.float64"),
        ({"k_scale": 1.0, "k_proj.output_scale": 2.0}, r"k_scale differs from .*k_proj\.output_scale"),
    ],
    ids=str,
)
def test_wrong_scales_are_named(plain, tmp_path, scales, message):
    directory = with_scales(plain, tmp_path, scales)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: model\.layers\.0\..*{message}"):
        new_engine(directory, kv_cache_dtype="fp8")
