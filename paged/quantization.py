"""Weights in int8 and int4, made of plain ones while a model loads. They multiply on a CPU only.

Weights alone are quantised: activations, KV and sums stay in the dtype of the model. Few rows of bfloat16 go
through torch's kernels for packed integers, which read the weight once and are bound by that. For float32
those are scalar loops, and for many rows they are slower than a float product. There a tile of the weight
at a time is made floating point again, in memory that the caches hold, and multiplied.

Torch's kernels compute a row the same way in any company. Which of the two ways a row goes depends on how
many rows there are, and so do the last bits of a result, as they do in a plain linear.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import ConfigError

# A tile is large beside the 10 µs that Python takes for it, and small beside the caches. Found, as the
# KERNEL_ROWS below, by `python -m benchmarks.linear`.
TILE_ELEMENTS = 2**19
TINY = torch.finfo(torch.float32).tiny


class Int8Weight:
    """Symmetric, one scale for an output: weight[n, k] ≈ scale[n] * codes[n, k]."""

    MAX_CODE = 127
    KERNEL_ROWS = 16  # most rows of bfloat16 that torch's kernel takes
    KERNEL_STEP = 16  # elements of a row that it reads at a time, whether they are there or not

    def __init__(self, weight: Tensor) -> None:
        self.codes = torch.empty(weight.shape, dtype=torch.int8)  # [out_features, in_features]
        self.scale = weight.new_empty(len(weight))
        for rows in _tiles(*weight.shape):
            part = weight[rows].float()
            # Rounded to the dtype that it multiplies in, before codes go by it.
            self.scale[rows] = (part.abs().amax(1) / self.MAX_CODE).clamp_(min=TINY)
            codes = (part / self.scale[rows, None]).round_()
            self.codes[rows] = codes.clamp_(-self.MAX_CODE, self.MAX_CODE)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See WeightForm."""
        out = self.by_kernel(x) if self._kernel_takes(x) else self.by_tiles(x)
        return out if bias is None else out.add_(bias)

    def rows(self, indices: Tensor) -> Tensor:
        """See TableForm."""
        return F.embedding(indices, self.codes) * self.scale[indices, None]

    def dequantized(self) -> Tensor:  # [out_features, in_features]
        """The weight that this stands for."""
        return self.codes * self.scale[:, None]

    def _kernel_takes(self, x: Tensor) -> bool:
        return (
            x.dtype == torch.bfloat16
            and len(x) <= self.KERNEL_ROWS
            and self.codes.shape[1] % self.KERNEL_STEP == 0
        )

    def by_kernel(self, x: Tensor) -> Tensor:
        """x Wᵀ by torch's kernel."""
        return torch._weight_int8pack_mm(x, self.codes, self.scale)

    def by_tiles(self, x: Tensor) -> Tensor:
        """x Wᵀ by float products."""
        num_outputs, num_inputs = self.codes.shape
        out = x.new_empty(len(x), num_outputs)
        scratch = x.new_empty(_tile_rows(num_inputs), num_inputs)
        for rows in _tiles(num_outputs, num_inputs):
            codes = self.codes[rows]
            # Codes are exact in any dtype; the scale of an output can wait for the sum.
            torch.mm(x, scratch[: len(codes)].copy_(codes).T, out=out[:, rows])
        return out.mul_(self.scale)


class Int4Weight:
    """A scale and a zero for each GROUP of inputs of an output, as torch's kernel has them.

    weight[n, k] ≈ scale[g, n] * (codes[n, k] - 8) + zero[g, n], with codes from 0 to 15 and g = k // GROUP.
    """

    # By `python -m benchmarks.perplexity`: 64 and 128 cost the demo model 1.4 and 1.8 times as much.
    GROUP = 32
    MIDDLE, MAX_CODE = 8, 15
    KERNEL_ROWS = 32  # most rows of bfloat16 that torch's kernel takes
    ALIGNMENT = 64  # outputs are padded to it, for a layout of whole panels

    def __init__(self, weight: Tensor) -> None:
        self.num_outputs, num_inputs = weight.shape
        weight = F.pad(weight, (0, 0, 0, -self.num_outputs % self.ALIGNMENT))
        padded = len(weight)
        self.packed = torch.empty(padded, num_inputs // 2, dtype=torch.uint8)
        self.scale_zero = weight.new_empty(num_inputs // self.GROUP, padded, 2)
        for rows in _tiles(padded, num_inputs, self.ALIGNMENT):
            groups = weight[rows].float().view(-1, num_inputs // self.GROUP, self.GROUP)
            low, high = groups.aminmax(dim=-1)
            scale = ((high - low) / self.MAX_CODE).clamp_(min=TINY).to(weight.dtype)
            zero = (low + self.MIDDLE * scale.float()).to(weight.dtype)
            self.scale_zero[:, rows] = torch.stack([scale, zero], dim=-1).transpose(0, 1)
            codes = ((groups - zero[..., None]) / scale[..., None]).round_().add_(self.MIDDLE)
            codes = codes.clamp_(0, self.MAX_CODE).flatten(1).int()
            self.packed[rows] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See WeightForm."""
        takes = x.dtype == torch.bfloat16 and len(x) <= self.KERNEL_ROWS
        out = self.by_kernel(x) if takes else self.by_tiles(x)
        return out if bias is None else out.add_(bias)

    def dequantized(self) -> Tensor:  # [out_features, in_features]
        """The weight that this stands for."""
        tiles = [self._tile(rows) for rows in self._tiles()]
        return torch.cat(tiles, dim=1).T[: self.num_outputs]

    def by_kernel(self, x: Tensor) -> Tensor:
        """x Wᵀ by torch's kernel."""
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        return self._without_padding(multiply(x, self.packed, self.GROUP, self.scale_zero))

    def by_tiles(self, x: Tensor) -> Tensor:
        """x Wᵀ by float products."""
        out = x.new_empty(len(x), len(self.packed))
        for rows in self._tiles():
            torch.mm(x, self._tile(rows), out=out[:, rows])
        return self._without_padding(out)

    def _tiles(self) -> Iterator[slice]:
        return _tiles(len(self.packed), 2 * self.packed.shape[1], self.ALIGNMENT)

    def _tile(self, rows: slice) -> Tensor:  # [in_features, rows]
        """Rows of the weight, transposed.

        The kernel's layout is [panels of 32 or 64 outputs, in_features, panel / 2], where a byte holds a code
        of the first half of its panel and, in the upper bits, one of the second half.
        """
        num_inputs = 2 * self.packed.shape[1]
        half = _panel_size() // 2
        panels = self.packed[rows].view(-1, num_inputs, half).transpose(0, 1)
        tile = self.scale_zero.new_empty(num_inputs, panels.shape[1], 2, half)
        tile[:, :, 0] = panels & 15
        tile[:, :, 1] = panels >> 4
        scale, zero = self.scale_zero[:, rows].permute(2, 0, 1).contiguous()[:, :, None]
        groups = tile.view(len(self.scale_zero), self.GROUP, -1)
        return torch.addcmul(zero - self.MIDDLE * scale, groups, scale, out=groups).view(num_inputs, -1)

    def _without_padding(self, out: Tensor) -> Tensor:
        return out[:, : self.num_outputs].contiguous()


def require_quantization(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError unless weights can be quantised here: torch's private kernels are tried."""
    if device.type != "cpu":
        raise ConfigError(
            f"quantization {name!r} is CPU only so far; got device {device}: leave one of them out"
        )
    if dtype == torch.float16:
        raise ConfigError(f"quantization {name!r} goes with dtype float32 or bfloat16; got float16")
    for form in (Int8Weight, Int4Weight) if name == "int4" else (Int8Weight,):
        try:
            works = _agrees_with_itself(form, dtype)
        except (AttributeError, RuntimeError, TypeError):
            works = False
        if not works:
            raise ConfigError(
                f"quantization {name!r} goes by kernels that torch {torch.__version__} lacks or does another "
                f"way ({form.__name__}); leave it out, or install a version that constraints.txt names"
            )


def _agrees_with_itself(form: type[Int8Weight | Int4Weight], dtype: torch.dtype) -> bool:
    """Whether a weight is the same by kernel, by tiles, and of the values that it was made of."""
    values = torch.arange(64.0).view(1, 64).add(torch.arange(128.0)[:, None]).remainder(16).to(dtype)
    weight, x = form(values), torch.eye(64, dtype=dtype)
    close = [torch.allclose(way(x).T, values, atol=0.1) for way in (weight.by_kernel, weight.by_tiles)]
    return all(close)


def _panel_size() -> int:
    """Outputs in a panel of torch's int4 layout: four vectors of float32."""
    return 64 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 32


def _tile_rows(num_inputs: int, multiple: int = 16) -> int:
    return max(1, TILE_ELEMENTS // num_inputs // multiple) * multiple


def _tiles(num_outputs: int, num_inputs: int, multiple: int = 16) -> Iterator[slice]:
    """The rows of a weight, so many at a time."""
    step = _tile_rows(num_inputs, multiple)
    return (slice(start, min(start + step, num_outputs)) for start in range(0, num_outputs, step))
