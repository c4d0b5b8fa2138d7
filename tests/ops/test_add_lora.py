"""What LoRA adapters add to the output of a linear layer, against float64 and each row alone."""

import itertools

import pytest
import torch

from paged.kernels import reference
from paged.kernels.backend import load_kernels
from tests.support.kernel_cases import DEVICE, IMPLEMENTATIONS

EPS = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SLOTS = [2, 2, -1, 0, 3, 2, -1, 1, 1, 0, 3, 3, 3, 2, 2, 2, 2, 2, 2]


def case(dtype, in_features, size, max_rank, num_parts, slots=SLOTS, seed=0, out_dtype=None):
    """Return arguments of add_lora: ranks from 0 on, ranges of uneven sizes, NaN beyond each rank."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    a = random(4, num_parts, max_rank, in_features)
    b = random(4, max_rank, size)
    ranks = torch.randint(0, max_rank + 1, (4, num_parts), generator=generator, dtype=torch.int32)
    ranks[2] = max_rank
    ranks[0] = 0
    cuts = sorted({0, size, *torch.randint(1, size + 1, (num_parts,), generator=generator).tolist()})
    columns = [[f, e, i % num_parts] for i, (f, e) in enumerate(itertools.pairwise(cuts))]
    for slot in range(4):
        for part in range(num_parts):
            a[slot, part, ranks[slot, part] :] = torch.nan
        for first, end, part in columns:
            b[slot, ranks[slot, part] :, first:end] = torch.nan
    wide = random(len(slots), in_features + 3)
    out = random(len(slots), size + 5).to(out_dtype or dtype)
    given = {
        "x": wide[:, :in_features],
        "out": out[:, 2 : size + 2],
        "a": a,
        "b": b,
        "ranks": ranks,
        "columns": torch.tensor(columns, dtype=torch.int32),
        "slots": torch.tensor(slots, dtype=torch.int32),
    }
    return {name: value.to(DEVICE) for name, value in given.items()}


def doubled(given):
    return {name: x.double() if x.is_floating_point() else x for name, x in given.items()}


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("in_features", "size", "max_rank", "num_parts", "is_router"),
    [(64, 96, 8, 1, False), (71, 1100, 33, 3, False), (8, 5, 1, 1, False), (200, 130, 64, 2, True)],
)
def test_each_row_gets_what_its_adapter_makes_and_the_same_bits_alone(
    name, dtype, in_features, size, max_rank, num_parts, is_router
):
    """The output of a router is float32, whatever x is."""
    kernels = load_kernels(name)
    out_dtype = torch.float32 if is_router else dtype
    given = case(dtype, in_features, size, max_rank, num_parts, out_dtype=out_dtype)
    exact = doubled(given)
    before = given["out"].clone()
    one_by_one = [
        given | {key: given[key][i : i + 1].clone() for key in ("x", "out", "slots")}
        for i in range(len(SLOTS))
    ]
    reference.add_lora(**exact)
    kernels.add_lora(**given)
    # Sums of in_features and then of rank products in float32, of absolute values; one rounding at the end.
    sizes = doubled(given) | {"out": before.double().abs()}
    sizes |= {key: sizes[key].abs() for key in ("x", "a", "b")}
    reference.add_lora(**sizes)
    bound = (in_features + max_rank + 4) * EPS[torch.float32] * sizes["out"]
    bound += EPS[out_dtype] * exact["out"].abs()
    assert ((given["out"] - exact["out"]).abs() <= bound).all()
    is_exact = name == "numba" or DEVICE == "cuda"  # a product of the interpreter is numpy's
    for row, alone in enumerate(one_by_one if is_exact else one_by_one[:1]):
        kernels.add_lora(**alone)
        assert ((alone["out"][0] - exact["out"][row]).abs() <= bound[row]).all()
        assert not is_exact or torch.equal(alone["out"][0], given["out"][row])
    for row, slot in enumerate(SLOTS):
        if slot <= 0:  # no adapter, or one of rank 0
            assert torch.equal(given["out"][row], before[row])


def test_the_interpreter_multiplies_numbers_of_bfloat16():
    """It rounds them towards 0, but its products of two tiles would be those of the bits as integers."""
    given = case(torch.bfloat16, 64, 96, 8, 1)
    expected = {key: x.clone() for key, x in given.items()}
    reference.add_lora(**expected)
    load_kernels("triton").add_lora(**given)
    torch.testing.assert_close(given["out"], expected["out"], rtol=2**-6, atol=0.1)


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
def test_no_rows_launch_nothing_wrong(name, dtype):
    given = case(dtype, 16, 24, 4, 2, slots=[])
    load_kernels(name).add_lora(**given)


WRONG = {
    "ranks must be between 0 and 8": ("ranks", lambda x: x + 9),
    "slots must be between -1 and 3": ("slots", lambda x: x + 4),
    "columns must be ranges of 96 columns": ("columns", lambda x: x + 1),
    "b must have shape": ("b", lambda x: x[:, :, :-1]),
    "a must": ("a", lambda x: x[..., :-1]),
}


@pytest.mark.parametrize("message", WRONG)
@pytest.mark.parametrize("name", ["torch", "numba", "triton"])
def test_wrong_arguments_are_named_before_anything_is_written(name, message):
    given = case(torch.float32, 64, 96, 8, 1)
    argument, change = WRONG[message]
    given[argument] = change(given[argument])
    before = given["out"].clone()
    with pytest.raises(ValueError, match=message):
        load_kernels(name).add_lora(**given)
    assert torch.equal(given["out"], before)
