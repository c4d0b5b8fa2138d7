"""How many KV blocks fit into the memory that is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..base.errors import ResourceError
from ..device.host_memory import free_on_cpu
from ..model.cache.kv_cache import KVCache
from ..options.config import EngineConfig
from ..options.sampling_params import SamplingParams
from ..requests.request import Request, RequestInputs
from ..scheduler.schedule import Schedule
from ..scheduler.scheduler import Scheduler
from .memory import new_kv_cache
from .sizes import Sizes

if TYPE_CHECKING:
    from ..kernels.operations import Kernels

# The parameters that take the most memory to sample with.
LARGEST_PARAMS = SamplingParams(top_p=0.9, min_p=0.1, typical_p=0.9, presence_penalty=1.0, logprobs=5)
RunStep = Callable[[Schedule, KVCache], int]


def num_blocks_that_fit(
    sizes: Sizes,
    device: torch.device,
    kernels: Kernels,
    run_step: RunStep,
    with_snapshots: Callable[[int], Sizes] | None = None,
) -> int:
    """Return how many KV blocks fit in free memory, but no more than requests can ever fill.

    run_step: runs one step, whose memory is measured on a GPU. It returns the bytes that CUDA graphs will
        take in addition.
    with_snapshots: returns the sizes with snapshots of states. Its argument is the number of bytes for
        snapshots and blocks together.

    Raises ResourceError if no token fits.
    """
    hint = ""
    if device.type == "cpu":
        free = kv_bytes_on_cpu(sizes.config)
    else:
        peak, graphs = measure_peak_bytes(sizes, device, run_step)
        free = kv_bytes_on_gpu(sizes.config, device, peak + graphs) - max_partial_bytes(sizes, kernels)
        if graphs:
            hint = (
                f", or leave out CUDA graphs, for which {graphs / 2**20:,.0f} MiB are kept: lower "
                "max_cudagraph_capture_size, or set enforce_eager=True"
            )
    if with_snapshots is not None:
        sizes = with_snapshots(free - sizes.all_state_bytes)
    num_blocks = sizes.blocks_in(free - sizes.all_state_bytes)
    if not num_blocks:
        least = sizes.block_bytes * len(sizes.layout.groups)
        if sizes.state_bytes:
            from .states import no_room

            raise no_room(sizes, free, least)
        raise ResourceError(
            f"no memory for a KV cache: {free / 2**20:,.0f} MiB are left, a block in each layer group "
            f"takes {least / 2**20:,.2f} MiB; raise {'cpu' if device.type == 'cpu' else 'gpu'}"
            f"_memory_utilization, or lower max_num_batched_tokens or max_num_seqs{hint}"
        )
    return num_blocks


def kv_bytes_on_cpu(config: EngineConfig) -> int:
    """Return cpu_memory_utilization's share of the RAM that is free now, within the container's limit."""
    return int(free_on_cpu() * config.cpu_memory_utilization)


def kv_bytes_on_gpu(config: EngineConfig, device: torch.device, peak_bytes: int) -> int:
    """Return the bytes that are left for KV under gpu_memory_utilization.

    Other processes, the weights and the activations of a step are deducted.

    peak_bytes: the peak of torch's allocated bytes while a step of the largest size ran.
    """
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return int(total * config.gpu_memory_utilization) - others - peak_bytes


def measure_peak_bytes(sizes: Sizes, device: torch.device, run_step: RunStep) -> tuple[int, int]:
    """Run a step of the largest size. Return torch's peak in bytes without the KV cache, and the bytes needed
    besides.

    Raises ResourceError if memory does not suffice.
    """
    lengths = largest_step(sizes)
    num_blocks = len(sizes.layout.groups) * sum(-(-n // sizes.block_size) for n in lengths)
    scheduler = Scheduler(
        sizes.new_block_manager(num_blocks, keeps_prefixes=False),
        max_num_seqs=len(lengths),
        max_num_batched_tokens=sum(lengths),
        watermark=0.0,
    )
    for i, n in enumerate(lengths):
        # A namespace for each request: a prefix that it shared with another would not be computed.
        namespace = str(i).encode()
        inputs = RequestInputs(
            prompt_token_ids=[0] * n, params=LARGEST_PARAMS, max_total_tokens=n + 1, namespace=namespace
        )
        scheduler.add(Request(inputs))
    schedule = scheduler.schedule()
    if sizes.config.enable_lora:  # slots that are empty: what adapters need beside their matrices counts
        schedule.adapters = [0] * len(schedule.requests), []
    torch.cuda.reset_peak_memory_stats(device)
    kv_cache = new_kv_cache(sizes, device, num_blocks)
    try:
        kept = run_step(schedule, kv_cache)
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            f"no memory for a step of {sum(lengths):,} tokens beside the weights on {device}: lower "
            f"max_num_batched_tokens or max_num_seqs, or end other processes there; {error}"
        ) from error
    states = 0 if kv_cache.states is None else kv_cache.states.num_bytes
    peak = torch.cuda.max_memory_allocated(device) - kv_cache.num_bytes - states
    del kv_cache
    torch.cuda.empty_cache()
    return peak, kept


def largest_step(sizes: Sizes) -> list[int]:
    """Make the largest step: the sequences allowed share its tokens, so that the logits are largest too."""
    budget = sizes.max_num_batched_tokens
    num_seqs = min(sizes.config.num_seats, budget)
    share, rest = divmod(min(budget, num_seqs * sizes.max_model_len), num_seqs)
    return [share + (i < rest) for i in range(num_seqs)]


def max_partial_bytes(sizes: Sizes, kernels: Kernels, max_rows: int | None = None) -> int:
    """Return the maximum bytes of partial results of split decodes. The measured step has few of them.

    max_rows: maximum number of sequences; None takes as many as may run.
    """
    if max_rows is None:
        max_rows = 2 * sizes.config.num_seats  # the last layers may attend twice for a sequence
    widest = max(shape.value_dim for shape in sizes.model.kv_shapes.values())
    return kernels.partial_bytes(max_rows, sizes.max_model_len, sizes.num_heads, widest)
