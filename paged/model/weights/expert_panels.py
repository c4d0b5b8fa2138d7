"""The weights of experts in panels, multiplied by one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ...kernels.checks import TrustedContents
from ...kernels.expert_panels import ExpertPanels, expert_memory, grouped_panel_linear
from ...kernels.panels import Panels
from .forms import ExpertsForm


class InPanels(Protocol):
    """The interface of one expert's weight in panels, such as `panels.PanelWeight`."""

    panels: Panels
    padded_bias: Tensor | None
    gated: bool
    stays: bool

    @property
    def is_recordable(self) -> bool: ...


class PanelExperts(ExpertsForm):
    """The weights of all experts in panels. One launch computes their products."""

    def __init__(self, forms: Sequence[InPanels], *, with_bias: bool) -> None:
        first = forms[0]
        self.gated = first.gated
        self.is_recordable = first.is_recordable
        if not all(form.stays for form in forms):
            _move_together(forms)
        biases = [form.padded_bias for form in forms if form.padded_bias is not None]
        with TrustedContents():  # they were checked when they were packed
            self.weights = ExpertPanels([form.panels for form in forms], biases if with_bias else None)

    def __call__(self, x: Tensor, offsets: Tensor, sources: Tensor | None) -> Tensor:
        return grouped_panel_linear(x, self.weights, offsets, sources)


def _move_together(forms: Sequence[InPanels]) -> None:
    """Move the panels of experts that are packed as the first one into one piece of memory."""
    memory = expert_memory(forms[0].panels, len(forms))
    for own, form in zip(memory, forms, strict=True):
        if form.panels.weight.shape == own.shape and form.panels.weight.dtype == own.dtype:
            own.copy_(form.panels.weight)
            form.panels = form.panels._replace(weight=own)  # so that one matrix is in memory twice
