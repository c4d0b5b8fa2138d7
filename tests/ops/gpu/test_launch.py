"""Launches that are kept: equal to those of Triton's dispatch, of what still fits, and not too many."""

import json
import random
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from paged.kernels import reference
from paged.kernels.attention_options import AttentionOptions
from paged.kernels.backend import load_kernels
from paged.kernels.checks import TrustedContents
from paged.kernels.gpu.attention import descriptors
from paged.kernels.gpu.attention.config import FAMILIES
from paged.kernels.gpu.launch import MOST_COMBINATIONS, BoundLaunch, Launches, combination
from paged.kernels.gpu.occupancy import AMD_LIMITS, SM_LIMITS, blocks_per_sm
from tests.aot import run_compiler
from tests.support.kernel_cases import DEVICE

KERNELS = load_kernels("triton")


@pytest.fixture(scope="module")
def found():
    return json.loads(run_compiler("tests.support.bound_launches"))


@pytest.mark.parametrize(("target", "num_calls", "num_launches"), [("sm_90", 133, 346), ("gfx942", 129, 336)])
def test_later_calls_launch_what_triton_would_without_asking_it(found, target, num_calls, num_launches):
    """The same kernels, grids, streams, tensors, descriptors, numbers and constants, for every launcher."""
    expected = {"calls": num_calls, "launches": num_launches, "dispatched": 0, "differ": []}
    assert {name: found[target][name] for name in expected} == expected


def test_a_decode_has_as_many_programs_as_fit(found):
    """Blocks of 70,000 bytes of shared memory: three on an SM, one on a CU, of which there is one here."""
    assert [found[target]["programs"] for target in ("sm_90", "gfx942")] == [3, 1]


def test_triton_is_asked_again_where_another_kernel_may_be_needed(found):
    """For each call of one launcher: dispatches, the stream, and which kernel it was."""
    assert list(found["changes"].items()) == [
        ("first", [1, 7, 0]),
        ("second", [0, 7, 0]),
        ("an odd address", [1, 7, 1]),
        ("an address as at first", [0, 7, 0]),
        ("another stream", [0, 8, 0]),
        ("another device, first", [1, 108, 2]),
        ("another device, second", [0, 108, 2]),
        ("the first device again", [0, 8, 0]),
        ("a hook before", [1, 8, 0]),
        ("a hook after", [1, 8, 0]),
        ("no hook", [0, 8, 0]),
    ]


def test_triton_is_asked_on_an_amd_gpu_where_memory_is_large(found):
    assert list(found["sizes"].items()) == [
        ("first", [1, 7, 0]),
        ("second", [0, 7, 0]),
        ("in 2 GiB", [1, 7, 1]),
        ("in little again", [1, 7, 0]),
        ("and once more", [0, 7, 0]),
    ]


def valid():
    """Return valid arguments of each launcher, by name: what the layers of an engine give it."""
    heads = torch.randn(3, 8, 16, device=DEVICE)
    caches = torch.randn(2, 4, 16, 2, 16, device=DEVICE)
    lengths = torch.tensor([5, 20, 9], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 1, 3, 3], dtype=torch.int32, device=DEVICE)
    tables = torch.tensor([[0, 1], [1, 2], [3, 0]], dtype=torch.int32, device=DEVICE)
    x, weight = torch.randn(3, 32, device=DEVICE), torch.ones(32, device=DEVICE)
    angles = torch.randn(3, 8, device=DEVICE)
    slots = torch.tensor([4, 35, 56], device=DEVICE)
    return {
        "rms_norm": {"x": x, "weight": weight, "eps": 1e-6, "residual": x.clone(), "unit_offset": False},
        "rms_norm_into": {
            "x": x, "weight": weight, "eps": 1e-6, "out": x.clone(), "unit_offset": False, "add": True,
        },
        "silu_and_mul": {"x": x},
        "gelu_and_mul": {"x": x},
        "layer_norm": {
            "x": x, "weight": weight, "bias": weight.clone(), "eps": 1e-6, "residual": x.clone(),
        },
        "gelu": {"x": x.clone(), "tanh": False},
        "scale_and_cap": {"x": x.clone(), "factor": 2.0, "softcap": 3.0},
        "scale_rows": {"x": x.clone(), "factors": angles[:, 0].contiguous()},
        "copy_blocks": {"cache": caches, "pairs": torch.tensor([[0, 1]], device=DEVICE)},
        "rotary_store_kv": {
            "qkv": heads, "cos": angles, "sin": angles.clone(), "key_cache": caches[0],
            "value_cache": caches[1], "slot_mapping": slots, "query_norm_weight": weight[:16],
            "key_norm_weight": weight[16:], "eps": 1e-6, "unit_offset": False,
        },
        "paged_attention": {
            "query": heads[:, :4].contiguous(), "key_cache": caches[0], "value_cache": caches[1],
            "block_tables": tables, "seq_lens": lengths, "cu_seqlens_q": starts,
            "options": AttentionOptions(scale=0.25, max_seqlen_q=2),
        },
    }  # fmt: skip


DAMAGES = {
    "dtype": lambda x: x.double() if x.is_floating_point() else x.to(torch.int16),
    "more": lambda x: torch.cat([x, x]),
    "dims": lambda x: x[None],
    "device": lambda x: x.to("meta"),
    "strides": lambda x: torch.stack([x, x], dim=-1)[..., 0],
    "type": lambda x: x.tolist(),
}
# Other arguments that are no tensors, and none of them a valid one; 1 == True and 0 == False.
OTHERS = {
    "eps": [True, None, [], "1e-6", -1.0],
    "unit_offset": [0, 1, None, []],
    "add": [0, 1, None, []],
    "tanh": [0, 1, None, []],
    "factor": [True, None, [], "1", 0.0],
    "softcap": [True, [], "1", 0.0],
}
# What is valid all the same: strides and numbers of rows that a kernel takes.
VALID = {
    "rms_norm": [],
    "rms_norm_into": [],
    "silu_and_mul": ["x more"],
    "gelu_and_mul": ["x more"],
    "layer_norm": [],
    "gelu": ["x more"],
    "scale_and_cap": ["x more"],
    "scale_rows": [],
    "copy_blocks": ["cache more", "pairs more"],
    "rotary_store_kv": [],
    "paged_attention": ["query more"],
}


@pytest.mark.parametrize("name", VALID)
def test_a_later_call_that_does_not_fit_is_refused(name):
    operation, arguments, accepted = getattr(KERNELS, name), valid()[name], []
    with TrustedContents():  # as in a step: nothing but what was kept is checked
        operation(**arguments)
        for argument, value in arguments.items():
            if isinstance(value, torch.Tensor):
                wrong = {damage: change(value) for damage, change in DAMAGES.items()}
            else:
                wrong = {str(i): other for i, other in enumerate(OTHERS.get(argument, []))}
            if name in ("silu_and_mul", "gelu_and_mul", "gelu", "scale_and_cap"):
                wrong.pop("device", None)  # the only tensor, and the interpreter has no current device
            for damage, other in wrong.items():
                try:
                    operation(**{**arguments, argument: other})
                except ValueError:
                    continue
                accepted.append(f"{argument} {damage}")
    assert accepted == VALID[name]


def test_a_later_call_that_shares_memory_is_refused():
    arguments = valid()["rotary_store_kv"]
    with TrustedContents():
        KERNELS.rotary_store_kv(**arguments)
        with pytest.raises(ValueError, match="must not be the same memory"):
            KERNELS.rotary_store_kv(**{**arguments, "value_cache": arguments["key_cache"]})


def test_a_changed_option_is_another_launch():
    """Every option in turn, and the first again: each time the result of the reference."""
    norm = valid()["rms_norm"]
    norms = [{"eps": 0.5}, {"unit_offset": True}, {"residual": None}, {}]
    attention = valid()["paged_attention"]
    options = attention["options"]
    sinks = torch.randn(4, device=DEVICE)
    changes = [
        {"scale": 1.0}, {"softcap": 2.0}, {"sliding_window": 3}, {"sinks": sinks},
        {"max_seqlen_q": 3}, {"min_seqlen_q": 1}, {"max_decode_q": 2}, {},
    ]  # fmt: skip
    with TrustedContents():
        for change in norms * 2:
            got, expected = (
                operation(**{**norm, "residual": norm["residual"].clone(), **change})
                for operation in (KERNELS.rms_norm, reference.rms_norm)
            )
            torch.testing.assert_close(got, expected)
        for change in changes * 2:
            given = {**attention, "options": options._replace(**change)}
            torch.testing.assert_close(KERNELS.paged_attention(**given), reference.paged_attention(**given))


def test_the_oldest_of_too_many_combinations_goes():
    bound = Launches(lambda number: f"launch {number}")
    for number in range(MOST_COMBINATIONS + 10):
        assert bound.find((number,), number) == f"launch {number}"
    assert len(bound._kept) == MOST_COMBINATIONS
    assert bound.find((10,), -1) == "launch 10"
    assert bound.find((9,), -1) == "launch -1", "it was bound anew"
    assert bound.find(None, 1) == "launch 1"
    assert len(bound._kept) == MOST_COMBINATIONS, "what has no key is not kept"


def test_threads_share_what_is_kept():
    """Engines in several threads, more combinations than are kept: each call gets its own launch."""
    bound = Launches(lambda number: number)

    def call(seed):
        numbers = random.Random(seed).choices(range(MOST_COMBINATIONS + 50), k=3000)
        return [number for number in numbers if bound.find((number,), number) != number]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(call, range(8))) == [[]] * 8
    assert len(bound._kept) == MOST_COMBINATIONS


def test_a_launch_may_be_made_while_another_thread_makes_the_first():
    """The other comes first, while the kernel is compiled from which the grid follows."""
    launched, others = [], [lambda: launch(torch.zeros(1))]

    class Kernel:
        arg_names = ("x",)
        params = (SimpleNamespace(do_not_specialize_on_alignment=False),)

        def run(self, **_):
            if others:
                others.pop()()

        def __getitem__(self, grid):
            return lambda **_: launched.append(grid)

    launch = BoundLaunch(Kernel(), lambda _: (3,))
    launch(torch.zeros(1))
    assert launched == [(3, 1, 1)] * 2


def test_what_is_refused_is_not_kept():
    calls = []

    def bind(argument):
        calls.append(argument)
        raise ValueError("wrong")

    bound = Launches(bind)
    for _ in range(2):
        with pytest.raises(ValueError, match="wrong"):
            bound.find((1,), 1)
    assert calls == [1, 1]
    assert len(bound._kept) == 0


def test_outside_of_steps_all_that_may_be_wrong_with_a_tensor_is_in_the_key(monkeypatch):
    monkeypatch.delenv("PAGED_DEBUG", raising=False)
    x = torch.empty(4, 8, device="meta")  # for a GPU's: a CPU's numbers are read in every call
    shrunk = torch.empty(4, 8, device="meta")
    shrunk.untyped_storage().resize_(0)
    with torch.inference_mode():
        inference = torch.empty(4, 8, device="meta")
    others = [x.T, x[:3], x.half(), x.clone().requires_grad_(), shrunk, inference, torch.nn.Parameter(x)]
    key = combination((x,))
    assert key == combination((x.clone(),))
    assert key is not None
    assert key not in [combination((other,)) for other in others]
    with torch.no_grad():
        assert combination((x,)) != key
    assert combination((torch.ones(2),)) is None
    monkeypatch.setenv("PAGED_DEBUG", "1")
    assert combination((x,)) is None


def test_descriptors_are_made_once_and_do_not_keep_a_cache(monkeypatch):
    made = []
    from_tensor = descriptors.TensorDescriptor.from_tensor
    monkeypatch.setattr(
        descriptors.TensorDescriptor, "from_tensor", lambda *args: made.append(1) or from_tensor(*args)
    )
    cache, box = torch.randn(2, 64, 2, 128, device=DEVICE), (1, 64, 1, 128)
    first = descriptors.describe(cache, box)
    assert descriptors.describe(cache, box) is first
    assert descriptors.describe(cache, (1, 32, 1, 128)).block_shape[1] == 32
    assert len(made) == 2
    cache.data = torch.randn(3, 64, 2, 128, device=DEVICE)
    assert descriptors.describe(cache, box).shape[0] == 3, "the cache is elsewhere now"
    ends = []
    weakref.finalize(descriptors.describe(cache, box).base, ends.append, 1)
    del cache
    assert ends == [1], "its memory would still be taken"


# registers, shared memory and warps of a block, and how many fit.
@pytest.mark.parametrize(
    ("target", "registers", "shared", "warps", "expected"),
    [
        ("sm_90", 128, 0, 4, 4),  # 65,536 registers
        ("sm_90", 121, 0, 4, 4),  # in units of 8
        ("sm_90", 168, 65536, 4, 3),
        ("sm_90", 32, 100 * 1024, 4, 2),  # 228 KiB, 1 of which each block takes
        ("sm_90", 16, 0, 4, 16),  # 64 warps
        ("sm_90", 16, 0, 1, 32),  # 32 blocks
        ("sm_90", 255, 227 * 1024, 16, 1),
        ("sm_89", 16, 0, 4, 12),  # 48 warps
        ("sm_120", 64, 49 * 1024, 4, 2),
        ("gfx942", 128, 16 * 1024, 4, 4),  # 512 registers of a lane
        ("gfx942", 64, 33 * 1024, 4, 1),
        ("gfx1100", 96, 0, 8, 8),
        ("sm_90", 0, 0, 4, 16),  # a kernel of which nothing is known
    ],
)
def test_programs_that_fit(target, registers, shared, warps, expected):
    assert blocks_per_sm(target, registers, shared, warps) == expected


def test_every_target_with_tiles_has_limits():
    assert FAMILIES.keys() == SM_LIMITS.keys() | AMD_LIMITS.keys()
