"""The CPU that the kernels are compiled for: its vectors and the instructions that they may use.

LLVM says what a CPU has, and importing LLVM takes as long as everything else here. So what it said is kept in
the cache of machine code, for the same processor, versions and settings.
"""

import ctypes
import logging
import platform

from .cache_files import remembered_target

logger = logging.getLogger(__name__)

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
    """Round up to whole vectors."""
    return (size + LANES - 1) // LANES * LANES
