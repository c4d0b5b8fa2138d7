"""Int8 and int4 weights for torch's CPU kernels, quantised while a model loads.

Only weights are quantised: activations, KV and sums keep the dtype of the model. A few rows of bfloat16 go
through torch's kernels for packed integers, which read the weight once and are bound by that. In float32
these kernels are scalar loops, and for many rows they are slower than a float product. There, one tile of the
weight after another is dequantised into memory that stays in cache, and multiplied.

Torch's kernels are batch-invariant. But the number of rows decides which of the two ways is taken, so the
last bits of a result depend on it, as they do in a plain linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ...base.errors import ConfigError, ResourceError
from ...kernels.int4_search import LEVELS, best_fit
from .forms import TableForm, WeightForm

# Large enough that Python's 10 µs per tile do not matter, small enough for the caches.
TILE_ELEMENTS = 2**19
# The most rows of bfloat16 to give to torch's kernels. By `python -m benchmarks.linear --dtype bfloat16` with
# AVX2, tiles are as fast from about 50 rows in int8 and 64 in int4; earlier where bfloat16 is not emulated.
INT8_KERNEL_ROWS = 16
INT4_KERNEL_ROWS = 32
TINY = torch.finfo(torch.float32).tiny
# Of the search for int4's scales, at once, to limit its memory.
SEARCH_ELEMENTS = 2**20
BestFit = Callable[[Tensor], tuple[Tensor, Tensor]]  # see kernels.int4_search
INT4_TABLE = tuple(float(code - 8) for code in range(16))


class Int8Weight(TableForm):
    """Symmetric int8 with one scale per output: weight[n, k] ≈ scale[n] * codes[n, k]."""

    gated = is_recordable = False
    KERNEL_ROWS = INT8_KERNEL_ROWS
    KERNEL_STEP = 16  # elements of a row that the kernel reads at a time, beyond the row's end too
    KERNEL_ALIGNMENT = 32  # bytes, of the input's address

    def __init__(self, weight: Tensor) -> None:
        # [out_features, in_features], [out_features]
        self.codes, self.scale = int8_codes(weight)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out = self.by_kernel(x) if self._kernel_takes(x) else self.by_tiles(x)
        return out if bias is None else out.add_(bias)

    def rows(self, indices: Tensor) -> Tensor:
        return F.embedding(indices, self.codes) * self.scale[indices, None]

    def dequantized(self) -> Tensor:  # [out_features, in_features]
        """Return the weight that codes and scales represent."""
        return self.codes * self.scale[:, None]

    def _kernel_takes(self, x: Tensor) -> bool:
        return (
            x.dtype == torch.bfloat16
            and len(x) <= self.KERNEL_ROWS
            and self.codes.shape[1] % self.KERNEL_STEP == 0
            and x.data_ptr() % self.KERNEL_ALIGNMENT == 0
        )

    def by_kernel(self, x: Tensor) -> Tensor:
        """Compute x Wᵀ by torch's int8 kernel."""
        return torch._weight_int8pack_mm(x, self.codes, self.scale)

    def by_tiles(self, x: Tensor) -> Tensor:
        """Compute x Wᵀ by float products of dequantised tiles."""
        num_outputs, num_inputs = self.codes.shape
        dtype = x.dtype
        x = x.to(_product_dtype(dtype))
        out = x.new_empty(len(x), num_outputs)
        scratch = x.new_empty(_tile_rows(num_inputs), num_inputs)
        for rows in _tiles(num_outputs, num_inputs):
            codes = self.codes[rows]
            # Codes are exact in any dtype; an output's scale is applied to its sum.
            torch.mm(x, scratch[: len(codes)].copy_(codes).T, out=out[:, rows])
        return out.mul_(self.scale).to(dtype)


class Int4Weight(WeightForm):
    """int4 with a scale and a zero point per output and GROUP inputs, for torch's kernel.

    weight[n, k] ≈ scale[n, g] * (codes[n, k] - 8) + zero[n, g], with codes from 0 to 15 and g = k // GROUP.

    The kernel's layout is panels: uint8[panels, in_features, half]. Each of the `half` bytes holds the codes
    of two outputs. The lower 4 bits belong to the first half of all outputs and the upper 4 bits to the
    second half, so that whole vectors are dequantised at once.
    """

    gated = is_recordable = False
    # By `python -m benchmarks.perplexity`, 64 and 128 add 1.5 and 1.8 times as much to the demo's perplexity.
    GROUP = 32
    MIDDLE = 8
    KERNEL_ROWS = INT4_KERNEL_ROWS

    def __init__(self, weight: Tensor) -> None:
        self.num_outputs, num_inputs = weight.shape
        self.dtype = weight.dtype
        # Half the outputs of a panel, which has four float32 vectors of them in torch's layout.
        half = 32 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 16
        self.num_groups = num_inputs // self.GROUP
        weight = F.pad(weight, (0, 0, 0, -self.num_outputs % (2 * half)))
        halves = weight.view(2, -1, half, num_inputs)
        num_panels = halves.shape[1]
        self.packed = torch.empty(num_panels, num_inputs, half, dtype=torch.uint8)
        # bfloat16 as the kernel requires, for float32 models too: the codes are computed from rounded scales.
        self.scale_zero = torch.empty(self.num_groups, num_panels, 2 * half, 2, dtype=torch.bfloat16)
        for panels in self._tiles():
            groups = halves[:, panels].transpose(0, 1).float().reshape(-1, self.num_groups, self.GROUP)
            codes, scale, zero = int4_codes(groups)
            scale_zero = torch.stack([scale, zero], dim=-1).transpose(0, 1)
            self.scale_zero[:, panels] = scale_zero.reshape(self.num_groups, -1, 2 * half, 2)
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.flatten(1).int(), 1)
            self.packed[panels] = packed.view(-1, num_inputs, half)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        takes = x.dtype == torch.bfloat16 and len(x) <= self.KERNEL_ROWS
        out = self.by_kernel(x) if takes else self.by_tiles(x)
        return out if bias is None else out.add_(bias)

    def dequantized(self) -> Tensor:  # [out_features, in_features]
        """Return the weight that codes, scales and zeros represent."""
        num_panels, num_inputs, half = self.packed.shape
        weight = torch.empty(2, num_panels * half, num_inputs, dtype=self.dtype)
        for side, outputs, tile in self._float_tiles(self.dtype):
            weight[side, outputs] = tile.T
        return weight.flatten(0, 1)[: self.num_outputs]

    def by_kernel(self, x: Tensor) -> Tensor:
        """Compute x Wᵀ in bfloat16 by torch's kernel."""
        num_panels, num_inputs, half = self.packed.shape
        packed = self.packed.view(-1, num_inputs // 2)
        scale_zero = self.scale_zero.flatten(1, 2)
        out = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, self.GROUP, scale_zero)
        return self._without_padding(out.view(-1, num_panels, 2, half).transpose(1, 2))

    def by_tiles(self, x: Tensor) -> Tensor:
        """Compute x Wᵀ by float products of dequantised tiles."""
        num_panels, _, half = self.packed.shape
        dtype = x.dtype
        x = x.to(_product_dtype(dtype))
        out = x.new_empty(len(x), 2, num_panels * half)
        for side, outputs, tile in self._float_tiles(x.dtype):
            torch.mm(x, tile, out=out[:, side, outputs])
        return self._without_padding(out).to(dtype)

    def _tiles(self) -> Iterator[slice]:
        num_panels, num_inputs, half = self.packed.shape
        return _tiles(num_panels, num_inputs * half, 1)

    def _float_tiles(self, dtype: torch.dtype) -> Iterator[tuple[int, slice, Tensor]]:
        """Yield a half (0 or 1), outputs of it, and their weights [in_features, n], valid until the next."""
        _, num_inputs, half = self.packed.shape
        nibbles = (torch.bitwise_and, 15), (torch.bitwise_right_shift, 4)
        size = num_inputs * half * _tile_rows(num_inputs * half, 1)
        # Allocated once: fresh memory for every tile would take as long as the work in it.
        packed, codes = torch.empty(2, size, dtype=torch.uint8)
        weights = torch.empty(size, dtype=dtype)
        for panels in self._tiles():
            scales, zeros = self._scales_and_zeros(panels, dtype)
            outputs = slice(panels.start * half, panels.stop * half)
            tile = weights[: num_inputs * (outputs.stop - outputs.start)]
            groups = tile.view(self.num_groups, self.GROUP, -1)
            # Moved 16 bytes at a time.
            moved = self.packed[panels].view(torch.complex128).transpose(0, 1)
            packed[: len(tile)].view(torch.complex128).view(moved.shape).copy_(moved)
            for side, (extract, bits) in enumerate(nibbles):
                extract(packed, bits, out=codes)
                tile.copy_(codes[: len(tile)])
                torch.addcmul(zeros[side], groups, scales[side], out=groups)
                yield side, outputs, tile.view(num_inputs, -1)

    def _scales_and_zeros(self, panels: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return scales and zeros [2 halves, groups, 1, n], such that weight = scale * code + zero."""
        _, _, half = self.packed.shape
        scale_zero = self.scale_zero[:, panels].view(self.num_groups, -1, 2, half, 2).permute(4, 2, 0, 1, 3)
        scale, zero = scale_zero.to(dtype).reshape(2, 2, self.num_groups, 1, -1)
        return scale, zero - self.MIDDLE * scale

    def _without_padding(self, out: Tensor) -> Tensor:
        return out.flatten(1)[:, : self.num_outputs].contiguous()


def int8_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise the rows of a weight so that scale * code approximates them.

    Returns codes from -127 to 127, i8[num_rows, num_inputs], and scales [num_rows] in the weight's dtype. For
    float16 weights the scales are float32, since small scales would become 0.
    """
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    is_narrow = weight.dtype == torch.float16
    scale = weight.new_empty(len(weight), dtype=torch.float32 if is_narrow else weight.dtype)
    for rows in _tiles(*weight.shape):
        part = weight[rows].float()
        # The scale is rounded before the codes are computed from it.
        scale[rows] = (part.abs().amax(1) / 127).clamp_(min=TINY)
        codes[rows] = (part / scale[rows, None]).round_().clamp_(-127, 127)
    return codes, scale


def int4_codes(groups: Tensor, fit: BestFit = best_fit) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise groups [..., size] so that scale * (code - 8) + zero approximates them.

    size: a power of two. A search finds the scales and zeros of least squared error. If all numbers of a
        group are equal, or one is infinite, the group's range is divided evenly instead. fit: the search.

    Returns codes from 0 to 15, u8[..., size], and scales and zeros, bf16[...].
    """
    shape = groups.shape
    groups = groups.reshape(-1, shape[-1])
    codes = torch.empty_like(groups, dtype=torch.uint8)
    scale = groups.new_empty(len(groups), dtype=torch.bfloat16)
    zero = torch.empty_like(scale)
    at_once = SEARCH_ELEMENTS if groups.device.type == "cpu" else groups.numel()
    step = max(1, at_once // shape[-1])
    for start in range(0, len(groups), step):
        rows = slice(start, start + step)
        numbers = groups[rows].T.contiguous().float()  # a sum adds up whole vectors
        scale[rows], zero[rows] = _scales_and_zeros(numbers, fit)
        numbers.sub_(zero[rows]).div_(scale[rows]).round_().add_(8).clamp_(0, 15)
        codes[rows] = numbers.T
    return codes.view(shape), scale.view(shape[:-1]), zero.view(shape[:-1])


def _scales_and_zeros(numbers: Tensor, fit: BestFit) -> tuple[Tensor, Tensor]:
    """Return scales and zeros, bf16[n], of groups [size, n]."""
    low, high = numbers.aminmax(dim=0)
    step = ((high - low) / LEVELS).clamp_(min=TINY)
    found_scale, found_zero = fit(((numbers - low) / step).sub_(LEVELS / 2))
    scale = (found_scale * step).bfloat16()
    zero = (low + (found_zero + LEVELS / 2) * step).bfloat16()
    is_found = (scale > 0) & scale.isfinite() & zero.isfinite()
    plain_scale = step.bfloat16()
    plain_zero = (low + 8 * plain_scale.float()).bfloat16()
    return torch.where(is_found, scale, plain_scale), torch.where(is_found, zero, plain_zero)


def require_quantization(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError unless torch's kernels support quantised weights for this dtype on this device."""
    if device.type != "cpu":
        raise ConfigError(
            f"quantization {name!r} on {device} needs attention_backend='triton': take that, or leave "
            "quantization out"
        )
    if dtype == torch.float16:
        raise ConfigError(f"quantization {name!r} goes with dtype float32 or bfloat16; got float16")


def require_kernels(name: str) -> None:
    """Raise ResourceError unless this torch has the kernels. They are private, so they are tried out."""
    for form in (Int8Weight, Int4Weight) if name == "int4" else (Int8Weight,):
        try:
            works = _agrees_with_itself(form)
        except (AttributeError, RuntimeError, TypeError):
            works = False
        if not works:
            raise ResourceError(
                f"quantization {name!r} needs kernels that torch {torch.__version__} lacks or has changed "
                f"({form.__name__}); leave it out, or install a version that constraints.txt names"
            )


def _agrees_with_itself(form: type[Int8Weight | Int4Weight]) -> bool:
    """Return whether kernel and tiles both reproduce the weight that was quantised."""
    values = torch.arange(128).add(torch.arange(128)[:, None]).remainder(16).bfloat16()
    weight = form(values)
    x = torch.eye(128, dtype=torch.bfloat16)
    close = [torch.allclose(way(x).T, values, atol=0.1) for way in (weight.by_kernel, weight.by_tiles)]
    return all(close)


def _product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to multiply tiles in: bfloat16 only where oneDNN does not emulate it."""
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.float32
    return dtype


def _tiles(num_rows: int, row_elements: int, multiple: int = 16) -> Iterator[slice]:
    """Divide the rows of a weight into tiles."""
    step = _tile_rows(row_elements, multiple)
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def _tile_rows(row_elements: int, multiple: int = 16) -> int:
    return max(1, TILE_ELEMENTS // row_elements // multiple) * multiple
