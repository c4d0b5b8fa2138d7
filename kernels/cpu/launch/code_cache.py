"""The cache of machine code: a file for each kernel, which processes that start at once write together.

A file's name is a hash of all that its code depends on, and of no path: a copy of the project finds the code
in its copy of the cache. A file that other users may have written is not used, as its code would run.

Some kernels have variants: compiled for some kinds of numbers alone, which takes a fraction of the time.
`linear.linear.linear+6-8` is the kernel for the kinds 6 and 8 of `formats`; a name without kinds is for all.

A process claims a kernel before it compiles it. The others go on to kernels that are not claimed, and find
the file of this one later.
"""

from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from ..target import (
    CPU_KERNELS,
    HAS_TILES,
    TARGET,
    cached_file,
    directories,
    is_trusted,
)

DIGEST_BYTES = 32
# All kernels, and the seconds that each took on one core of Zen 4. Those of AMX are compiled where it is.
SECONDS = {
    "attention.kernel.attend": 14.7,
    "attention.kernel.merge": 0.3,
    "launch.graph.graph": 0.2,
    "launch.threads.help": 0.1,
    "launch.threads.launch": 0.1,
    "launch.threads.look": 0.1,
    "linear.amx_linear.tiles": 4.0,
    "linear.int4_search.best_fit": 0.9,
    "linear.linear.linear": 11.8,
    "linear.pack_bf12.pack_bf12": 0.5,
    "linear.pack_codes.pack_codes": 0.7,
    "rows.activations.clamped_swiglu": 0.5,
    "rows.activations.gelu": 0.7,
    "rows.activations.gelu_and_mul": 0.5,
    "rows.activations.relu_squared": 0.5,
    "rows.activations.silu_and_mul": 0.5,
    "rows.add_lora.add_lora": 1.0,
    "rows.gated_norm.gated_norm": 0.7,
    "rows.greedy.greedy": 0.3,
    "rows.layer_norm.layer_norm": 1.4,
    "rows.rms_norm.rms_norm": 0.9,
    "rows.rotary_store_kv.rotary_store_kv": 3.0,
    "rows.route.route": 0.7,
    "rows.scales.add": 0.5,
    "rows.scales.scale_and_cap": 0.7,
    "rows.scales.scale_by_sigmoid": 0.7,
    "rows.scales.scale_rows": 0.5,
    "rows.sort_by_expert.sort_by_expert": 0.2,
    "rows.sum_experts.sum_experts": 0.7,
    "rows.take_rows.take_panel_rows": 1.2,
    "rows.take_rows.take_rows": 0.6,
    "sampling.masks.choose": 0.2,
    "sampling.masks.mask": 0.2,
    "sampling.penalties.penalties": 0.2,
    "sampling.sample_tokens.sample": 3.5,
    "sampling.token_logprobs.logprobs": 0.5,
    "states.gated_delta.gated_delta": 2.0,
    "states.mamba2_scan.mamba2_scan": 1.5,
    "states.short_conv.short_conv": 0.5,
}
# Of a kernel with variants: the seconds of what they share, and in how many kinds the others are divided.
_VARIANTS = {
    "attention.kernel.attend": (4.5, 6),
    "linear.linear.linear": (1.0, 14),
    "rows.rotary_store_kv.rotary_store_kv": (0.4, 5),
}
# Of kernels with variants, the kinds that engines of this process have asked for.
announced: dict[str, frozenset[int]] = {}
# What engines of this process need.
needed: set[str] = set()
# What other processes compile for this one now, so that it need not.
expected: set[str] = set()
if not HAS_TILES:
    del SECONDS["linear.amx_linear.tiles"]


def _source() -> bytes:
    """Return the sources of all kernels, as a kernel is made of functions and constants of several files."""
    folder = CPU_KERNELS.parent
    named = ((str(file.relative_to(folder)), file) for file in folder.rglob("*.py"))
    files = sorted((name, file) for name, file in named if not name.startswith("gpu"))
    assert len(files) > 20, f"the sources of the kernels are not below {folder}"
    return b"".join(name.encode() + b"\0" + file.read_bytes() + b"\0" for name, file in files)


_SOURCE = sha256(_source()).hexdigest()[:16]


def file_name(name: str, source: str = _SOURCE) -> str:
    return f"{name}-{TARGET.setting}-{source}.o"


def directory_of(name: str) -> Path | None:
    """Return the cache directory with a file for this kernel; None if there is none. `find` checks it."""
    for place in directories():
        with suppress(OSError):
            if is_trusted(place, (place / file_name(name)).stat()):
                return place
    return None


def find(name: str) -> tuple[str, bytes] | None:
    """Return the symbol of a kernel and its object code; None if they are not in the cache."""
    found = cached_file(file_name(name)) or b""
    digest, data = found[:DIGEST_BYTES], found[DIGEST_BYTES:]
    if sha256(data).digest() != digest:
        return None
    symbol, _, code = data.partition(b"\0")
    return symbol.decode(), code


def variant(kernel: str, kinds: Iterable[int] | None) -> str:
    """Return the name of a kernel's variant that is compiled only for these kinds; None for all kinds."""
    return kernel if kinds is None else f"{kernel}+{'-'.join(map(str, sorted(kinds)))}"


def parts(name: str) -> tuple[str, frozenset[int] | None]:
    """Split a name into the kernel's own name and the kinds of its variant; None stands for all kinds."""
    kernel, _, kinds = name.partition("+")
    return kernel, frozenset(map(int, kinds.split("-"))) if kinds else None


def holder_of(name: str) -> str | None:
    """Return the name of a cached kernel or variant that can stand in for `name`; None if there is none."""
    kernel, kinds = parts(name)
    if directory_of(kernel) is not None:
        return kernel
    if kinds is None:
        return None
    end = file_name("")
    for place in directories():
        for file in sorted(place.glob(f"{kernel}+*{end}")):
            other = file.name.removesuffix(end)
            with suppress(ValueError):  # not a name of ours
                if kinds <= (parts(other)[1] or set()) and directory_of(other) is not None:
                    return other
    return None


def missing_kernels(names: Iterable[str] | None = None) -> list[str]:
    """Return the kernels among `names` (by default all) that the cache lacks, slowest to compile first."""
    missing = [name for name in (SECONDS if names is None else names) if holder_of(name) is None]
    return sorted(missing, key=seconds_of, reverse=True)


def seconds_of(name: str) -> float:
    """Return the seconds that compiling a kernel or a variant takes."""
    kernel, kinds = parts(name)
    whole = SECONDS.get(kernel, 0.5)
    if kinds is None:
        return whole
    shared, number = _VARIANTS[kernel]
    return shared + (whole - shared) * len(kinds) / number
