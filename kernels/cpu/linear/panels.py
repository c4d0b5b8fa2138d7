"""Weights packed for `linear.linear`, and what they and what they are made of must be."""

from typing import NamedTuple

import torch
from torch import Tensor

from ...checks import (
    check_device,
    check_dtype,
    check_flag,
    check_multiple,
    check_positive,
    check_shape,
    check_tensor,
)
from ..formats import (
    BF12,
    BF12_PAIRS,
    BFLOAT16,
    BFLOAT16_PAIRS,
    CODES4,
    CODES4_PAIRS,
    CODES8,
    CODES8_PAIRS,
    E4M3,
    E4M3_PAIRS,
    FLOAT16,
    FLOAT32,
    INT8,
    INT8_ORDER,
    INT8_PAIRS,
    PANEL,
    PART_STEPS,
)
from ..target import HAS_DOT, LANES

OUT_KINDS = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
_KINDS = {**OUT_KINDS, torch.int8: INT8, torch.int16: BF12}
_PAIR_KINDS = {torch.bfloat16: BFLOAT16_PAIRS, torch.int8: INT8_PAIRS, torch.int16: BF12_PAIRS}
# Of codes, which have factors for groups of inputs.
CODE_KINDS = {torch.uint8: CODES4, torch.int8: CODES8, torch.float8_e4m3fn: E4M3}
CODE_PAIR_KINDS = {torch.uint8: CODES4_PAIRS, torch.int8: CODES8_PAIRS, torch.float8_e4m3fn: E4M3_PAIRS}
_CPU = torch.device("cpu")


class Panels(NamedTuple):
    """A weight [out_features, in_features] packed for `linear`, with its scales.

    In pairs, inputs 2 i and 2 i + 1 are adjacent; pairs are for x in bfloat16 or, with AMX, in float32. A
    step is one input, or one pair.
    """

    # [num_panels, in_features, PANEL], in pairs [num_panels, in_features // 2, PANEL, 2]. Codes of 4 bits:
    # uint8 with LANES instead of PANEL, in pairs in the order of Codes4Pairs. bfloat16 not in pairs: outputs
    # i and i + LANES alternate. int8 in pairs: as `to_parts` stores them. bf12: i16[num_panels, num_groups,
    # BF12_GROUP_BYTES / 2], in pairs with a last dimension of 1.
    weight: Tensor
    # f32[num_panels * PANEL]. Codes: u8[n], see `products.factors`. bf12: the exceptions, i32[n].
    scales: Tensor
    out_features: int
    gated: bool = False  # the product is silu(first half of the outputs) * second half

    @property
    def in_features(self) -> int:
        """The width of x."""
        return self.depth * (1 + self.in_pairs)

    @property
    def depth(self) -> int:
        """The number of steps: inputs, or pairs of inputs."""
        return self.weight.shape[1] * (PART_STEPS[self.kind] if self.weight.dtype == torch.int16 else 1)

    @property
    def in_pairs(self) -> bool:
        """Whether a step is a pair of inputs."""
        return self.weight.dim() == 4

    @property
    def has_groups(self) -> bool:
        """Whether the weight consists of codes with factors per group of inputs."""
        return self.scales.dtype == torch.uint8

    @property
    def kind(self) -> int:
        """The format: a key of FORMATS in `formats`."""
        return kinds_of(self.weight, self.scales)[self.weight.dtype]


def kinds_of(weight: Tensor, scales: Tensor) -> dict[torch.dtype, int]:
    """Return the formats by the dtype of the panels."""
    if scales.dtype == torch.uint8:
        return CODE_PAIR_KINDS if weight.dim() == 4 else CODE_KINDS
    return _PAIR_KINDS if weight.dim() == 4 else _KINDS


def to_parts(steps: Tensor) -> Tensor:
    """Convert int8 [..., PANEL, 2] to the order of `reader.Int8Pairs`, as signs and magnitudes."""
    magnitudes = steps.abs() | (steps & -128)
    return magnitudes.reshape(-1, *INT8_ORDER).transpose(1, 2).reshape(steps.shape)


def from_parts(steps: Tensor) -> Tensor:
    """Undo `to_parts`."""
    vectors, parts, numbers = INT8_ORDER
    magnitudes = steps.reshape(-1, parts, vectors, numbers).transpose(1, 2).reshape(steps.shape)
    return torch.where(magnitudes < 0, -(magnitudes & 127), magnitudes)


def num_panels_of(out_features: int, gated: bool) -> int:
    """Return the number of panels for out_features outputs."""
    return -(-out_features // 2 // LANES) if gated else -(-out_features // PANEL)


def check_outputs(name: str, tensor: Tensor, *, gated: bool) -> None:
    """Raise ValueError unless `tensor` has one entry per output; if gated, the number must be even."""
    check_tensor(name, tensor)
    check_device(name, tensor, _CPU)
    check_flag("gated", gated)
    if tensor.dim() == 0:
        raise ValueError(f"{name} must have an entry for each output, got a tensor without dimensions")
    check_positive("out_features", len(tensor))
    check_multiple("out_features", len(tensor), "the two halves", 2 if gated else 1)


def check_weight(weight: Tensor, scales: Tensor | None, *, pairs: bool, gated: bool) -> None:
    """Raise ValueError unless `linear.pack` can pack this weight."""
    check_pairs(pairs)
    check_shape("weight", weight, (None, None))
    check_outputs("weight", weight, gated=gated)
    check_dtype("weight", weight, tuple(_PAIR_KINDS)[:2] if pairs else tuple(_KINDS)[:4])
    check_positive("in_features", weight.shape[1])
    check_multiple("in_features", weight.shape[1], "a pair", 1 + pairs)
    if (scales is not None) != (weight.dtype == torch.int8):
        given = "none" if scales is None else "some"
        raise ValueError(
            f"scales go with a weight in int8 and with no other, got {given} with {weight.dtype}"
        )
    if pairs and weight.dtype == torch.int8 and bool((weight == -128).any()):
        raise ValueError("int8 in pairs goes from -127 to 127, got -128; leave out pairs=True")
    if scales is not None:
        check_shape("scales", scales, (len(weight),))
        check_dtype("scales", scales)
        check_device("scales", scales, _CPU)


def check_pairs(pairs: bool) -> None:
    """Raise ValueError unless `pairs` is a flag, and this CPU has the instructions if it is True."""
    check_flag("pairs", pairs)
    if pairs and not HAS_DOT:
        raise ValueError("pairs=True takes a CPU with AVX512-BF16 and VBMI; leave it out, as `can_pair` says")


def check_result_dtype(dtype: torch.dtype) -> None:
    """Raise ValueError unless products and rows can have this dtype."""
    if dtype not in tuple(OUT_KINDS):
        raise ValueError(f"dtype must be one of {', '.join(map(str, OUT_KINDS))}, got {dtype!r}")
