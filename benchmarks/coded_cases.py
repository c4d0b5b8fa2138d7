"""Products with weights in codes, each compared with float64 before it is timed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.cases import assert_close
from benchmarks.costs import linear_cost
from paged.checkpoints.coded import CodedWeight, Factors
from paged.checkpoints.formats.fp4 import E2M1
from paged.checkpoints.formats.groups import SIGNED
from paged.kernels.codes import PackedCodes, coded_linear, pack_codes

# Outputs and inputs of the linears of Llama-3.1-8B, the largest first.
LINEARS_8B = {
    "gate and up": (28672, 4096),
    "down": (4096, 14336),
    "QKV": (6144, 4096),
    "output": (4096, 4096),
}
TINY_LINEARS = {"tiny": (48, 256)}
FORMATS = ("GPTQ 128", "Q4_K", "fp8 blocks", "MXFP4", "NVFP4")
_CHECKED_ROWS = 32


@dataclass(frozen=True)
class CodedCase:
    """One measurement: x times a weight in codes, and times the floats that these stand for."""

    name: str
    x: Tensor  # [num_rows, num_inputs]
    packed: PackedCodes
    floats: Tensor  # [num_outputs, num_inputs], in the dtype of x
    cost: tuple[int, int]

    def run(self) -> Tensor:
        """Call the kernel once."""
        return coded_linear(self.x, self.packed)

    def run_floats(self) -> Tensor:
        """Call torch's product of the floats once."""
        return torch.matmul(self.x, self.floats.T)

    def check(self) -> float:
        """Compare the last rows with float64, and a row's bits with those it has alone. Return the error."""
        out = self.run()
        assert out.isfinite().all(), f"{self.name}: not all of the output is finite"
        rows = slice(max(0, len(self.x) - _CHECKED_ROWS), None)
        want = torch.empty_like(out[rows], dtype=torch.float64)
        for outputs in torch.arange(len(self.floats), device=out.device).split(4096):  # float64 takes memory
            want[:, outputs] = self.x[rows].double() @ self.floats[outputs].double().T
        assert torch.equal(coded_linear(self.x[-1:], self.packed), out[-1:]), f"{self.name}: other bits alone"
        return assert_close(out[rows], want)


def coded_cases(
    linear: str,
    num_outputs: int,
    num_inputs: int,
    format_name: str,
    row_counts: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[CodedCase]:
    """Make the cases of one weight, with each number of rows of x."""
    weight = random_codes(format_name, num_outputs, num_inputs, device)
    floats = torch.empty(weight.shape, dtype=dtype, device=device)
    for rows in torch.arange(num_outputs, device=device).split(1024):  # float32 takes memory
        floats[rows] = weight.take(rows).floats().to(dtype)
    packed = pack_codes(weight.codes, *weight.factors, table=weight.table)
    del weight
    num_bytes = sum(x.nbytes for x in packed.tensors if x is not None)
    for num_rows in row_counts:
        yield CodedCase(
            f"{format_name}, {linear}, {num_rows} rows",
            torch.randn(num_rows, num_inputs, dtype=dtype, device=device),
            packed,
            floats,
            linear_cost(num_rows, num_outputs, num_inputs, num_bytes, dtype.itemsize),
        )


def random_codes(name: str, num_outputs: int, num_inputs: int, device: torch.device) -> CodedWeight:
    """Make a weight of random codes in a format, with numbers as large as those of a model."""
    size = 1 / (8 * num_inputs**0.5)

    def integers(most: int, columns: int) -> Tensor:
        return torch.randint(0, most, (num_outputs, columns), dtype=torch.uint8, device=device)

    def floats(columns: int) -> Tensor:
        return (torch.rand(num_outputs, columns, device=device) + 0.5) * size

    if name == "fp8 blocks":
        codes = integers(0x77, num_inputs) | integers(2, num_inputs) << 7  # below the NaN of either sign
        scales = floats(num_inputs // 128)[::128].repeat_interleave(128, dim=0)[:num_outputs]
        return CodedWeight(codes.view(torch.float8_e4m3fn), Factors(scales / 32))
    codes = integers(16, num_inputs)
    if name == "GPTQ 128":
        groups = num_inputs // 128
        zeros = integers(16, groups).to(torch.int8) - 8
        return CodedWeight(codes, Factors(floats(groups).half(), zero=zeros), SIGNED)
    if name == "Q4_K":
        scale, offset = integers(64, num_inputs // 32), integers(64, num_inputs // 32)
        units = num_inputs // 256
        factors = Factors(
            scale,
            offset=offset,
            scale_unit=(floats(units) / 32).half(),
            offset_unit=-(floats(units) / 4).half(),
        )
        return CodedWeight(codes, factors, tuple(map(float, range(16))))
    if name == "MXFP4":
        exponents = integers(3, num_inputs // 32).float() + round(math.log2(size))
        return CodedWeight(codes, Factors(torch.exp2(exponents).to(torch.float8_e8m0fnu)), E2M1)
    assert name == "NVFP4", name
    scales = (floats(num_inputs // 16) / size * 128).to(torch.float8_e4m3fn)
    return CodedWeight(codes, Factors(scales, scale_unit=floats(1) / 128), E2M1)
