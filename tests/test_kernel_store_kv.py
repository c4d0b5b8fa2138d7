import pytest
import torch
from kernel_cases import DEVICE, IMPLEMENTATIONS

from paged.kernels import reference
from paged.kernels.backend import load_kernels


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(1, 1, 32, 8), (5, 3, 80, 16), (3, 40, 64, 256)], ids=str)
def test_matches_reference(name, dtype, shape):
    """Every slot named is written, from strided views, and no other."""
    num_tokens, num_kv_heads, head_dim, block_size = shape
    qkv = torch.randn(num_tokens, 3 * num_kv_heads, head_dim, dtype=dtype, device=DEVICE)
    key, value = qkv[:, num_kv_heads : 2 * num_kv_heads], qkv[:, 2 * num_kv_heads :]
    # K and V of a slot side by side: the caches are strided too.
    caches = torch.randn(4, block_size, 2, num_kv_heads, head_dim, dtype=dtype, device=DEVICE)
    expected = caches.clone()
    slots = torch.randperm(4 * block_size, device=DEVICE)[:num_tokens]
    load_kernels(name).store_kv(key, value, caches[:, :, 0], caches[:, :, 1], slots)
    reference.store_kv(key, value, expected[:, :, 0], expected[:, :, 1], slots)
    torch.testing.assert_close(caches, expected, rtol=0, atol=0)


def test_reference_puts_a_slot_where_the_block_says():
    cache = torch.zeros(3, 4, 1, 2)
    key = torch.tensor([[[1.0, 2.0]]])
    reference.store_kv(key, -key, cache, cache.clone(), torch.tensor([2 * 4 + 3]))
    assert cache[2, 3, 0].tolist() == [1.0, 2.0]
    assert cache.count_nonzero() == 2


def test_wrong_inputs_are_named():
    store_kv = load_kernels("triton").store_kv
    key, cache = torch.randn(2, 1, 8), torch.randn(3, 4, 1, 8)
    with pytest.raises(ValueError, match=r"slot_mapping must be torch.int64, got torch.int32"):
        store_kv(key, key, cache, cache, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"value_cache must have shape \[3, 4, 1, 8\]"):
        store_kv(key, key, cache, cache[:2], torch.zeros(2, dtype=torch.int64))
