"""The least bytes and FLOPs of the operations, by which measurements are divided. Does not import torch."""

from collections.abc import Sequence


def paged_attention_cost(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    element_size: int,
    *,
    kv_bytes: float | None = None,
) -> tuple[int, int]:
    """Count queries in, outputs out and each visible K and V once; two products for a visible pair.

    kv_bytes: of one element of the cache with its share of the scales, element_size where None.
    """
    pairs = 0
    for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
        pairs += query_len * seq_len - query_len * (query_len - 1) // 2
    moved = sum(query_lens) * num_heads * 2 * head_dim * element_size
    moved += round(
        sum(seq_lens) * num_kv_heads * 2 * head_dim * (element_size if kv_bytes is None else kv_bytes)
    )
    return moved, 4 * pairs * num_heads * head_dim


def rms_norm_cost(num_rows: int, size: int, element_size: int) -> tuple[int, int]:
    """Count x read, the norm written, the residual read and written, and the weight."""
    return (4 * num_rows + 1) * size * element_size, 5 * num_rows * size


def silu_and_mul_cost(num_tokens: int, size: int, element_size: int) -> tuple[int, int]:
    """Count two values read, one written and five operations for each output."""
    return 3 * num_tokens * size * element_size, 5 * num_tokens * size


def rotary_store_kv_cost(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, element_size: int
) -> tuple[int, int]:
    """Count qkv read; query, K and V written; cos, sin and a slot for each token; two norm weights.

    4 operations normalise a value of query or key, 3 more rotate it.
    """
    moved = 2 * (num_heads + 2 * num_kv_heads) * head_dim * element_size + 4 * head_dim + 8
    rotated = num_tokens * (num_heads + num_kv_heads) * head_dim
    return num_tokens * moved + 2 * head_dim * element_size, 7 * rotated


def linear_cost(
    num_rows: int, num_outputs: int, num_inputs: int, weight_bytes: int, element_size: int
) -> tuple[int, int]:
    """Count x and the weight read, and the result written; a product and a sum for each weight and row."""
    moved = num_rows * (num_inputs + num_outputs) * element_size + weight_bytes
    return moved, 2 * num_rows * num_outputs * num_inputs


def copy_blocks_cost(
    num_pairs: int, num_planes: int, block_size: int, num_kv_heads: int, head_dim: int, element_size: int
) -> tuple[int, int]:
    """Count a block read and written in every plane, and two numbers read, for each pair."""
    block = block_size * num_kv_heads * head_dim * element_size
    return num_pairs * (2 * num_planes * block + 16), 0
