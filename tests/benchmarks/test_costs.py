"""The bytes and FLOPs that measurements are divided by, counted by hand."""

from benchmarks import costs


def test_attention():
    # Two keys for the decode's 4 heads; a chunk of 2 tokens at positions 1 and 2 sees 2 + 3 keys.
    values = (2 * 4 + 2 * 2 * 2) * 8 + (2 * 2 * 4 + 2 * 3 * 2) * 8
    assert costs.paged_attention_cost([1, 2], [2, 3], 4, 2, 8, 2) == (values * 2, 4 * (2 + 5) * 4 * 8)
    # A quantised cache.
    assert costs.paged_attention_cost([1], [9], 1, 1, 1, 2, kv_bytes=1.5) == (4 + 27, 36)


def test_other_operations():
    assert costs.rms_norm_cost(3, 8, 2) == ((4 * 3 + 1) * 8 * 2, 5 * 24)
    assert costs.silu_and_mul_cost(3, 8, 2) == (3 * 24 * 2, 5 * 24)
    assert costs.rotary_store_kv_cost(3, 5, 2, 8, 2) == (3 * (2 * 9 * 8 * 2 + 40) + 32, 7 * 3 * 7 * 8)
    assert costs.copy_blocks_cost(3, 4, 16, 2, 8, 2) == (3 * (2 * 4 * 16 * 2 * 8 * 2 + 16), 0)
    assert costs.linear_cost(3, 8, 32, 144, 2) == (3 * 40 * 2 + 144, 2 * 3 * 8 * 32)
