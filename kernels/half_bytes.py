"""HalfBytes: codes of 4 bits as files have them, two to a byte."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .checks import check_between, check_contiguous, check_multiple, check_shape

_ORDERS = ((0, 1), (32, 16), (256, 16), (256, 32))  # block_inputs and run


@dataclass(frozen=True, slots=True)
class HalfBytes:
    """4-bit codes [num_rows, num_inputs], not unpacked yet.

    A row consists of consecutive blocks. In every `run` bytes of codes, the low halves of all bytes come
    first and then the high halves. If `run` is 1, a byte holds two adjacent codes.
    """

    rows: Tensor  # u8[num_rows, bytes]
    num_inputs: int  # a last byte may have a half more
    block_inputs: int = 0  # 0: a row is one block
    block_bytes: int = 0
    start: int = 0  # bytes of a block in front of its codes
    run: int = 1

    @property
    def shape(self) -> torch.Size:
        """The shape [num_rows, num_inputs]."""
        return torch.Size((len(self.rows), self.num_inputs))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the unpacked codes."""
        return torch.uint8

    @property
    def device(self) -> torch.device:
        """The device of the bytes."""
        return self.rows.device

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows: Tensor | slice) -> HalfBytes:
        """Return these rows only."""
        return replace(self, rows=self.rows[rows])

    def unpacked(self) -> Tensor:
        """Return the codes, u8[num_rows, num_inputs]."""
        packed = self.rows
        if self.block_inputs:
            packed = packed.reshape(len(packed), -1, self.block_bytes)[..., self.start :]
            packed = packed[..., : self.block_inputs // 2].reshape(len(packed), -1, 1, self.run)
            return torch.cat([packed & 15, packed >> 4], dim=2).flatten(1)
        return torch.stack([packed & 15, packed >> 4], dim=2).flatten(1)[:, : self.num_inputs]

    def check(self) -> None:
        """Raise ValueError unless the bytes hold codes in an order that kernels support."""
        check_shape("codes.rows", self.rows, (None, None), torch.uint8)
        check_contiguous("codes.rows", self.rows)
        check_between("codes.num_inputs", self.num_inputs, 1, 2**31 - 1)
        row_bytes = -(-self.num_inputs // 2)
        if self.block_inputs:
            check_multiple("codes.num_inputs", self.num_inputs, "a block", self.block_inputs)
            check_between("codes.start", self.start, 0, self.block_bytes - self.block_inputs // 2)
            row_bytes = self.num_inputs // self.block_inputs * self.block_bytes
        check_between("bytes of a row", self.rows.shape[1], row_bytes, 2**31 - 1)
        if (self.block_inputs, self.run) not in _ORDERS:
            raise ValueError(
                f"codes must be in blocks and runs of {_ORDERS}, got {self.block_inputs, self.run}"
            )
