"""Products of rows with the weights of their experts, each compared with float64 before it is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.cases import assert_close
from benchmarks.coded_cases import random_codes
from benchmarks.costs import linear_cost
from paged.kernels import reference
from paged.kernels.codes import PackedCodes, PackedExperts, grouped_coded_linear, pack_codes, stack_codes
from paged.kernels.operations import Kernels
from paged.kernels.routing import ExpertRows, RoutingOptions
from paged.model.weights.gpu_codes import quantized

WEIGHT_FORMS = ("floats", "int8", "int4", "MXFP4")
TINY_FORMS = ("floats", "MXFP4")
_CHECKED_ROWS = 32  # of an expert


class MixtureShape(NamedTuple):
    """The experts of a layer; by default those of Qwen3-30B-A3B."""

    num_experts: int = 128
    num_chosen: int = 8
    hidden_size: int = 2048
    size: int = 768

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """The outputs and inputs of an expert's products."""
        return {"gate and up": (2 * self.size, self.hidden_size), "down": (self.hidden_size, self.size)}


TINY_MIXTURE = MixtureShape(2, 1, 32, 32)


@dataclass(frozen=True)
class ExpertsCase:
    """One measurement: rows times the weights of their experts, and times the floats that these stand for."""

    name: str
    kernels: Kernels
    x: Tensor  # [num_tokens, num_inputs], or with a row for each token and expert, sorted by expert
    rows: ExpertRows
    weight: Tensor | PackedExperts
    floats: Tensor  # [num_experts, num_outputs, num_inputs], in the dtype of x
    cost: tuple[int, int]
    bounds: list[int]  # the offsets

    @property
    def sources(self) -> Tensor | None:
        """The row of x that each row is, where x has one for each token."""
        return None if len(self.x) == len(self.rows.sources) else self.rows.sources

    def product(self, x: Tensor, offsets: Tensor, sources: Tensor | None) -> Tensor:
        """Call the kernel once."""
        if isinstance(self.weight, PackedExperts):
            return grouped_coded_linear(x, self.weight, offsets, sources)
        return self.kernels.grouped_linear(x, self.weight, offsets, sources)

    def run(self) -> Tensor:
        """Call the kernel on all rows."""
        return self.product(self.x, self.rows.offsets, self.sources)

    def others(self) -> dict[str, Callable[[], Tensor]]:
        """Return what computes the same of the floats: torch's products one by one, and its grouped one.

        The first knows on the host how many rows each expert has.
        """
        used = [
            i for i, (start, end) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)) if end > start
        ]
        by_input = self.floats.transpose(1, 2)

        def rows() -> Tensor:
            return self.x if self.sources is None else self.x.index_select(0, self.sources)

        def loop() -> Tensor:
            x = rows()
            return torch.cat([x[self.bounds[i] : self.bounds[i + 1]] @ by_input[i] for i in used])

        def grouped() -> Tensor:
            return torch._grouped_mm(rows(), by_input, offs=self.rows.offsets[1:])

        return {"loop": loop, "grouped_mm": grouped}

    def check(self) -> float:
        """Compare some experts' last rows with float64, and a row's bits with those it has alone."""
        out = self.run()
        assert out.isfinite().all(), f"{self.name}: not all of the output is finite"
        x = self.x if self.sources is None else self.x[self.sources]
        errors = []
        for expert in sorted({0, len(self.floats) // 2, len(self.floats) - 1, self._last_used()}):
            start, end = self.bounds[expert : expert + 2]
            mine = slice(max(start, end - _CHECKED_ROWS), end)
            if start < end:
                want = x[mine].double() @ self.floats[expert].double().T
                errors.append(assert_close(out[mine], want))
        alone = torch.zeros_like(self.rows.offsets)
        alone[self._last_used() + 1 :] = 1
        found = self.product(x[-1:].contiguous(), alone, None)
        assert torch.equal(found, out[-1:]), f"{self.name}: other bits alone"
        return max(errors)

    def _last_used(self) -> int:
        """Return the last expert that has rows."""
        return max(i for i, start in enumerate(self.bounds[:-1]) if start < self.bounds[-1])


def expert_cases(
    shape: MixtureShape,
    form: str,
    token_counts: tuple[int, ...],
    kernels: Kernels,
    x_of: Callable[..., Tensor],
) -> Iterator[ExpertsCase]:
    """Make the cases of one form of weights, with each number of tokens.

    x_of: makes random numbers of a size, of the dtype and on the device that are measured.
    """
    for linear, (num_outputs, num_inputs) in shape.linears.items():
        weight, floats = _weights(form, shape.num_experts, x_of(0), (num_outputs, num_inputs))
        num_bytes = sum(
            t.nbytes
            for t in (weight.tensors if isinstance(weight, PackedExperts) else [weight])
            if t is not None
        )
        for num_tokens in token_counts:
            logits = x_of(num_tokens, shape.num_experts).float()
            chosen, _ = kernels.route(logits, RoutingOptions(num_chosen=shape.num_chosen))
            rows = kernels.sort_by_expert(chosen, shape.num_experts)
            bounds = rows.offsets.tolist()
            num_rows = bounds[-1]
            num_used = len(set(bounds)) - 1
            yield ExpertsCase(
                f"{form}, {linear}, {num_tokens} tokens",
                kernels,
                x_of(num_tokens if linear == "gate and up" else num_rows, num_inputs),
                rows,
                weight,
                floats,
                # Only experts that have rows are read.
                linear_cost(
                    num_rows,
                    num_outputs,
                    num_inputs,
                    num_bytes * num_used // shape.num_experts,
                    floats.itemsize,
                ),
                bounds,
            )


def _weights(
    form: str, num_experts: int, like: Tensor, size: tuple[int, int]
) -> tuple[Tensor | PackedExperts, Tensor]:
    """Return random weights of experts, and the floats that they stand for."""
    floats = like.new_empty(num_experts, *size)
    if form == "floats":
        for own in floats:
            own.copy_(torch.randn_like(own) * size[1] ** -0.5)
        return floats, floats

    def packed() -> Iterator[PackedCodes]:
        for own in floats:
            if form == "MXFP4":
                coded = random_codes(form, *size, like.device)
            else:
                coded = quantized(form, torch.randn_like(own) * size[1] ** -0.5)
            own.copy_(coded.floats())
            yield pack_codes(coded.codes, *coded.factors, table=coded.table)

    return stack_codes(packed(), num_experts), floats


@dataclass(frozen=True)
class RoutingCase:
    """One measurement: choosing experts by logits, and sorting tokens by them."""

    name: str
    kernels: Kernels
    logits: Tensor  # f32[num_tokens, num_experts]
    options: RoutingOptions

    @property
    def cost(self) -> tuple[int, int]:
        """The logits read, and for each chosen expert its weight, row and place written."""
        num_tokens, num_experts = self.logits.shape
        return 4 * num_tokens * num_experts + 24 * num_tokens * self.options.num_chosen, 0

    def run(self) -> tuple[Tensor, ExpertRows]:
        """Call both kernels once."""
        chosen, weights = self.kernels.route(self.logits, self.options)
        return weights, self.kernels.sort_by_expert(chosen, self.logits.shape[1])

    def check(self) -> float:
        """Compare the order of rows and the weights with the reference."""
        weights, rows = self.run()
        chosen, wanted = reference.route(self.logits, self.options)
        sorted_rows = reference.sort_by_expert(chosen, self.logits.shape[1])
        for found, expected in zip(rows, sorted_rows, strict=True):
            if found is None or expected is None:  # rows without adapters
                assert found is expected, self.name
            else:
                assert torch.equal(found, expected), self.name
        return assert_close(weights, wanted)


def routing_case(
    shape: MixtureShape, num_tokens: int, kernels: Kernels, x_of: Callable[..., Tensor]
) -> RoutingCase:
    """Make the case of so many tokens."""
    options = RoutingOptions(num_chosen=shape.num_chosen, renormalise=True)
    logits = x_of(num_tokens, shape.num_experts).float()
    return RoutingCase(f"routing, {num_tokens} tokens", kernels, logits, options)
