import pytest
import torch

from paged.kernels import reference
from paged.kernels.backend import load_kernels
from tests.support.kernel_cases import DEVICE

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn]


def any_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor of every kind of number: NaN of any payload, infinities, subnormals, -0."""
    bits = BITS[dtype.itemsize]
    limits = torch.iinfo(bits)
    return torch.randint(limits.min, limits.max, shape, dtype=bits, device=DEVICE).view(dtype)


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 8, 1, 32), (6, 16, 3, 80), (1, 256, 2, 64), (3, 8, 5, 7)], ids=str)
@pytest.mark.parametrize("num_pairs", [0, 1, 4], ids="num_pairs={}".format)
def test_matches_reference_to_the_bit(name, dtype, shape, num_pairs):
    """Targets get their sources in every plane, and no other block is touched."""
    num_planes, *block = shape
    cache = any_bits((num_planes, 9, *block), dtype)
    expected = cache.clone()
    pairs = torch.randperm(9, device=DEVICE)[: 2 * num_pairs].view(-1, 2)
    load_kernels(name).copy_blocks(cache, pairs)
    reference.copy_blocks(expected, pairs)
    bits = BITS[dtype.itemsize]
    torch.testing.assert_close(cache.view(bits), expected.view(bits), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_one_source_for_many_in_a_part_of_a_larger_tensor(name):
    """Blocks of a plane that lies among others', as a cache with K and V side by side has them."""
    whole = torch.randn(2, 7, 3, 8, 2, 16, device=DEVICE)
    expected = whole.clone()
    pairs = torch.tensor([[5, 0], [5, 6], [5, 2]], device=DEVICE)
    load_kernels(name).copy_blocks(whole[:, :, 1], pairs)
    for target in (0, 6, 2):
        expected[:, target, 1] = expected[:, 5, 1]
    torch.testing.assert_close(whole, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_between_two_caches_to_the_bit(name, dtype):
    """As swapping does: the caches have different numbers of blocks, and a block number may be in both."""
    source, target = any_bits((3, 5, 8, 2, 40), dtype), any_bits((3, 9, 8, 2, 40), dtype)
    before, expected = source.clone(), target.clone()
    pairs = torch.tensor([[4, 8], [0, 4], [4, 0]], device=DEVICE)
    expected[:, pairs[:, 1]] = source[:, pairs[:, 0]]
    load_kernels(name).copy_blocks(source, pairs, target)
    bits = BITS[dtype.itemsize]
    torch.testing.assert_close(target.view(bits), expected.view(bits), rtol=0, atol=0)
    torch.testing.assert_close(source.view(bits), before.view(bits), rtol=0, atol=0)


def test_reference_copies_from_the_first_to_the_second():
    cache = torch.arange(6.0).view(2, 3, 1, 1, 1)
    reference.copy_blocks(cache, torch.tensor([[2, 0]]))
    assert cache.flatten().tolist() == [2, 1, 2, 5, 4, 5]


def test_wrong_inputs_are_named():
    copy_blocks = load_kernels("triton").copy_blocks
    cache, pairs = torch.randn(2, 3, 4, 1, 8), torch.tensor([[0, 1]])
    with pytest.raises(ValueError, match=r"pairs must be torch.int64, got torch.int32"):
        copy_blocks(cache, pairs.int())
    with pytest.raises(ValueError, match=r"pairs must have shape \[any, 2\], got \[2\]"):
        copy_blocks(cache, pairs[0])
    with pytest.raises(ValueError, match=r"pairs must be contiguous"):
        copy_blocks(cache, torch.tensor([[0, 9, 1, 9]])[:, ::2])
    with pytest.raises(ValueError, match=r"cache must have shape \[.*\], got \[3, 4, 1, 8\]"):
        copy_blocks(cache[0], pairs)
    with pytest.raises(ValueError, match=r"cache must be contiguous within a block"):
        copy_blocks(cache.transpose(2, 4), pairs)
    with pytest.raises(ValueError, match=r"cache must be one of .*, got torch.float64"):
        copy_blocks(cache.double(), pairs)
    with pytest.raises(ValueError, match="cache is written, and its elements must not share memory"):
        copy_blocks(cache[:, :1].expand(-1, 3, -1, -1, -1), pairs)
    with pytest.raises(ValueError, match="pairs must hold numbers, got a Tensor on meta"):
        copy_blocks(cache, pairs.to("meta"))


def test_wrong_targets_are_named(monkeypatch):
    monkeypatch.setenv("PAGED_DEBUG", "1")
    copy_blocks, pairs = load_kernels("triton").copy_blocks, torch.tensor([[2, 4]])
    cache, target = torch.randn(2, 3, 4, 1, 8), torch.randn(2, 5, 4, 1, 8)
    copy_blocks(cache, pairs, target)
    with pytest.raises(ValueError, match=r"target must have shape .*, got \[2, 5, 4, 1, 7\]"):
        copy_blocks(cache, pairs, target[..., :7])
    with pytest.raises(ValueError, match=r"target must be torch.float32, got torch.float16"):
        copy_blocks(cache, pairs, target.half())
    with pytest.raises(ValueError, match="the sources of pairs must be between 0 and 2, the cache's blocks"):
        copy_blocks(cache, pairs + 1, target)
    with pytest.raises(ValueError, match="the targets of pairs must be between 0 and 4, the target's blocks"):
        copy_blocks(cache, torch.tensor([[2, 5]]), target)
    with pytest.raises(ValueError, match="target must be contiguous within a block"):
        copy_blocks(cache, pairs, target.transpose(2, 4).contiguous().transpose(2, 4))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([[0, 3]], "pairs must be between 0 and 2, the cache's blocks, got 0 to 3"),
        ([[-1, 0]], "pairs must be between 0 and 2, the cache's blocks, got -1 to 0"),
        ([[0, 1], [2, 1]], r"the targets of pairs must not name a place twice, got \[1\] more than once"),
        ([[0, 1], [1, 2]], r"pairs must not have a block as source and as target, got \[1\]"),
    ],
    ids=str,
)
def test_debug_mode_checks_pairs(monkeypatch, pairs, message):
    monkeypatch.setenv("PAGED_DEBUG", "1")
    copy_blocks, cache = load_kernels("triton").copy_blocks, torch.randn(2, 3, 4, 1, 8, device=DEVICE)
    copy_blocks(cache, torch.tensor([[0, 1], [0, 2]], device=DEVICE))
    with pytest.raises(ValueError, match=message):
        copy_blocks(cache, torch.tensor(pairs, device=DEVICE))
