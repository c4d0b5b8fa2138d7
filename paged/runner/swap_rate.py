"""How fast blocks are swapped between a GPU and pinned host memory, measured once at start."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from ..scheduler.schedule import Schedule
from .model_runner import ModelRunner

logger = logging.getLogger(__name__)
MEASURED_BYTES = 64 * 2**20  # in each direction: milliseconds, beside which a launch takes little


def measure_swap_rate(runner: ModelRunner, clock: Callable[[], float] = time.perf_counter) -> float | None:
    """Measure the rate of swapping blocks in bytes per second. Return None if no option needs the rate.

    Writes into the KV cache, so no request may hold blocks.
    """
    sizes = runner.sizes
    cache = runner.kv_cache
    num_blocks = min(cache.num_blocks, cache.num_host_blocks, max(1, MEASURED_BYTES // sizes.block_bytes))
    if runner.device.type == "cpu" or not num_blocks or runner.config.preemption_mode != "auto":
        return None
    pairs = [(block, block) for block in range(num_blocks)]

    def swap() -> None:
        runner.execute(Schedule(swap_out=pairs))
        runner.execute(Schedule(swap_in=pairs))
        torch.cuda.synchronize(runner.device)

    swap()  # compiles
    started = clock()
    swap()
    rate = 2 * num_blocks * sizes.block_bytes / (clock() - started)
    logger.info("swapping reaches %.1f GB/s", rate / 1e9)
    return rate
