"""What LLVM says of the CPU: see `kernels.cpu.target`."""

import sys
from hashlib import sha256

import llvmlite
import llvmlite.binding as llvm
import numba
from numba.core import config


def target_of_llvm() -> tuple[str, int, bool, bool, bool]:
    """Return what LLVM says about this CPU, as the fields of `target.Target`."""
    lanes = 16 if _has("avx512f") else 8 if _has("avx2") else 4
    is_wide = lanes == 16
    has_dot = is_wide and _has("avx512bf16") and _has("avx512vbmi")
    has_lookup = (is_wide and _has("avx512bw")) or lanes == 8
    has_tiles = has_dot and _has("amx-bf16") and _has("amx-tile")
    return sha256(_setting().encode()).hexdigest()[:16], lanes, has_dot, has_lookup, has_tiles


def _has(feature: str) -> bool:
    if config.CPU_FEATURES is not None:  # numba is set to compile for another CPU
        return f"+{feature}" in config.CPU_FEATURES.split(",")
    return bool(llvm.get_host_cpu_features().get(feature))


def _setting() -> str:
    """Describe what the code is compiled for and by."""
    cpu = config.CPU_NAME or llvm.get_host_cpu_name()
    # Of the host too: they decide how wide vectors are, whatever numba is set to compile for.
    features = f"{config.CPU_FEATURES} {llvm.get_host_cpu_features().flatten()}"
    target = f"{llvm.get_process_triple()} {cpu} {features} {config.ENABLE_AVX}"
    passes = f"{config.OPT} {config.LOOP_VECTORIZE} {config.SLP_VECTORIZE}"
    checks = f"{config.BOUNDSCHECK} {config.DEBUGINFO_DEFAULT}"
    versions = f"{numba.__version__} {llvmlite.__version__} {sys.implementation.cache_tag}"
    return f"{target} {passes} {checks} {versions}"
