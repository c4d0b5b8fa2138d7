"""Operations of layers that keep a state: convolutions along time, the gated delta rule, gated norms."""

import random

import pytest
import torch

from paged.kernels import reference
from paged.kernels.backend import load_kernels
from tests.support.error_bounds import SAME_IN_FLOAT64
from tests.support.kernel_cases import DEVICE, IMPLEMENTATIONS, cu_seqlens, on_cpu

EPS = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
NUM_SLOTS = 7
LENGTHS, CONTEXTS = [5, 1, 0, 7, 1], [0, 3, 4, 9, 0]


def sequences(lengths=LENGTHS, contexts=CONTEXTS, seed=0):
    """Return the slots, lengths and bounds of ragged sequences."""
    order = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(seed))
    return {
        "slots": order[: len(lengths)].int().to(DEVICE),
        "seq_lens": torch.tensor([a + b for a, b in zip(lengths, contexts, strict=True)]).int().to(DEVICE),
        "cu_seqlens_q": cu_seqlens(lengths),
    }


def delta_case(dtype, dims, lengths=LENGTHS, contexts=CONTEXTS):
    """Return arguments of gated_delta; dims: numbers of heads of K and V, and their sizes."""
    torch.manual_seed(0)
    num_key_heads, num_heads, key_dim, value_dim = dims
    num_tokens = sum(lengths)
    wide = torch.randn(num_tokens, 2 * num_heads + 3, device=DEVICE).to(dtype) * 3
    return {
        "qkv": torch.randn(num_tokens, 2 * num_key_heads * key_dim + num_heads * value_dim, device=DEVICE)
        .mul(2)
        .to(dtype),
        "gates": wide[:, 3:],
        "rates": -torch.rand(num_heads, device=DEVICE) * 4,
        "time_bias": torch.randn(num_heads, device=DEVICE),
        "states": torch.randn(NUM_SLOTS, num_heads, key_dim, value_dim, device=DEVICE),
        **sequences(lengths, contexts),
    }


def conv_case(dtype, size, width, *, gated, with_bias, lengths=LENGTHS, contexts=CONTEXTS):
    """Return arguments of short_conv."""
    torch.manual_seed(1)
    columns = size * (3 if gated else 1)
    return {
        "x": torch.randn(sum(lengths), columns + 2, device=DEVICE).to(dtype)[:, :columns],
        "weight": torch.randn(width, size, device=DEVICE),
        "bias": torch.randn(size, device=DEVICE) if with_bias else None,
        "states": torch.randn(NUM_SLOTS, width - 1, size, device=DEVICE).to(dtype),
        **sequences(lengths, contexts),
        "gated": gated,
    }


def doubled(case):
    """Return a case in float64, with states of its own."""
    return {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in case.items()
    }


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("dims", [(2, 4, 16, 16), (1, 3, 24, 40), (1, 1, 7, 5), (1, 2, 32, 130)], ids=str)
def test_gated_delta_matches_float64(name, dtype, dims):
    case = delta_case(dtype, dims)
    new = [0, 4]  # these begin with zeros, so that what their slots hold is not read
    case["states"][case["slots"][new].long()] = torch.nan
    exact = doubled(case)
    expected = reference.gated_delta(**exact)
    got = load_kernels(name).gated_delta(**case)
    # A sum over key_dim for each of at most 7 tokens in a chain, of numbers whose sizes the states bound.
    used = case["slots"][[0, 1, 3, 4]].long()
    bound = 8 * 7 * (dims[2] + 8) * EPS[torch.float32]
    largest = 1 + exact["states"][used].abs().amax()
    assert (case["states"][used] - exact["states"][used]).abs().max() <= bound * largest
    assert ((got - expected).abs() <= bound * largest + EPS[dtype] * expected.abs()).all()
    unused = [slot for slot in range(NUM_SLOTS) if slot not in used.tolist()]
    assert torch.equal(case["states"][unused].double(), exact["states"][unused])


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
def test_gated_delta_at_the_ends_of_its_gates(name, dtype):
    """Decays that underflow to 0, and gates that write all or nothing."""
    case = delta_case(dtype, (1, 2, 16, 16))
    case["gates"][:, 0] = torch.tensor([-200.0, 200.0, 0.0, -0.0] * 4, dtype=dtype, device=DEVICE)[:14]
    case["gates"][:, 2:] = torch.tensor([300.0, -300.0, 60.0, 0.0] * 4, dtype=dtype, device=DEVICE)[:14, None]
    case["rates"][1] = -1e30
    expected = reference.gated_delta(**doubled(case))
    got = load_kernels(name).gated_delta(**case)
    assert torch.isfinite(got).all()
    assert ((got - expected).abs() <= 1e-4 + EPS[dtype] * expected.abs()).all()


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("size", "width", "gated", "with_bias"),
    [(17, 4, False, False), (300, 3, True, True), (40, 8, True, False)],
)
def test_short_conv_matches_float64(name, dtype, size, width, gated, with_bias):
    case = conv_case(dtype, size, width, gated=gated, with_bias=with_bias)
    case["states"][case["slots"][[0, 4]].long()] = torch.nan  # these begin with zeros
    exact = doubled(case)
    if gated:  # the inputs, which are rounded
        x = case["x"]
        product = (x[:, :size].float() * x[:, 2 * size :].float()).to(dtype).double()
        exact["x"] = torch.cat([torch.ones_like(product), x[:, size : 2 * size].double(), product], dim=1)
    expected = reference.short_conv(**exact)
    got = load_kernels(name).short_conv(**case)
    bound = 16 * width * EPS[torch.float32] * (1 + expected.abs().max())
    assert ((got - expected).abs() <= bound + EPS[dtype] * expected.abs()).all()
    assert torch.equal(case["states"].double().nan_to_num(), exact["states"].nan_to_num())


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
def test_gated_norm_and_sigmoid_match_float64(name, dtype):
    torch.manual_seed(2)
    kernels = load_kernels(name)
    x = torch.randn(5, 3, 37, device=DEVICE).to(dtype)
    weight = torch.randn(37, device=DEVICE).to(dtype)
    gate = (torch.randn(5, 120, device=DEVICE).to(dtype) * 4)[:, :111]
    expected = reference.gated_norm(x.double(), weight.double(), gate.double(), 1e-6)
    got = kernels.gated_norm(x, weight, gate, 1e-6)
    bound = 64 * EPS[torch.float32] + EPS[dtype]
    assert ((got - expected).abs() <= bound * expected.abs() + 1e-7).all()
    rows = x.flatten(1).clone()
    reference.scale_by_sigmoid(exact := rows.double(), gate.double())
    kernels.scale_by_sigmoid(rows, gate)
    assert ((rows - exact).abs() <= bound * exact.abs() + 1e-7).all()


@on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_bits_in_every_division_into_steps(dtype):
    """A prompt in chunks of any size, down to single tokens, beside others or alone."""
    kernels = load_kernels("numba")
    dims, length = (2, 4, 16, 72), 23
    delta = delta_case(dtype, dims, [3, length], [0, 0])
    conv = conv_case(dtype, 300, 4, gated=False, with_bias=False, lengths=[3, length], contexts=[0, 0])
    whole = [kernels.gated_delta(**delta)[3:], kernels.short_conv(**conv)[3:]]
    slot = int(delta["slots"][1])
    kept = delta["states"][slot], conv["states"][slot]
    for chunk in (1, 2, 3, 7, 22):
        own = [delta_case(dtype, dims, [3, length], [0, 0]), dict(conv, states=conv["states"] * torch.nan)]
        found = [[], []]
        for start in range(0, length, chunk):
            end = min(start + chunk, length)
            step = sequences([end - start], [start]) | {"slots": torch.tensor([5], dtype=torch.int32)}
            for case, outs, row, operation in zip(
                own, found, ("qkv", "x"), (kernels.gated_delta, kernels.short_conv), strict=True
            ):
                rows = {name: case[name][3 + start : 3 + end] for name in (row, "gates") if name in case}
                outs.append(operation(**case | step | rows))
        for outs, expected, case, state in zip(found, whole, own, kept, strict=True):
            assert torch.equal(torch.cat(outs), expected), chunk
            assert torch.equal(case["states"][5], state), chunk


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("dims", [(2, 4, 16, 16), (1, 3, 24, 130)], ids=str)
def test_runs_leave_states_as_they_were(name, dtype, dims):
    """Runs of every length, of which a part turns out right: the same as the tokens that were, alone.

    Wrong tokens are NaN. Places are as many as two runs have.
    """
    kernels = load_kernels(name)
    rng = random.Random(0)
    longest, total, num_seqs = 3, 14, 3
    delta = delta_case(dtype, dims, [total] * num_seqs, [0] * num_seqs)
    conv = conv_case(dtype, 37, 4, gated=True, with_bias=True, lengths=[total] * num_seqs, contexts=[0, 0, 0])
    expected = {
        "qkv": kernels.gated_delta(**delta | {"states": delta["states"].clone()}),
        "x": kernels.short_conv(**conv | {"states": conv["states"].clone()}),
    }
    cases = {"qkv": (kernels.gated_delta, delta), "x": (kernels.short_conv, conv)}
    places = {
        row: torch.full((NUM_SLOTS, 2 * longest, width), torch.nan, dtype=dtype, device=DEVICE)
        for row, width in (("qkv", delta["qkv"].shape[1] + 2 * dims[1]), ("x", 37))
    }
    done, unapplied = [0] * num_seqs, [0] * num_seqs
    while min(done) < total:
        lengths, right, rows, are_runs = [], [], [], []
        for sequence in range(num_seqs):
            left = total - done[sequence]
            is_run = bool(left and done[sequence] and rng.random() < 0.7)
            lengths.append(rng.randint(1, min(longest if is_run else 5, left)) if left else 0)
            right.append(rng.randint(1, lengths[-1]) if is_run else lengths[-1])
            are_runs.append(is_run)
            rows += [sequence * total + done[sequence] + i for i in range(lengths[-1])]
        step = sequences(lengths, done) | {
            "runs": torch.tensor([*zip(unapplied, map(int, are_runs), strict=True)]).int().to(DEVICE)
        }
        is_wrong = torch.cat([torch.arange(n) >= m for n, m in zip(lengths, right, strict=True)]).to(DEVICE)
        for row, (operation, case) in cases.items():
            own = {key: case[key][rows] for key in (row, "gates") if key in case}
            own[row][is_wrong] = torch.nan
            found = operation(**case | step | own | {"run_inputs": places[row]})
            wanted = expected[row][rows]
            if name == "numba":
                assert torch.equal(found[~is_wrong], wanted[~is_wrong])
            torch.testing.assert_close(found[~is_wrong], wanted[~is_wrong], rtol=8 * EPS[dtype], atol=1e-4)
        for sequence in range(num_seqs):
            done[sequence] += right[sequence]
            if lengths[sequence]:
                unapplied[sequence] = right[sequence] if are_runs[sequence] else 0


def test_wrong_runs_are_named():
    kernels = load_kernels("numba")
    case = delta_case(torch.float32, (2, 4, 16, 16))
    inputs = torch.zeros(NUM_SLOTS, 6, 136)
    runs = torch.zeros(5, 2, dtype=torch.int32)
    kernels.gated_delta(**case, run_inputs=inputs, runs=runs)
    with pytest.raises(ValueError, match="runs and run_inputs must be given together"):
        kernels.gated_delta(**case, runs=runs)
    for sequence, row in ((0, [1, 0]), (1, [4, 0]), (3, [0, 1]), (4, [0, 2]), (1, [-1, 0])):
        wrong = runs.clone()
        wrong[sequence] = torch.tensor(row)
        with pytest.raises(ValueError, match=rf"fit in 6 places; got .* at sequence {sequence}, which"):
            kernels.gated_delta(**case, run_inputs=inputs, runs=wrong)


def test_reference_matches_transformers():
    from transformers.models.qwen3_5.modeling_qwen3_5 import (
        causal_conv1d_fn,
        torch_recurrent_gated_delta_rule,
    )

    case = doubled(delta_case(torch.float32, (2, 4, 16, 16), [9], [0]))
    query, key, value = case["qkv"].split([32, 32, 64], dim=1)
    b, a = case["gates"].split(4, dim=1)
    decay = case["rates"] * torch.nn.functional.softplus(a + case["time_bias"])
    expected, _ = torch_recurrent_gated_delta_rule(
        *(each.view(1, 9, -1, 16).float() for each in (query, key, value)),
        g=decay[None].float(),
        beta=b.sigmoid()[None].float(),
        use_qk_l2norm_in_kernel=True,
    )
    got = reference.gated_delta(**case)
    assert (got - expected[0]).abs().max() < 1e-5
    conv = doubled(conv_case(torch.float32, 17, 4, gated=False, with_bias=False, lengths=[9], contexts=[0]))
    expected = causal_conv1d_fn(conv["x"].T[None], conv["weight"].T, activation="silu")
    torch.testing.assert_close(reference.short_conv(**conv), expected[0].T, **SAME_IN_FLOAT64)


def test_wrong_inputs_are_named():
    kernels = load_kernels("numba")
    case = delta_case(torch.float32, (2, 4, 16, 16))
    with pytest.raises(ValueError, match=r"qkv must have 4 heads of 16 values, .*, got 127 columns"):
        kernels.gated_delta(**case | {"qkv": case["qkv"][:, 1:]})
    with pytest.raises(ValueError, match="slots"):
        kernels.gated_delta(**case | {"slots": case["slots"] * 0})
    with pytest.raises(ValueError, match="seq_lens must be at least the number of new tokens"):
        kernels.gated_delta(**case | {"seq_lens": case["seq_lens"] * 0})
    conv = conv_case(torch.float32, 17, 4, gated=False, with_bias=False)
    with pytest.raises(ValueError, match=r"the width of the convolution must be .*, got 9"):
        kernels.short_conv(**conv | {"weight": torch.randn(9, 17)})
