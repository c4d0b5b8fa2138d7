"""Registers, spills, shared memory and instruction counts, read out of a compiled kernel."""

import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import triton

from paged.kernels.gpu.occupancy import blocks_per_sm

# Shared memory one block may use, in bytes.
SHARED_LIMITS = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
    "gfx942": 64 * 1024,
    "gfx1100": 64 * 1024,
}
CUOBJDUMP = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")


def figures(target: str, binary: Any) -> dict[str, float]:
    """Read one binary's figures; "stack" is where registers spill to, in bytes, as is "local" memory
    (AMD: instructions that use it).
    """
    return _amd_figures(target, binary) if target.startswith("gfx") else _nvidia_figures(target, binary)


def _machine_code(cubin: bytes) -> int:
    """Return the bytes of code of a cubin: its section .text.<kernel>, found in the table of an ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, num_sections, names = struct.unpack_from("<HHH", cubin, 0x3A)
    # name, type, flags, address, offset and size of each
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry_size) for i in range(num_sections)]
    first_name = sections[names][4]
    return sum(section[5] for section in sections if cubin.startswith(b".text.", first_name + section[0]))


def cuobjdump(cubin: bytes, option: str) -> str:
    """Run NVIDIA's cuobjdump: "--dump-resource-usage" takes 3 ms, "--dump-sass" half a second."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [CUOBJDUMP, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _nvidia_figures(target: str, binary: Any) -> dict[str, float]:
    """Read the figures of a cubin; registers that spill are in the stack."""
    cubin, ptx = binary.asm["cubin"], binary.asm["ptx"]
    usage = dict(re.findall(r"([A-Z]+):(\d+)", cuobjdump(cubin, "--dump-resource-usage")))
    registers = int(usage["REG"])
    shared, warps = binary.metadata.shared, binary.metadata.num_warps
    return {
        "registers": registers,
        "stack": int(usage["STACK"]),
        "local": int(usage["LOCAL"]),
        "shared": shared,
        "warps": warps,
        "blocks_per_sm": blocks_per_sm(target, registers, shared, warps),
        # Each of these becomes one instruction of the tensor cores.
        "wgmma": ptx.count("wgmma.mma_async."),
        "mma": len(re.findall(r"(?<!\.)\bmma\.sync\.", ptx)),
        "tcgen05": ptx.count("tcgen05.mma"),
        "async_copies": len(
            re.findall(r"cp\.async\.c[ag]\.shared\.global[^,]*,[^,]*, (?:0x10|16)\b|bulk\.tensor", ptx)
        ),
        "tma": ptx.count("cp.async.bulk.tensor"),
        "loads_2B": len(re.findall(r"ld\.global(?:\.\w+)*\.b16 ", ptx)),
        **_widths(re.findall(r"\b(ld|st)\.global((?:\.\w+)*) ", ptx), _ptx_bytes),
        "loads_behind_barrier": ptx.partition("bar.sync")[2].count("ld.global"),
        "instructions": _machine_code(cubin) // 16,
    }


def _amd_figures(target: str, binary: Any) -> dict[str, float]:
    isa = binary.asm["amdgcn"]

    def field(name: str) -> int:
        match = re.search(rf"\.{name}:\s+(\d+)", isa)
        assert match is not None
        return int(match.group(1))

    registers, shared, warps = field("vgpr_count"), binary.metadata.shared, binary.metadata.num_warps
    matrix = "wmma" if target.startswith("gfx11") else "mfma"  # RDNA's matrix instructions, or CDNA's
    return {
        "registers": registers,
        "stack": field("private_segment_fixed_size"),
        "local": len(re.findall(r"^\s+scratch_", isa, re.M)),
        "shared": shared,
        "warps": warps,
        "blocks_per_sm": blocks_per_sm(target, registers, shared, warps),
        matrix: len(re.findall(rf"^\s+v_{matrix}", isa, re.M)),
        "instructions": len(re.findall(r"^\s+[vs]_|^\s+(?:global|ds|buffer|flat)_", isa, re.M)),
        **_widths(re.findall(r"\b(?:global|buffer)_(load|store)_(\w+)", isa), _amd_bytes),
    }


def _widths(instructions: list[tuple[str, str]], width: Callable[[str], int]) -> dict[str, int]:
    """Count loads from and stores to global memory that move 16 bytes a thread, and those that move fewer."""
    counts = dict.fromkeys(["loads_16B", "loads_narrow", "stores_16B", "stores_narrow"], 0)
    for kind, suffix in instructions:
        counts[
            f"{'loads' if kind.startswith('l') else 'stores'}_{'16B' if width(suffix) == 16 else 'narrow'}"
        ] += 1
    return counts


def _ptx_bytes(suffix: str) -> int:
    """Return the bytes a thread; of ld.global.L1::evict_last.v4.b32 they are 4 times 4."""
    vector, bits = re.search(r"\.v(\d)", suffix), re.search(r"\.[bfsu](\d+)$", suffix)
    assert bits is not None, suffix
    return int(bits[1]) // 8 * (int(vector[1]) if vector else 1)


def _amd_bytes(suffix: str) -> int:
    """Return the bytes a thread; of dwordx4, or b128, they are 4 times 4. Anything narrower counts as 4."""
    wide = re.fullmatch(r"dwordx([234])|b(64|96|128)", suffix)
    return 4 if wide is None else 4 * int(wide[1]) if wide[1] else int(wide[2]) // 8
