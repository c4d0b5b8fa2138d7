"""Call the paged attention kernel by hand, and compare it with attention over the same keys in one piece."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from paged.kernels.attention_options import AttentionOptions
from paged.kernels.backend import load_kernels

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 2, 32, 16
device = "cuda" if torch.cuda.is_available() else "cpu"
kernels = load_kernels("triton" if device == "cuda" else "numba")

# A prompt of 5 new tokens, and a sequence of 40 tokens of which the last one is new, with no padding between.
seq_lens, new_tokens = [5, 40], [5, 1]
keys = [torch.randn(n, NUM_KV_HEADS, HEAD_DIM, device=device) for n in seq_lens]
values = [torch.randn_like(key) for key in keys]
query = torch.randn(sum(new_tokens), NUM_HEADS, HEAD_DIM, device=device)

# The cache is a pool of blocks. A block table says which blocks a sequence has, in order; they lie anywhere.
key_cache = torch.full((8, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM), float("nan"), device=device)
value_cache = key_cache.clone()
tables = torch.tensor([[6, 0, 0], [3, 7, 1]], dtype=torch.int32, device=device)
for table, key, value in zip(tables.tolist(), keys, values, strict=True):
    for position in range(len(key)):
        block, offset = table[position // BLOCK_SIZE], position % BLOCK_SIZE
        key_cache[block, offset] = key[position]
        value_cache[block, offset] = value[position]

attended = kernels.paged_attention(
    query,
    key_cache,
    value_cache,
    tables,
    torch.tensor(seq_lens, dtype=torch.int32, device=device),
    torch.tensor([0, 5, 6], dtype=torch.int32, device=device),
    AttentionOptions(scale=HEAD_DIM**-0.5, max_seqlen_q=max(new_tokens)),
)

start = 0
for key, value, num_new in zip(keys, values, new_tokens, strict=True):
    q, k, v = (x.transpose(0, 1) for x in (query[start : start + num_new], key, value))
    mask = torch.ones(num_new, len(key), dtype=torch.bool, device=device).tril(len(key) - num_new)
    expected = scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(0, 1)
    error = (attended[start : start + num_new] - expected).abs().max().item()
    print(f"{num_new} of {len(key)} tokens: the largest difference is {error:.1e}")
    assert error < 1e-4
    start += num_new
