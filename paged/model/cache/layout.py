"""CacheLayout: where the K and V of each layer lie in a block, in numbers; `KVCache` allocates by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ...architectures.config import LayerGroup, ModelConfig
from ...architectures.spec import KVShape
from ..part import ModelPart


class Place(NamedTuple):
    """The position of a layer's K or V in a block."""

    plane: int
    offset: int  # in a block of that plane, in numbers


@dataclass(frozen=True)
class CacheLayout:
    """How blocks are laid out in memory, in one or more planes. Every block has a piece of each plane.

    A part of a block is the K or the V of one layer for all tokens of the block. If all parts have the same
    size, each has its own plane: [num_parts, num_blocks, part]. Otherwise there is one plane, in which a
    block's parts follow each other: [1, num_blocks, parts of the largest group]. A block takes the same
    number of bytes in every group.
    """

    groups: tuple[LayerGroup, ...]  # by block table, of the whole model
    shapes: Mapping[int, KVShape]  # by layer, of those that have K and V
    block_size: int
    part: ModelPart | None = None  # whose layers have places; None: all

    @classmethod
    def of(cls, config: ModelConfig, block_size: int, part: ModelPart | None = None) -> CacheLayout:
        """Lay out the cache of a model, or of a part of it. Blocks are numbered as in the whole model.

        A shard stores only its own heads. Its blocks hold as many tokens as the blocks of an undivided model.
        """
        shapes = config.kv_shapes
        if part is not None:
            shapes = {layer: part.shard.kv_shape(shape) for layer, shape in shapes.items()}
        return cls(config.layer_groups, shapes, block_size, part)

    @classmethod
    def of_draft(cls, config: ModelConfig, block_size: int) -> CacheLayout:
        """Lay out the cache of a draft model.

        All layers of the draft model use one block table of the target model's sequences. Each layer reads
        only the tokens in its window.
        """
        layers = tuple(i for i, attention in config.attentions.items() if attention.has_kv)
        return cls((LayerGroup(None, layers),), config.kv_shapes, block_size)

    @cached_property
    def layers(self) -> list[list[int]]:
        """The layers in this cache, by group. A part of a model may have no layers of some groups."""
        part = self.part
        return [[i for i in group.layers if part is None or i in part.layers] for group in self.groups]

    @cached_property
    def _parts(self) -> list[list[int]]:
        """The numbers of each part, by group."""
        return [
            [self.block_size * n for layer in layers for n in self.shapes[layer].part_sizes]
            for layers in self.layers
        ]

    @property
    def is_in_planes(self) -> bool:
        """Whether each part has a plane of its own."""
        return len({size for parts in self._parts for size in parts}) == 1

    @property
    def planes(self) -> tuple[int, int]:
        """The number of planes, and how many numbers of a block are in each plane."""
        if self.is_in_planes:
            return max(map(len, self._parts)), max(self._parts)[0]
        return 1, max(map(sum, self._parts))

    @property
    def scale_planes(self) -> dict[int, int]:
        """The number of planes of scales, by their number of KV heads, if the cache is quantised.

        A plane has block_size scales for each head. Kernels require scales without gaps, so layers with
        different numbers of heads use different planes.
        """
        planes: dict[int, int] = {}
        for layers in self.layers:
            for heads in {self.shapes[layer].num_kv_heads for layer in layers}:
                planes[heads] = max(planes.get(heads, 0), len(layers) * 2)
        return planes

    @cached_property
    def places(self) -> dict[int, list[Place]]:
        """The place of K, and of V unless V lies within K, for each layer with K and V of its own."""
        places: dict[int, list[Place]] = {}
        for layers, sizes in zip(self.layers, self._parts, strict=True):
            number = offset = 0
            for layer in layers:
                places[layer] = []
                for _ in self.shapes[layer].part_sizes:
                    places[layer].append(Place(number, 0) if self.is_in_planes else Place(0, offset))
                    offset = offset + sizes[number]
                    number = number + 1
        return places

    def block_bytes(self, element_bytes: int, scale_bytes: int) -> int:
        """Return the size of a block in bytes.

        scale_bytes: the bytes of one scale; 0 if the cache is not quantised.
        """
        num_planes, size = self.planes
        scales = sum(heads * self.block_size * n for heads, n in self.scale_planes.items())
        return num_planes * size * element_bytes + scales * scale_bytes
