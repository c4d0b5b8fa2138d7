import pytest
import torch
from kernel_cases import DEVICE, IMPLEMENTATIONS, TOLERANCES

from paged.kernels import reference
from paged.kernels.backend import load_kernels


def _angles(num_tokens, head_dim):
    angles = torch.randn(num_tokens, head_dim // 2, device=DEVICE) * 10
    return angles.cos(), angles.sin()


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(3, 4, 2, 32), (1, 7, 1, 80), (2, 130, 5, 128)], ids=str)
def test_matches_reference(name, dtype, shape):
    """On views into one qkv, whose value part nobody may touch."""
    num_tokens, num_heads, num_kv_heads, head_dim = shape
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, device=DEVICE)
    expected = qkv.clone()
    cos, sin = _angles(num_tokens, head_dim)
    for rotary, tensor in ((load_kernels(name).rotary, qkv), (reference.rotary, expected)):
        heads = tensor.view(num_tokens, -1, head_dim)
        rotary(heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads], cos, sin)
    torch.testing.assert_close(qkv, expected, **TOLERANCES[dtype])
    unrotated = slice((num_heads + num_kv_heads) * head_dim, None)
    torch.testing.assert_close(qkv[:, unrotated], expected[:, unrotated], rtol=0, atol=0)


def test_reference_is_hf_rotate_half():
    modeling_llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    query, key = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    cos, sin = (half.cpu() for half in _angles(3, 8))
    expected = modeling_llama.apply_rotary_pos_emb(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos.repeat(1, 2)[None], sin.repeat(1, 2)[None]
    )
    reference.rotary(query, key, cos, sin)
    for got, want in zip((query, key), expected, strict=True):
        torch.testing.assert_close(got, want[0].transpose(0, 1))


def test_wrong_inputs_are_named():
    rotary = load_kernels("triton").rotary
    query, key, cos = torch.randn(2, 4, 8), torch.randn(2, 2, 8), torch.randn(2, 4)
    with pytest.raises(ValueError, match=r"key must have shape \[2, any, 8\], got \[2, 2, 6\]"):
        rotary(query, key[..., :6], cos, cos)
    with pytest.raises(ValueError, match=r"sin must be torch.float32, got torch.float64"):
        rotary(query, key, cos, cos.double())
