"""The hot loop of a compiled attention kernel: its instructions for one tile, read from the machine code.

A loop spans from a backward branch to the branch's target. Of the loops with tensor core instructions the
shortest is the innermost one over full tiles; the others apply masks. The number of tiles of one iteration
follows from the FLOPs of its tensor core instructions (those of sm_100 name no shape: one tile is assumed).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from benchmarks.shapes import AttentionShape
from paged.kernels.backend import load_kernels
from paged.kernels.gpu.attention.config import AttentionConfig, Use, choose_config

_SASS = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")


@dataclass(frozen=True)
class Loop:
    """One iteration of the loop over full tiles, as one warp issues it."""

    instructions: int
    special: int  # exponentials and the like; a scheduler starts one every 8 cycles
    vector: int  # AMD: VALU instructions, of 4 cycles each
    tensor_flops: int  # of one warp; 0 where the instructions name no shape


@dataclass(frozen=True)
class Compiled:
    """The figures of one binary that the model uses."""

    config: AttentionConfig
    target: str
    registers: int
    shared: int
    blocks_per_sm: int
    loop: Loop
    tiles: float  # of one iteration of the loop

    def issue_cycles(self) -> float:
        """Return the cycles that an SM's four schedulers need to issue one tile of one block."""
        warps = self.config.num_warps / 4
        if self.target.startswith("gfx"):
            return (self.loop.instructions + 3 * self.loop.vector) * warps / self.tiles
        return max(self.loop.instructions, 8 * self.loop.special) * warps / self.tiles

    def tiles_in_flight(self) -> int:
        """Return how many tiles of K and V a block loads ahead of the one it works on."""
        # The look-up in the block table takes pipeline stages of its own: 3 keep one tile in flight, 5 two.
        return max(1, (self.config.num_stages - 1) // 2)


@lru_cache
def compile_kernel(
    use: Use, head_dim: int, group: int, block_size: int, cache: str | None, target: str
) -> Compiled:
    """Compile one attention kernel in bfloat16; the GPU need not be present. Not in the interpreter."""
    from tests.support.absent_gpu import compiling
    from tests.support.binary_figures import figures
    from tests.support.kernel_launches import DTYPES, launch_attention

    kernels = load_kernels("triton")
    dtype = torch.bfloat16
    sizes = {"num_tokens": 40} if use == "prefill" else {"num_tokens": 1, "num_seqs": 1}
    with compiling(target) as launches:
        launch_attention(kernels, head_dim, group, dtype, block_size, cache=cache, **sizes)
    wanted = "prefill_kernel" if use == "prefill" else "decode_kernel"
    binary = next(launch.binary for launch in launches if launch.kernel == wanted)
    config = choose_config(head_dim, group, dtype, use, target, cache_dtype=DTYPES[cache] if cache else None)
    read = figures(target, binary)
    loop = hot_loop(target, machine_code(target, binary))
    tile_flops = 4 * config.BLOCK_M * config.TILE * head_dim
    warps = config.num_warps
    return Compiled(
        config=config,
        target=target,
        registers=int(read["registers"]),
        shared=int(read["shared"]),
        blocks_per_sm=int(read["blocks_per_sm"]),
        loop=loop,
        tiles=loop.tensor_flops * warps / tile_flops if loop.tensor_flops else 1.0,
    )


def compile_for(shape: AttentionShape, target: str) -> Compiled:
    """Compile the kernel that does most of the work on this batch."""
    use: Use = "decode" if shape.is_decode else "prefill"
    group = shape.num_heads // shape.num_kv_heads
    return compile_kernel(use, shape.head_dim, group, shape.block_size, shape.cache, target)


def machine_code(target: str, binary: Any) -> str:
    """Return the SASS, or the assembly of an AMD GPU."""
    from tests.support.binary_figures import cuobjdump

    if target.startswith("gfx"):
        return str(binary.asm["amdgcn"])
    return cuobjdump(binary.asm["cubin"], "--dump-sass")


def hot_loop(target: str, code: str) -> Loop:
    """Find the shortest loop with tensor core instructions. Raises ValueError if there is none."""
    bodies = _amd_loops(code) if target.startswith("gfx") else _nvidia_loops(code)
    with_tensor = [body for body in bodies if any(_is_tensor(op) for op in body)]
    if not with_tensor:
        raise ValueError(f"no loop with tensor core instructions in the code for {target}")
    body = min(with_tensor, key=len)
    return Loop(
        instructions=len(body),
        special=sum(op.startswith("MUFU") for op in body),
        vector=sum(op.startswith("v_") and not _is_tensor(op) for op in body),
        tensor_flops=sum(_flops_of_a_warp(op) for op in body),
    )


def _nvidia_loops(code: str) -> list[list[str]]:
    found = [(int(address, 16), op, rest) for address, op, rest in _SASS.findall(code)]
    loops = []
    for address, op, rest in found:
        target = re.search(r"0x([0-9a-f]+)", rest) if op.startswith("BRA") else None
        if target is not None and (low := int(target.group(1), 16)) < address:
            loops.append([name for at, name, _ in found if low <= at <= address])
    return loops


def _amd_loops(code: str) -> list[list[str]]:
    loops = []
    labels = dict[str, int]()
    ops = list[str]()
    for line in code.splitlines():
        if label := re.match(r"(\.LBB\w+):", line):
            labels[label.group(1)] = len(ops)
        elif op := re.match(r"\s+((?:[vs]|ds|global|buffer|flat)_\w+)(.*)", line):
            ops.append(op.group(1))
            branch = re.search(r"\.LBB\w+", op.group(2)) if "branch" in op.group(1) else None
            if branch is not None and branch.group() in labels:
                loops.append(ops[labels[branch.group()] :])
    return loops


def _is_tensor(op: str) -> bool:
    return op.startswith(("HMMA", "HGMMA", "UTCHMMA", "v_mfma"))


def _flops_of_a_warp(op: str) -> int:
    if op.startswith("HMMA.16816"):
        return 2 * 16 * 8 * 16
    shape = re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", op)
    if shape is not None:  # of four warps together
        m, n, k = map(int, shape.groups())
        return 2 * m * n * k // 4
    shape = re.match(r"v_mfma_f32_(\d+)x(\d+)x(\d+)_", op)
    if shape is not None:
        m, n, k = map(int, shape.groups())
        return 2 * m * n * k
    return 0
