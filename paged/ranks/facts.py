"""What all ranks must have in common: versions, options and the checkpoint, compared by its headers."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

from ..checkpoints.weight_files import find_weight_files
from ..device.devices import cpu_flags
from ..options.config import EngineConfig

# How the model is made, and how images become patches.
CONFIGS = ("config.json", "preprocessor_config.json", "processor_config.json")
PACKAGES = ("paged", "torch", "numba", "llvmlite", "triton")
# Options that may differ from rank to rank: what they are about is the driver's, or one machine's.
OF_ONE_RANK = frozenset(
    {
        *("model", "tokenizer", "revision", "tokenizer_revision", "generation_config", "skip_tokenizer_init"),
        *("scheduling_policy", "tenant_weights", "max_waiting", "max_queued_tokens", "max_preemptions"),
        *(
            "limit_mm_per_prompt",
            "allowed_media_domains",
            "watermark",
            "long_prefill_token_threshold",
            "max_num_partial_prefills",
            "seed",
            "device",
        ),
        "num_threads",
        *("cpu_memory_utilization", "gpu_memory_utilization"),
    }
)
# Instructions by which kernels choose their code, and with it the last bits of sums.
CPU_FEATURES = frozenset(
    {
        *("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"),
        *("avx_vnni", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8", "bf16", "asimd", "i8mm", "sve"),
    }
)
_HEADER_BYTES = 2**20  # of a file without a length in front of its header
_LENGTH_BYTES = 8


def facts_of(config: EngineConfig, directory: Path) -> dict[str, Any]:
    """Return everything that must be equal on all ranks, by the name that error messages use.

    Raises CheckpointError if the checkpoint has no weights.
    """
    facts: dict[str, Any] = {f"{name}'s version": _version(name) for name in PACKAGES}
    facts |= {name: value for name, value in plain_options(config).items() if name not in OF_ONE_RANK}
    facts["a checkpoint whose headers have the hash"] = header_hash(directory)
    return facts


def plain_options(config: EngineConfig) -> dict[str, Any]:
    """Return the options of a config as JSON values. A policy object is replaced by the default's name."""
    options = {field.name: getattr(config, field.name) for field in fields(config)}
    speculation = config.speculation
    if speculation is not None:
        options["speculative_config"] = {f.name: getattr(speculation, f.name) for f in fields(speculation)}
    if not isinstance(config.scheduling_policy, str):
        options["scheduling_policy"] = "fcfs"
    for name, value in options.items():
        if isinstance(value, Mapping):
            options[name] = dict(value)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            options[name] = [*value]
    return options


def header_hash(directory: Path) -> str:
    """Return a hash of a checkpoint's configs and of the names, sizes and headers of its weight files."""
    found = hashlib.sha256()
    for name in CONFIGS:
        if (directory / name).exists():
            found.update((directory / name).read_bytes())
    for file in find_weight_files(directory):
        found.update(f"{file.name} {file.stat().st_size}".encode())
        with file.open("rb") as opened:
            start = opened.read(_LENGTH_BYTES)
            size = int.from_bytes(start, "little") if file.suffix == ".safetensors" else _HEADER_BYTES
            found.update(start + opened.read(min(size, os.fstat(opened.fileno()).st_size)))
    return found.hexdigest()[:16]


def cpu_features() -> list[str]:
    """Return the CPU's instruction sets that affect the bits of sums."""
    return sorted(cpu_flags() & CPU_FEATURES)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
