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


def scan_case(dtype, dims, lengths=LENGTHS, contexts=CONTEXTS):
    """Return arguments of mamba2_scan; dims: numbers of groups and heads, sizes of states and heads."""
    torch.manual_seed(3)
    num_groups, num_heads, state_dim, head_dim = dims
    num_tokens = sum(lengths)
    columns = num_heads * head_dim + 2 * num_groups * state_dim
    wide = torch.randn(num_tokens, columns + num_heads + 3, device=DEVICE).to(dtype) * 2
    return {
        "x": wide[:, 3 : 3 + columns],
        "time_steps": wide[:, 3 + columns :],
        "rates": -torch.rand(num_heads, device=DEVICE) * 4,
        "time_bias": torch.randn(num_heads, device=DEVICE),
        "skip": torch.randn(num_heads, device=DEVICE),
        "states": torch.randn(NUM_SLOTS, num_heads, state_dim, head_dim, device=DEVICE),
        **sequences(lengths, contexts),
        "limits": (0.0, float("inf")),
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


def check_scan(name, dtype, case):
    """Compare with float64. Every term of the bound is positive, so that no error cancels in it.

    A number of the state takes part in a product and a sum for each token; e^(rate t) is as wrong as rate t
    is, which no more than 104 of float32's exponents can be; an output adds state_dim products.
    """
    exact = doubled(case)
    sizes = {key: value.abs() if key in ("x", "states", "skip") else value for key, value in exact.items()}
    expected = reference.mamba2_scan(**exact)
    largest = reference.mamba2_scan(**sizes)
    got = load_kernels(name).mamba2_scan(**case)
    longest = int(case["cu_seqlens_q"].diff().max())
    terms = longest * (4 + 4 * 104) + case["states"].shape[2] + 16
    bound = terms * EPS[torch.float32]
    assert ((got - expected).abs() <= bound * largest + EPS[dtype] * expected.abs() + 1e-30).all()
    for case_states, expected_states, size in zip(
        case["states"], exact["states"], sizes["states"], strict=True
    ):
        assert ((case_states - expected_states).abs() <= bound * size + 1e-30).all()


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("dims", [(2, 4, 16, 16), (1, 3, 24, 40), (1, 1, 7, 5), (2, 2, 32, 130)], ids=str)
def test_mamba2_scan_matches_float64(name, dtype, dims):
    case = scan_case(dtype, dims)
    before = case["states"].clone()
    new = case["slots"][[0, 4]].long()  # these begin with zeros, so that what their slots hold is not read
    case["states"][new] = 1e30
    check_scan(name, dtype, case)
    used = case["slots"][[0, 1, 3, 4]].tolist()
    unused = [slot for slot in range(NUM_SLOTS) if slot not in used]
    assert torch.equal(case["states"][unused], before[unused])


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
def test_mamba2_scan_at_the_ends_of_its_time_steps(name, dtype):
    """Decays that underflow to 0 and that are 1, time steps of 0, huge ones, and those that limits change."""
    steps = [-200.0, 200.0, 0.0, -20.0, -3.0, 60.0, 20.0] * 2
    for limits in ((0.0, float("inf")), (0.001, float("inf")), (0.25, 2.0)):
        case = scan_case(dtype, (1, 2, 16, 16)) | {"limits": limits}
        case["time_steps"][:] = torch.tensor(steps, dtype=dtype, device=DEVICE)[:, None]
        case["time_bias"][:] = 0.0
        case["rates"][1] = -1e30
        check_scan(name, dtype, case)


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
def test_a_nan_stays(name, dtype):
    """In its own head and sequence alone."""
    case = scan_case(dtype, (1, 2, 16, 16))
    case["time_steps"][1, 1] = torch.nan
    got = load_kernels(name).mamba2_scan(**case)
    assert got[1:5, 1].isnan().all()
    assert got[:, 0].isfinite().all()
    assert got[5:].isfinite().all()


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
    # Products with the gate that are normalised, with a weight for each head; and products alone.
    wide = torch.randn(111).to(dtype)
    for own, first in ((wide, True), (wide, False), (None, False)):
        options = {"gate_first": first}
        weights = None if own is None else own.double()
        expected = reference.gated_norm(x.double(), weights, gate.double(), 1e-6, **options)
        got = kernels.gated_norm(x, own, gate, 1e-6, **options)
        assert ((got - expected).abs() <= bound * expected.abs() + 1e-7).all()
    rows = x.flatten(1).clone()
    squares = rows.double().relu().square()
    kernels.relu_squared(squared := rows.clone())
    assert ((squared - squares).abs() <= EPS[dtype] * squares + 1e-7).all()
    rows[0, 0] = torch.nan
    kernels.relu_squared(rows)
    assert rows.isnan().sum() == 1
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
    scan = scan_case(dtype, dims, [3, length], [0, 0])
    operations = kernels.gated_delta, kernels.short_conv, kernels.mamba2_scan
    cases = delta, conv, scan
    whole = [operation(**case)[3:] for operation, case in zip(operations, cases, strict=True)]
    slot = int(delta["slots"][1])
    kept = [case["states"][slot] for case in cases]
    for chunk in (1, 2, 3, 7, 22):
        own = [dict(case, states=case["states"] * torch.nan) for case in cases]
        found = [[], [], []]
        for start in range(0, length, chunk):
            end = min(start + chunk, length)
            step = sequences([end - start], [start]) | {"slots": torch.tensor([5], dtype=torch.int32)}
            for case, outs, operation in zip(own, found, operations, strict=True):
                by_token = [name for name in ("qkv", "gates", "x", "time_steps") if name in case]
                rows = {name: case[name][3 + start : 3 + end] for name in by_token}
                outs.append(operation(**case | step | rows))
        for outs, expected, case, state in zip(found, whole, own, kept, strict=True):
            assert torch.equal(torch.cat(outs), expected), chunk
            assert torch.equal(case["states"][5], state), chunk


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
def test_runs_leave_states_as_they_were(name, dtype):
    """Runs of every length, of which a part turns out right: the same as the tokens that were, alone.

    Wrong tokens are NaN. Places are as many as two runs have.
    """
    dims = (1, 3, 24, 130) if dtype is torch.float32 else (2, 4, 16, 16)
    kernels = load_kernels(name)
    rng = random.Random(0)
    longest, total, num_seqs = 3, 14, 3
    whole = [total] * num_seqs, [0] * num_seqs
    conv = conv_case(dtype, 37, 4, gated=True, with_bias=True, lengths=whole[0], contexts=whole[1])
    cases = [  # with the inputs of a token, of which the first is that of wrong tokens
        (kernels.gated_delta, delta_case(dtype, dims, *whole), ("qkv", "gates")),
        (kernels.mamba2_scan, scan_case(dtype, dims, *whole), ("x", "time_steps")),
        (kernels.short_conv, conv, ("x",)),
    ]
    expected = [operation(**case | {"states": case["states"].clone()}) for operation, case, _ in cases]
    places = [
        torch.full((NUM_SLOTS, 2 * longest, width), torch.nan, dtype=dtype, device=DEVICE)
        for width in (*(sum(case[key].shape[1] for key in keys) for _, case, keys in cases[:2]), 37)
    ]
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
        for (operation, case, keys), outs, own_places in zip(cases, expected, places, strict=True):
            own = {key: case[key][rows] for key in keys}
            own[keys[0]][is_wrong] = torch.nan
            found = operation(**case | step | own | {"run_inputs": own_places})
            wanted = outs[rows]
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


def test_reference_of_mamba2_matches_transformers():
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

    case = doubled(scan_case(torch.float32, (2, 4, 16, 8), [9], [0])) | {"limits": (0.05, 1.5)}
    x, keys, queries = case["x"].split([32, 32, 32], dim=1)
    expected = mamba2_chunk_scan(
        x.view(1, 9, 4, 8),
        case["time_steps"][None],
        case["rates"],
        keys.view(1, 9, 2, 16),
        queries.view(1, 9, 2, 16),
        chunk_size=4,
        D=case["skip"],
        dt_bias=case["time_bias"],
        dt_softplus=True,
        dt_limit=case["limits"],
    )
    assert (reference.mamba2_scan(**case) - expected[0]).abs().max() < 2e-4


def test_wrong_inputs_are_named():
    kernels = load_kernels("numba")
    case = delta_case(torch.float32, (2, 4, 16, 16))
    with pytest.raises(ValueError, match=r"qkv must have 4 heads of 16 values, .*, got 127 columns"):
        kernels.gated_delta(**case | {"qkv": case["qkv"][:, 1:]})
    with pytest.raises(ValueError, match="slots"):
        kernels.gated_delta(**case | {"slots": case["slots"] * 0})
    with pytest.raises(ValueError, match="seq_lens must be at least the number of new tokens"):
        kernels.gated_delta(**case | {"seq_lens": case["seq_lens"] * 0})
    scan = scan_case(torch.float32, (2, 4, 16, 16))
    with pytest.raises(ValueError, match=r"x must have 4 heads of 16 numbers, and B and C of 16 .* got 127"):
        kernels.mamba2_scan(**scan | {"x": scan["x"][:, 1:]})
    with pytest.raises(ValueError, match=r"limits must be two ascending numbers from 0 on, got \(1.0, 0.5\)"):
        kernels.mamba2_scan(**scan | {"limits": (1.0, 0.5)})
    with pytest.raises(ValueError, match=r"weight must have the 16 numbers of a head, or 64 of all, got 32"):
        kernels.gated_norm(torch.ones(2, 4, 16), torch.ones(32), torch.ones(2, 64), 1e-6)
    conv = conv_case(torch.float32, 17, 4, gated=False, with_bias=False)
    with pytest.raises(ValueError, match=r"the width of the convolution must be .*, got 9"):
        kernels.short_conv(**conv | {"weight": torch.randn(9, 17)})
