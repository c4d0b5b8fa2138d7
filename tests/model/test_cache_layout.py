"""Any mixture of shapes in one pool: no two layers of a block, and no two blocks, share memory."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from paged.architectures.config import ModelConfig
from paged.architectures.spec import KVShape
from paged.kernels.plain import backend as torch_kernels
from paged.model.cache.kv_cache import KVCache
from paged.model.cache.layout import CacheLayout
from paged.simulate.model import read_model

DEMO = read_model("demo")
CPU = torch.device("cpu")
GEMMA4_31B = (KVShape(16, 256, 256),) * 5 + (KVShape(4, 512, 512),)
SHAPES = [KVShape(2, 16, 16), KVShape(1, 32, 32), KVShape(3, 24, 16), KVShape(1, 48, 32, value_in_key=True)]


def model(
    shapes: tuple[KVShape, ...], windows: tuple[int | None, ...] = (), sources: tuple[int, ...] = ()
) -> ModelConfig:
    usual = DEMO.layers[0]
    layers = []
    for i, shape in enumerate(shapes):
        source = sources[i] if sources and sources[i] != i else None
        window = windows[i] if windows else None
        attention = replace(usual.attention, kv=shape, window=window, source=source)
        layers.append(replace(usual, attention=attention))
    return replace(DEMO, layers=tuple(layers))


def random_model(rng: random.Random) -> ModelConfig:
    """Make a model in which some layers read an earlier layer of their own shape and window."""
    num_layers = rng.randint(1, 9)
    shapes = [rng.choice(SHAPES) for _ in range(num_layers)]
    windows = [rng.choice([None, 7]) for _ in range(num_layers)]
    sources = []
    for layer in range(num_layers):
        alike = [i for i in sources if (shapes[i], windows[i]) == (shapes[layer], windows[layer])]
        sources.append(rng.choice([layer, *alike]))
    return model(tuple(shapes), tuple(windows), tuple(sources))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_no_memory_is_shared(dtype):
    """Every layer of every block is written with a number of its own, then all are read."""
    rng = random.Random(0)
    for _ in range(60):
        config, num_blocks, block_size = random_model(rng), 5, rng.choice([1, 4])
        cache = KVCache(config, num_blocks, block_size, dtype, CPU, num_host_blocks=2)
        for tensor in cache.tensors.values():
            tensor.zero_()
        blocks = rng.sample(range(num_blocks), num_blocks)
        owners = [(block, cache.group_of[rng.randrange(config.num_layers)]) for block in blocks]
        written = []
        for block, group in owners:
            for layer in range(config.num_layers):
                if cache.group_of[layer] != group or config.kv_sources[layer] != layer:
                    continue
                own, shape = cache.layer(layer), config.kv_shapes[layer]
                assert own.key.shape == (num_blocks, block_size, shape.num_kv_heads, shape.key_dim)
                assert own.value.shape == (num_blocks, block_size, shape.num_kv_heads, shape.value_dim)
                parts = [own.key] if shape.value_in_key else [own.key, own.value]
                if own.key_scales is not None and own.value_scales is not None:
                    assert own.key_scales.shape == (num_blocks, shape.num_kv_heads, block_size)
                    assert own.key_scales.is_contiguous()
                    parts += [own.key_scales, own.value_scales][: len(parts)]
                for part in parts:
                    number = len(written) % 127 + 1
                    part[block] = number
                    written.append((part[block], number))
                assert (
                    own.value[block] == own.key[block, ..., : shape.value_dim]
                ).all() == shape.value_in_key
        assert all((part == number).all() for part, number in written)
        _check_moves(cache)


def _check_moves(cache: KVCache) -> None:
    """Copy a block, swap it out and in again: all of its bytes move, and no others."""
    before = {name: tensor.clone() for name, tensor in cache.tensors.items()}
    cache.copy_blocks(torch.tensor([[0, 1]]), torch_kernels)
    cache.swap_out(torch.tensor([[2, 1]]), torch_kernels)
    cache.swap_in(torch.tensor([[1, 3]]), torch_kernels)
    for name, tensor in cache.tensors.items():
        assert torch.equal(tensor, before[name][:, [0, 0, 2, 2, 4]])


@pytest.mark.parametrize("quantized", [False, True])
def test_bytes_of_a_block(quantized):
    rng = random.Random(1)
    for _ in range(40):
        config = random_model(rng)
        dtype = torch.int8 if quantized else torch.float16
        cache = KVCache(config, 3, 8, dtype, CPU)
        expected = CacheLayout.of(config, 8).block_bytes(1 if quantized else 2, 4 if quantized else 0)
        assert cache.num_bytes == 3 * expected


def test_equal_parts_lie_in_planes():
    """One shape: K and V of each layer of a group are contiguous, as [num_blocks, block_size, heads, dim]."""
    config = model((KVShape(2, 16, 16),) * 3, (None, None, 7))
    cache = KVCache(config, 6, 4, torch.float32, CPU)
    assert cache.tensors["kv"].shape == (2, 6, 4 * 2 * 16)
    for layer in range(3):
        for part, plane in zip(cache.layer(layer)[:2], cache.tensors["kv"], strict=True):
            assert part.is_contiguous()
            assert part.data_ptr() == plane.data_ptr()


def test_groups_take_about_equal_bytes():
    """Gemma 4 31B: ten groups of five sliding layers, and one of the ten others, waste nothing."""
    config = model(GEMMA4_31B * 10, ((1024,) * 5 + (None,)) * 10)
    groups = config.layer_groups
    assert [len(group.layers) for group in groups] == [5] * 10 + [10]
    used = sum(sum(config.kv_shapes[layer].part_sizes) for group in groups for layer in group.layers)
    layout = CacheLayout.of(config, 16)
    assert layout.block_bytes(2, 0) * len(groups) == used * 16 * 2


def test_layers_that_read_another_layer_take_no_room():
    shape = KVShape(2, 16, 16)
    config, alone = model((shape,) * 5, sources=(0, 1, 2, 1, 1)), model((shape,) * 3)
    cache, other = (KVCache(each, 4, 4, torch.float32, CPU) for each in (config, alone))
    assert cache.num_bytes == other.num_bytes
    assert [cache.layer(i).key.data_ptr() for i in (3, 4)] == [cache.layer(1).key.data_ptr()] * 2
