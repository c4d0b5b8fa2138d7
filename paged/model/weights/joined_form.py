"""Rows of one weight in several forms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .forms import WeightForm


class JoinedForm(WeightForm):
    """A weight whose rows are stored in several forms. Their products are concatenated."""

    gated = False

    def __init__(self, forms: Sequence[tuple[WeightForm, int]]) -> None:
        self.forms = [form for form, _ in forms]
        self.num_rows = [num_rows for _, num_rows in forms]
        self._biases: list[Tensor | None] = [None] * len(forms)

    @property
    def is_recordable(self) -> bool:
        """Whether all of the forms are recordable."""
        return all(form.is_recordable for form in self.forms)

    def lay_out(self, bias: Tensor) -> None:
        """Divide the bias among the forms."""
        biases = torch.split(bias, self.num_rows)
        for form, own in zip(self.forms, biases, strict=True):
            form.lay_out(own)
        self._biases = list(biases)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None and self._biases[0] is None:
            self.lay_out(bias)
        if not self.is_recordable:
            return torch.cat(
                [form(x, own) for form, own in zip(self.forms, self._biases, strict=True)], dim=1
            )
        out = x.new_empty(len(x), sum(self.num_rows))
        parts = torch.split(out, self.num_rows, dim=1)
        for form, own, part in zip(self.forms, self._biases, parts, strict=True):
            form.store(x, own, part)
        return out
