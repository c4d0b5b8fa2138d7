import pytest
import torch

from paged.kernels import reference
from paged.kernels.backend import load_kernels
from paged.kernels.gpu.sampling.penalties import apply_penalties
from tests.support.kernel_cases import DEVICE

NAMES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


@pytest.fixture(params=["triton", "numba", "reference"])
def apply(request):
    """apply_penalties of each."""
    if request.param == "numba" and DEVICE != "cpu":
        pytest.skip("numba kernels are for a CPU, tensors here are on a GPU")
    return (reference if request.param == "reference" else load_kernels(request.param)).apply_penalties


def history(num_slots, vocab_size, share):
    """Make counts and seen tokens: as many tokens of the prompt as of the output."""
    counts = torch.randint(1, 5, (num_slots, vocab_size), dtype=torch.int32)
    counts[torch.rand(num_slots, vocab_size) >= share] = 0
    seen = (counts > 0) | (torch.rand(num_slots, vocab_size) < share)
    return counts.to(DEVICE), seen.to(DEVICE)


def penalties(*rows):
    """Arguments by name: a (repetition, frequency, presence) for each row."""
    columns = torch.tensor(rows, dtype=torch.float32, device=DEVICE).T.contiguous()
    return dict(zip(NAMES, columns, strict=True))


@pytest.mark.parametrize("share", [0.0005, 0.5], ids=["sparse", "dense"])
@pytest.mark.parametrize("vocab_size", [1, 211, 4095, 8193], ids="vocab_size={}".format)
def test_matches_reference_bit_for_bit(vocab_size, share, apply):
    """Some rows of a wider tensor, histories in other slots; what is not theirs keeps its bits."""
    wide = torch.randn(5, vocab_size + 3, device=DEVICE)
    counts, seen = history(6, vocab_size, share)
    rows, slots = torch.tensor([3, 0, 4], device=DEVICE), torch.tensor([1, 5, 0], device=DEVICE)
    values = penalties((1.3, 0.7, -0.5), (0.5, -2.0, 2.0), (7.0, 0.0, 0.1))
    expected = wide.clone()
    reference.apply_penalties(expected[:, :vocab_size], rows, slots, counts, seen, **values)
    apply(wide[:, :vocab_size], rows, slots, counts, seen, **values)
    assert torch.equal(wide, expected)


def test_by_hand(apply):
    """Token 0 never seen, 1 in the prompt, 2 generated three times, 3 both, 4 never seen and masked."""
    logits = torch.tensor([[8.0, 8.0, 8.0, -8.0, -torch.inf]], device=DEVICE)
    counts = torch.tensor([[0, 0, 3, 1, 0]], dtype=torch.int32, device=DEVICE)
    seen = torch.tensor([[False, True, True, True, False]], device=DEVICE)
    first = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    apply(logits, first, first, counts, seen, **penalties((2.0, 0.5, 0.25)))
    assert logits.tolist() == [[8.0, 4.0, 4.0 - 1.5 - 0.25, -16.0 - 0.5 - 0.25, -torch.inf]]


def test_masked_and_overflowing_logits_stay_what_they_are(apply):
    """-inf is not drawn by any penalty, a NaN is not hidden; the largest float may become inf and be seen."""
    logits = torch.tensor([[-torch.inf, torch.nan, torch.inf]], device=DEVICE)
    counts = torch.ones(1, 3, dtype=torch.int32, device=DEVICE)
    first = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    apply(logits, first, first, counts, counts > 0, **penalties((1.5, -2.0, -2.0)))
    assert logits[0, 0] == -torch.inf
    assert logits[0, 1].isnan()
    assert logits[0, 2] == torch.inf


def test_no_rows(apply):
    logits = torch.randn(2, 5, device=DEVICE)
    before = logits.clone()
    counts, seen = history(1, 5, 1.0)
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    apply(logits, none, none, counts, seen, *[torch.zeros(0, device=DEVICE)] * 3)
    assert torch.equal(logits, before)


def test_wrong_inputs_are_named():
    logits, (counts, seen) = torch.randn(2, 5), history(1, 5, 1.0)
    row = torch.zeros(1, dtype=torch.int64)
    values = penalties((1.0, 0.0, 0.0))
    with pytest.raises(ValueError, match=r"output_counts must have shape \[any, 5\], got \[1, 4\]"):
        apply_penalties(logits, row, row, counts[:, :4], seen, **values)
    with pytest.raises(ValueError, match=r"seen must be torch.bool, got torch.int32"):
        apply_penalties(logits, row, row, counts, counts, **values)
    with pytest.raises(ValueError, match=r"presence_penalty must have shape \[1\], got \[2\]"):
        apply_penalties(logits, row, row, counts, seen, **values | {"presence_penalty": torch.zeros(2)})
    with pytest.raises(ValueError, match="slots must hold numbers, got a Tensor on meta"):
        apply_penalties(logits, row, row.to("meta"), counts, seen, **values)
    with pytest.raises(ValueError, match="logits is written, and its elements must not share memory"):
        apply_penalties(logits[:1].expand(2, -1), row, row, counts, seen, **values)


@pytest.mark.parametrize(
    ("rows", "slots", "message"),
    [
        ([0, 2], [0, 0], "rows must be between 0 and 1, those of logits, got 0 to 2"),
        ([1, 1], [0, 0], r"rows must not name a place twice, got \[1\] more than once"),
        ([0, 1], [0, 1], "slots must be between 0 and 0, those of output_counts, got 0 to 1"),
    ],
    ids=str,
)
def test_debug_mode_checks_rows_and_slots(monkeypatch, rows, slots, message):
    monkeypatch.setenv("PAGED_DEBUG", "1")
    rows, slots = (torch.tensor(numbers, device=DEVICE) for numbers in (rows, slots))
    values = penalties((1.0, 0.0, 0.0), (1.0, 0.0, 0.0))
    with pytest.raises(ValueError, match=message):
        apply_penalties(torch.randn(2, 5, device=DEVICE), rows, slots, *history(1, 5, 1.0), **values)
