"""K and V by descriptors: the bits that pointers give, and where they are not for."""

import pytest
import torch

from paged.kernels import reference
from paged.kernels.gpu.attention import launches
from paged.kernels.gpu.attention import paged_attention as triton_attention
from paged.kernels.gpu.attention.config import choose_config
from paged.kernels.gpu.attention.descriptors import describe, loads_by_descriptors
from paged.kernels.gpu.target import in_interpreter
from tests.support.error_bounds import assert_exact_enough
from tests.support.kernel_cases import attend, quantized, ragged_case, take_sequences

# Around the edges of a tile (64) and a block.
SEQ_LENS, QUERY_LENS = [300, 64, 129, 1, 63], [1, 1, 3, 1, 2]


@pytest.fixture
def hopper(monkeypatch):
    """Use the tiles of a Hopper GPU, in the interpreter if there is none."""
    if in_interpreter():
        monkeypatch.setattr(triton_attention, "current_target", lambda: "sm_90")
    elif triton_attention.current_target() not in ("sm_90", "sm_100", "sm_103"):
        pytest.skip("this GPU loads by pointers")


def decodes(option=None, **shape):
    torch.manual_seed(0)
    window = 70 if option == "window" else None
    case = ragged_case(SEQ_LENS, QUERY_LENS, dtype=torch.float16, sliding_window=window, **shape)
    if option == "int8":
        case = quantized(case, torch.int8)
    caches = {name: case[name].contiguous() for name in ("key_cache", "value_cache")}
    if option == "one plane":  # the parts of a block lie one after the other, as in a cache of several shapes
        caches = dict(zip(caches, torch.stack([*caches.values()], 1).unbind(1), strict=True))
    return case | caches | {"max_decode_q": 3}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("head_dim", "block_size", "option"),
    [
        (128, 64, None),
        (128, 128, "window"),
        (128, 64, "int8"),
        (128, 256, None),
        (256, 32, "window"),
        (128, 64, "one plane"),
    ],
)
def test_same_bits_as_by_pointers(monkeypatch, head_dim, block_size, option):
    case = decodes(option, head_dim=head_dim, block_size=block_size)
    described = []

    def note(*arguments):
        described.append(describe(*arguments))
        return described[-1]

    monkeypatch.setattr(launches, "describe", note)
    got = attend(triton_attention.paged_attention, **case)
    assert [found.block_shape[3] for found in described] == [head_dim] * 2
    assert_exact_enough(got, case, reference.paged_attention)
    monkeypatch.setattr(launches, "loads_by_descriptors", lambda *_: False)
    if in_interpreter():  # two binaries may contract to other fused multiply-adds
        torch.testing.assert_close(got, attend(triton_attention.paged_attention, **case), rtol=0, atol=0)


@pytest.mark.usefixtures("hopper")
def test_values_that_are_the_keys_hold_no_nan_of_others():
    case = decodes(head_dim=128, block_size=64, num_kv_heads=1)
    case["value_cache"] = case["key_cache"]
    assert_exact_enough(attend(triton_attention.paged_attention, **case), case, reference.paged_attention)


@pytest.mark.usefixtures("hopper")
def test_neighbours_do_not_change_a_bit():
    case = decodes(head_dim=128, block_size=64)
    together = attend(triton_attention.paged_attention, **case).split(QUERY_LENS)
    for some in ([0], [2, 4], [3, 0, 1]):
        got = attend(triton_attention.paged_attention, **take_sequences(case, some))
        torch.testing.assert_close(got, torch.cat([together[i] for i in some]), rtol=0, atol=0)


def caches(head_dim=128, block_size=64, dtype=torch.bfloat16):
    return torch.empty(2, 3, block_size, 4, head_dim, dtype=dtype).unbind(0)


def loads(key_cache, value_cache, target="sm_90", use="decode", group=4, dtype=torch.bfloat16):
    config = choose_config(key_cache.shape[3], group, dtype, use, target)
    return loads_by_descriptors(key_cache, value_cache, config, dtype, target)


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "sm_103"])
def test_decode_of_whole_tiles_loads_by_descriptors(target):
    assert loads(*caches(), target)
    assert loads(*caches(block_size=256, dtype=torch.int8), target, group=16)
    assert loads(*caches(head_dim=256, block_size=32), target)


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_120", "gfx942", "interpreter"])
def test_other_targets_load_by_pointers(target):
    assert not loads(*caches(), target)


def test_pointers_load_what_no_box_holds_or_gains_by():
    key, value = caches()
    assert not loads(*caches(block_size=32)), "a tile of several blocks"
    assert not loads(*caches(head_dim=64)), "more registers"
    assert not loads(*caches(head_dim=96)), "padded"
    assert not loads(key, value, use="prefill")
    assert not loads(key, value, group=20), "as many rows as a prefill"
    assert not loads(*caches(dtype=torch.float32), dtype=torch.float32)
    assert not loads(key, value[..., :64]), "MLA's values are a view of the keys"
    assert not loads(*(cache[:, :, ::2] for cache in (key, value))), "every other head"
    assert not loads(key[:0], value[:0])
    odd = torch.empty(key.numel() + 1, dtype=key.dtype)[1:].view(key.shape)
    assert not loads(key, key), "values that are the keys: their tile is not zeroed"
    assert not loads(odd, value), "2 bytes past a multiple of 16"
    assert not loads(key, odd)
    one_head = [cache.as_strided((4, 64, 1, 128), (8192, 128, 1, 1)) for cache in (key, value)]
    assert not loads(*one_head), "a stride of 2 bytes, though of one head"
