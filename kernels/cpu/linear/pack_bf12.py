"""Encode bfloat16 weights as bf12: with few rows, a product takes as long as reading its weight.

`products.bf12` describes the format. In the weights of a model one in some hundred thousands is an exception.
"""

import torch
from torch import Tensor

from ...checks import is_trusted
from ..formats import (
    BF12,
    BF12_GROUP,
    BF12_GROUP_BYTES,
    BF12_PAIRS,
    BFLOAT16,
    BFLOAT16_PAIRS,
    FORMATS,
    HEAD_BYTES,
    TABLE_BYTES,
)
from ..launch.huge_pages import in_huge_pages
from ..launch.tasks import Task
from .panels import Panels

VALUES = 256  # of a byte
_HEAD_END = TABLE_BYTES + 16  # bytes of a head that are in use; the rest is 0
_MOST_EXCEPTIONS = 1 / 64  # of all weights: at 4 bytes each, half a bit per weight
_GROUPS_AT_A_TIME = 4096  # in the search for exceptions, to limit its memory
# 1 MiB with the last panel's padding: smaller weights stay in the caches between two steps.
_LEAST_WEIGHTS = 2**19

_ENCODED = {BFLOAT16: BF12, BFLOAT16_PAIRS: BF12_PAIRS}
PACK_BF12 = Task("linear.pack_bf12.pack_bf12", ("panels", "encoded"), ("num_groups",))


def pack_bf12(panels: Panels, num_shards: int = 1) -> Panels:
    """Encode bfloat16 panels in 12.25 bits per weight (12.5 with AVX2) plus 32 bits per exception.

    num_shards: the number of shards of the whole weight, whose size decides.

    Products keep the same bits. The panels are returned unchanged if they are not bfloat16, if the CPU has no
    byte lookups, if the inputs do not fill groups, if the weight fits into the caches, or if there would be
    so many exceptions that little is saved.
    """
    if not is_trusted():
        from .panel_checks import check_panels

        check_panels(panels)
    num_panels = len(panels.weight)
    num_weights = panels.weight.numel()
    encoded = FORMATS.get(_ENCODED.get(panels.kind, -1))
    is_large = num_weights * num_shards >= _LEAST_WEIGHTS and panels.weight.is_cpu
    if encoded is None or not encoded.is_supported or not is_large or panels.depth % encoded.part_steps:
        return panels
    num_groups = panels.depth // encoded.part_steps
    shape = num_panels, num_groups, BF12_GROUP_BYTES
    groups = in_huge_pages(panels.weight.new_empty(shape, dtype=torch.uint8))
    PACK_BF12.run(
        num_panels,
        panels=panels.weight,
        encoded=groups,
        num_groups=num_groups,
        scratch_size=(4 + 1 + 1) * VALUES,
    )
    flat = groups.flatten(0, 1)
    numbers = flat[:, TABLE_BYTES:_HEAD_END].contiguous().view(torch.int64)
    count = numbers[:, 1]
    if count.sum() > _MOST_EXCEPTIONS * num_weights:
        return panels
    numbers[:, 0] = count.cumsum(0) - count
    flat[:, TABLE_BYTES:_HEAD_END] = numbers.view(torch.uint8)
    flat[:, _HEAD_END:HEAD_BYTES] = 0
    upper = panels.weight.view(torch.uint8).view(-1, BF12_GROUP, 2)[..., 1]
    with_some = count.nonzero().squeeze(1).split(_GROUPS_AT_A_TIME)
    exceptions = [_exceptions(upper[own], flat[own, :TABLE_BYTES]) for own in with_some]
    weight = groups.view(torch.int16)
    weight = weight.unsqueeze(3) if panels.in_pairs else weight
    return Panels(weight, torch.cat(exceptions), panels.out_features, panels.gated)


def _exceptions(upper: Tensor, tables: Tensor) -> Tensor:
    """Return upper bytes [groups, BF12_GROUP] that tables [groups, TABLE_BYTES] lack, with offsets."""
    is_known = torch.zeros(len(upper), VALUES, dtype=torch.bool, device="cpu")
    is_known.scatter_(1, tables.long(), True)
    group, place = is_known.gather(1, upper.long()).logical_not_().nonzero(as_tuple=True)
    return ((2 * place + 1) << 8 | upper[group, place]).int()
