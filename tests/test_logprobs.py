"""Log-probabilities of tokens, generated or in the prompt, against transformers and by hand."""

from __future__ import annotations

import pytest
import torch

from paged.logprobs import token_logprobs


def test_report_by_hand():
    # Probabilities 0.1, 0.2, 0.3, 0.4: the logits may be shifted by anything.
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log().repeat(3, 1) + torch.tensor([[0.0], [5.0], [-7.0]])
    one, two, every = token_logprobs(logits, [1, 3, 0], [0, 1, -1])
    assert (one.token_ids, one.rank) == ([1], 3)
    assert (two.token_ids, two.rank) == ([3, 3], 1)
    assert (every.token_ids, every.rank) == ([0, 3, 2, 1, 0], 4)
    assert [torch.tensor(x).exp().item() for x in every.logprobs] == pytest.approx([0.1, 0.4, 0.3, 0.2, 0.1])
    assert one.logprobs == pytest.approx([every.logprobs[3]], abs=1e-6)


def test_report_of_a_row_does_not_depend_on_the_rows_beside_it():
    logits = torch.randn(7, 1009)
    logits[:, ::3] = 0.5  # ties
    together = token_logprobs(logits, [5] * 7, [3, 3, 0, -1, 3, 2000, 7])
    for row, num_top in enumerate([3, 3, 0, -1, 3, 2000, 7]):
        assert token_logprobs(logits[row : row + 1], [5], [num_top]) == [together[row]]


def test_report_of_a_row_that_is_not_finite_is_not_a_number():
    logits = torch.zeros(2, 5)
    logits[0, 1], logits[1, 1] = torch.nan, torch.inf
    for report in token_logprobs(logits, [0, 1], [1, 1]):
        assert not torch.tensor(report.logprobs[0]).isfinite()
