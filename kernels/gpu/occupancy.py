"""How many blocks of a compiled kernel run on a multiprocessor at once."""

# An SM's registers, warps, shared memory in bytes and blocks (NVIDIA, "CUDA C++ Programming Guide", compute
# capabilities).
SM_LIMITS = {
    "sm_80": (65536, 64, 164 * 1024, 32),
    "sm_86": (65536, 48, 100 * 1024, 16),
    "sm_87": (65536, 48, 164 * 1024, 16),
    "sm_89": (65536, 48, 100 * 1024, 24),
    **dict.fromkeys(("sm_90", "sm_100", "sm_103"), (65536, 64, 228 * 1024, 32)),
    **dict.fromkeys(("sm_120", "sm_121"), (65536, 48, 100 * 1024, 24)),
}
# A CU's SIMDs, VGPRs of each lane, the units in which these are allocated, waves on a SIMD, and shared memory
# in bytes (AMD, "CDNA 3 ISA Reference Guide" and "RDNA3 ISA Reference Guide"; LLVM's AMDGPUUsage for the
# units). On RDNA 3 a block has all of a WGP, which is two CUs.
AMD_LIMITS = {
    **dict.fromkeys(("gfx90a", "gfx942"), (4, 512, 8, 8, 64 * 1024)),
    "gfx950": (4, 512, 8, 8, 160 * 1024),
    **dict.fromkeys(("gfx1100", "gfx1101", "gfx1151"), (4, 1536, 24, 16, 128 * 1024)),
    "gfx1102": (4, 1024, 16, 16, 128 * 1024),
}


def blocks_per_sm(target: str, registers: int, shared: int, warps: int) -> int:
    """Return how many thread blocks fit on an SM (or CU) at once, at least 1.

    registers: registers per thread. shared: bytes of shared memory per thread block.

    Raises KeyError for an unknown target.
    """
    fit: tuple[int, ...]
    if target in SM_LIMITS:
        all_registers, max_warps, all_shared, max_blocks = SM_LIMITS[target]
        per_warp = -(-max(registers, 1) * 32 // 256) * 256  # allocated in units of 256
        # 1 KiB is reserved for each block.
        fit = (
            all_registers // per_warp // warps,
            all_shared // (shared + 1024),
            max_warps // warps,
            max_blocks,
        )
    else:
        simds, all_registers, unit, max_waves, all_shared = AMD_LIMITS[target]
        waves = min(all_registers // (-(-max(registers, 1) // unit) * unit), max_waves)
        fit = simds * waves // warps, all_shared // max(shared, 1)
    return max(1, min(fit))
