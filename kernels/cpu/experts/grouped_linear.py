"""Products of rows by the weights of their experts: `linear` for several weights in one launch."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ...checks import check_contiguous, check_device, check_shape, check_tensor, is_trusted
from ..launch.huge_pages import in_huge_pages
from ..linear.linear import WeightsOfRows, multiply
from ..linear.panel_checks import check_bias, check_panels
from ..linear.panels import Panels, check_result_dtype
from ..rows.take_rows import take_rows

_CPU = torch.device("cpu")


class ExpertPanels:
    """The packed weights of all experts, with their biases, for `grouped_panel_linear`.

    Raises ValueError if the weights differ in shape, or in whether they are gated or in pairs.
    """

    def __init__(self, weights: Iterable[Panels], biases: Iterable[Tensor] | None = None) -> None:
        self.weights = [*weights]
        self.biases = None if biases is None else [*biases]
        if not self.weights:
            raise ValueError("there must be at least one expert, got none")
        first = self.weights[0]
        for index, own in enumerate(self.weights):
            if not is_trusted():
                check_panels(own)
            if _shape_of(own) != _shape_of(first):
                raise ValueError(
                    f"experts must be packed alike, got {_shape_of(own)} for expert {index} and "
                    f"{_shape_of(first)} for expert 0"
                )
        if self.biases is not None:
            if len(self.biases) != len(self.weights):
                raise ValueError(
                    f"biases must be as many as experts, got {len(self.biases)} of {len(self.weights)}"
                )
            for own, bias in zip(self.weights, self.biases, strict=True):
                check_bias(own, bias)
        addresses = [0] * len(self.weights)
        if self.biases is not None:
            addresses = [bias.data_ptr() for bias in self.biases]
        rows = [
            [own.weight.data_ptr(), own.scales.data_ptr(), bias, own.kind]
            for own, bias in zip(self.weights, addresses, strict=True)
        ]
        self._table = torch.tensor(rows, dtype=torch.int64, device=_CPU)
        # One in floats may come before others in codes, whose factors need memory.
        self._has_groups = any(own.has_groups for own in self.weights)
        self._kinds = frozenset(own.kind for own in self.weights)

    @property
    def first(self) -> Panels:
        """The weight of the first expert. All others are packed in the same way."""
        return self.weights[0]

    def __len__(self) -> int:
        return len(self.weights)

    def of_rows(self, offsets: Tensor) -> WeightsOfRows:
        """Return the weights together with the range of rows of each expert."""
        return WeightsOfRows(self._table, offsets, self._has_groups, self._kinds)


def _shape_of(own: Panels) -> tuple[int, int, bool, bool]:
    return own.out_features, own.in_features, own.gated, own.in_pairs


def expert_memory(first: Panels, num_experts: int) -> Tensor:
    """Allocate memory for the panels of all experts, each packed like the first one: [num_experts, ...].

    One array fills huge pages. Of separate arrays, parts would lie in small pages.
    """
    return in_huge_pages(first.weight.new_empty(num_experts, *first.weight.shape))


def grouped_panel_linear(
    x: Tensor,  # [num_rows, in_features], sorted by expert; with sources [num_tokens, in_features]
    weight: ExpertPanels,
    offsets: Tensor,  # i32[num_experts + 1], see ExpertRows
    sources: Tensor | None = None,  # i64[num_rows]: the row of x that each row is
    dtype: torch.dtype | None = None,
) -> Tensor:  # [num_rows, out_features], gated half as wide
    """Multiply the rows of each expert by its weight, in one launch; see `reference.grouped_linear`.

    The launch is the same for all offsets, since threads find their units of work from the offsets.

    dtype: the dtype of the result, by default the dtype of x.
    """
    if not is_trusted():
        check_result_dtype(torch.float32 if dtype is None else dtype)
        _check_rows(x, offsets, sources, len(weight))
    if sources is not None:
        x = take_rows(x, sources)
    return multiply(x, weight.first, None, dtype, experts=weight.of_rows(offsets))


def _check_rows(x: Tensor, offsets: Tensor, sources: Tensor | None, num_experts: int) -> None:
    """Raise ValueError unless each row has one expert, and a row of x."""
    check_tensor("x", x)
    check_shape("offsets", offsets, (num_experts + 1,), torch.int32)
    check_contiguous("offsets", offsets)
    check_device("offsets", offsets, _CPU)
    num_rows = len(x)
    if sources is not None:
        check_shape("sources", sources, (None,), torch.int64)
        num_rows = len(sources)
    bounds = offsets.tolist()
    if bounds[0] != 0 or bounds[-1] != num_rows or bounds != sorted(bounds):
        raise ValueError(f"offsets must ascend from 0 to the {num_rows} rows, got {bounds[:64]}")
