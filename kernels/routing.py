"""How tokens choose experts: the options of `route`, and the order of rows that `grouped_linear` takes.

Without torch, as a config is read and a fleet is simulated without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    from torch import Tensor

Score = Literal["softmax", "sigmoid", "softmax_of_chosen"]
GroupScore = Literal["best", "best_two"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingOptions:
    """How `route` turns logits into experts and weights. Each model family declares its options.

    score: softmax over all experts, sigmoid of each logit, or softmax over the logits of the chosen experts.
    num_groups: experts are divided into this many consecutive groups. Only experts of the num_kept_groups
        groups with the highest scores can be chosen.
    group_score: the score of a group: the score of its best expert, or the sum of its best two.
    renormalise: whether to divide the weights of a token by their sum plus `epsilon`.
    scale: a factor for all weights, applied last.
    """

    num_chosen: int
    score: Score = "softmax"
    num_groups: int = 1
    num_kept_groups: int = 1
    group_score: GroupScore = "best"
    renormalise: bool = False
    epsilon: float = 0.0
    scale: float = 1.0

    @property
    def orders_by_logits(self) -> bool:
        """Whether experts are chosen by logits instead of scores if no bias is added, since softmax keeps the
        order.

        Logits may differ where scores are equal after rounding.
        """
        return self.score != "sigmoid" and (self.num_groups == 1 or self.group_score == "best")

    def check(self, num_experts: int) -> None:
        """Raise ValueError unless these options can choose among num_experts experts."""
        if self.score not in get_args(Score):
            raise ValueError(f"score must be one of {', '.join(get_args(Score))}, got {self.score!r}")
        if self.group_score not in get_args(GroupScore):
            names = ", ".join(get_args(GroupScore))
            raise ValueError(f"group_score must be one of {names}, got {self.group_score!r}")
        _check_between("num_groups", self.num_groups, 1, num_experts)
        if num_experts % self.num_groups:
            raise ValueError(
                f"the number of experts must be a multiple of num_groups, got {num_experts} and "
                f"{self.num_groups}"
            )
        _check_between("num_kept_groups", self.num_kept_groups, 1, self.num_groups)
        size = num_experts // self.num_groups
        if self.num_groups > 1 and self.group_score == "best_two" and size < 2:
            raise ValueError(f"a group must have two experts for group_score 'best_two', got {size}")
        _check_between("num_chosen", self.num_chosen, 1, self.num_kept_groups * size)
        if type(self.renormalise) is not bool:
            raise ValueError(f"renormalise must be True or False, got {self.renormalise!r}")
        _check_number("epsilon", self.epsilon, 0, 1)
        _check_number("scale", self.scale, 2.0**-126, 2.0**126)


def _check_between(name: str, value: int, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} must be between {low} and {high}, got {value}")


def _check_number(name: str, value: float, low: float, high: float) -> None:
    most = 2**63 - 1 if isinstance(value, int) else high  # torch has no larger ints
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= min(high, most):
        raise ValueError(f"{name} must be a number between {low} and {high}, got {value!r}")


class ExpertRows(NamedTuple):
    """The rows of a grouped product: one for each token and its expert, sorted by expert, then by token."""

    sources: Tensor  # i64[num_tokens * num_chosen]: the token of each row
    places: Tensor  # i64[num_tokens, num_chosen]: the row of each token and chosen expert
    offsets: Tensor  # i32[num_experts + 1]: the rows of expert e are offsets[e] to offsets[e + 1]
    adapters: Tensor | None = None  # i32[num_rows]: slot * num_experts + expert, or -1 without an adapter
