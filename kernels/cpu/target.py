"""The CPU that the kernels are compiled for, and the files of the cache of machine code, which remember it.

LLVM says what a CPU has, and importing LLVM takes as long as everything else here. So what it said is kept in
the cache, for the same processor, versions and settings: a start whose kernels are all there needs neither
numba nor LLVM.
"""

import ctypes
import json
import logging
import os
import platform
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib import import_module, metadata
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)

CPU_KERNELS = Path(__file__).parent  # kernels/cpu
# Lines of /proc/cpuinfo that tell processors apart; others count them or change with time.
_IDENTITY = (
    "vendor_id", "cpu family", "model", "model name", "stepping", "flags",
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features",
)  # fmt: skip


class Target(NamedTuple):
    """The machine that kernels are compiled for.

    setting: a hash of everything besides the source that the machine code depends on.
    """

    setting: str
    lanes: int
    has_dot: bool
    has_lookup: bool
    has_tiles: bool


def directories() -> Iterator[Path]:
    """Yield the directories of the cache: numba's cache directories."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        yield Path(chosen)
        return
    yield CPU_KERNELS / "__pycache__"
    with suppress(RuntimeError):  # no home directory
        yield Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "paged"


def writable_directory() -> Path:
    """Return the first cache directory that can be written. Raises ImportError if none can."""
    for candidate in directories():
        with suppress(OSError):
            candidate.mkdir(parents=True, exist_ok=True)
            if os.access(candidate, os.W_OK | os.X_OK):
                return candidate
    raise ImportError(
        "the CPU's compiled kernels are kept beside their source or in the home directory, where nothing can "
        "be written; set NUMBA_CACHE_DIR to a directory where it can"
    )


def is_trusted(place: Path, status: os.stat_result) -> bool:
    """Return whether only users who may write the kernels' sources could have written a file."""
    owners = (0, os.geteuid(), Path(__file__).stat().st_uid)
    trusted = status.st_uid in owners and not status.st_mode & stat.S_IWOTH
    if not trusted:
        _warn(place)
    return trusted


@cache
def _warn(place: Path) -> None:
    logger.warning("machine code in %s is not used, as other users may have written it", place)


def cached_file(file_name: str) -> bytes | None:
    """Return the content of a cached file; None if no directory has a trusted file of this name."""
    for place in directories():
        with suppress(OSError), (place / file_name).open("rb") as file:
            if is_trusted(place, os.fstat(file.fileno())):
                return file.read()
    return None


def write_cached(place: Path, file_name: str, data: bytes) -> None:
    """Write a file atomically: readers see the whole file or none. Raises OSError."""
    new = place / f"{file_name}.{os.getpid()}.new"
    try:
        new.unlink(missing_ok=True)
        with open(new, "xb", opener=_private) as file:
            file.write(data)
        new.replace(place / file_name)
    except OSError:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o644)


def remembered_target() -> Target:
    """Return the target that LLVM reported at an earlier start; if none is stored, ask LLVM."""
    name = _target_name()
    if name is not None:
        found = _parsed(cached_file(name))
        if found is not None:
            return found
    llvm = import_module(".compiled.target", __package__)
    target = Target(*llvm.target_of_llvm())
    if name is not None:
        with suppress(OSError, ImportError):  # LLVM is asked again next time
            write_cached(writable_directory(), name, json.dumps(target).encode())
    return target


def _parsed(data: bytes | None) -> Target | None:
    """Return the target that a file describes, or None if it is damaged."""
    try:
        setting, lanes, *flags = json.loads(data or b"")
        target = Target(setting, lanes, *flags)
    except (ValueError, TypeError):
        return None
    are_flags = all(isinstance(flag, bool) for flag in flags)
    return target if isinstance(setting, str) and lanes in (4, 8, 16) and are_flags else None


def _target_name() -> str | None:
    """Return the name of the file about this processor, or None where the system does not describe it."""
    processor = _processor()
    if processor is None:
        return None
    settings = sorted((name, value) for name, value in os.environ.items() if name.startswith("NUMBA_"))
    versions = [metadata.version(package) for package in ("numba", "llvmlite")]
    described = [processor, settings, versions, platform.machine(), sys.implementation.cache_tag]
    return f"target-{sha256(json.dumps(described).encode()).hexdigest()[:16]}.json"


def _processor() -> list[str] | None:
    """Return the lines of /proc/cpuinfo that tell the first processor from other models."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = []
            for line in file:
                if not line.strip():
                    break
                lines.append(line.split(":", 1))
    except OSError:
        return None
    known = [": ".join(part.strip() for part in line) for line in lines if line[0].strip() in _IDENTITY]
    return known or None


LINE = 64  # bytes of a cache line
# AMX multiplies tiles of TILE_ROWS rows of LINE bytes; STEPS of the depth in a product, of two inputs each.
TILE_ROWS = 16
STEPS = 16
INPUTS = 2 * STEPS
ROW_BLOCK = 2 * TILE_ROWS
# arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), as a system call.
_ASK_FOR_TILES = 158, 0x1023, 18


def _may_use_tiles() -> bool:
    """Ask Linux to let this process use tiles. Return whether it does.

    From then on a signal stack (sigaltstack) must have room for the tiles.
    """
    if platform.system() != "Linux":
        return False
    if ctypes.CDLL(None).syscall(*_ASK_FOR_TILES) == 0:
        return True
    logger.warning("this CPU has AMX, but Linux does not let this process use it; going on without")
    return False


TARGET = remembered_target()
LANES = TARGET.lanes  # float32 in a vector
VECTOR_BYTES = 4 * LANES
HAS_DOT = TARGET.has_dot  # dot products of pairs of bfloat16, and tables of 128 bytes
HAS_LOOKUP = TARGET.has_lookup  # a table of 16 bytes for a whole vector
# The compiled code, which other processes load too, depends on the CPU alone.
CPU_HAS_TILES = TARGET.has_tiles
HAS_TILES = CPU_HAS_TILES and _may_use_tiles()


def padded(size: int) -> int:
    """Round a number up to whole vectors."""
    return (size + LANES - 1) // LANES * LANES
