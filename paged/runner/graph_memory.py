"""The sizes of CUDA graphs, and the memory that they take, before any is captured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..options.config import EngineConfig
from .sizes import Sizes

if TYPE_CHECKING:
    from ..kernels.operations import Kernels

# Sizes beside 1, 2 and 4 are multiples of this: a step is padded by fewer rows.
SIZE_STEP = 8
# For graphs that are captured when a step first needs them, beside the logits for what they end with.
RESERVE = 128 * 2**20
# What a driver keeps of each launch of a graph. An assumption, for GPUs that are not there.
LAUNCH_BYTES = 12 * 1024
LAUNCHES_OF_LAYER = 10
LAUNCHES_OF_ADAPTERS = 4  # more of a layer, in graphs of steps with LoRA adapters
WAYS_AT_START = 2  # greedy and drawn
WAYS_OF_STAGE = 1  # which draws outside


def capture_sizes(config: EngineConfig) -> list[int]:
    """Return the numbers of rows to capture, in ascending order: the configured ones that a step can have."""
    most = config.num_seats
    if config.cudagraph_capture_sizes is not None:
        return sorted({size for size in config.cudagraph_capture_sizes if size <= most})
    most = min(most, config.max_cudagraph_capture_size or most)
    return sorted({size for size in (1, 2, 4, *range(SIZE_STEP, most, SIZE_STEP), most) if size <= most})


def most_graph_tokens(sizes: Sequence[int], max_run: int, capacity: int) -> int:
    """Return the maximum number of tokens in a graph.

    sizes: the numbers of rows of graphs. max_run: maximum number of tokens in a row; more than 1 for drafts.
    capacity: maximum number of tokens in a graph of rows with several tokens.
    """
    return max([sizes[-1], *(size * max_run for size in sizes if size * max_run <= capacity)])


def planned_sizes(sizes: Sizes, kernels: Kernels) -> list[int]:
    """Return the numbers of rows for which such an engine will capture graphs; empty without graphs."""
    has_graphs = (
        sizes.device == "cuda"
        and not sizes.config.enforce_eager
        and sizes.shard.is_whole
        and kernels.unpack_step is not None
    )
    return capture_sizes(sizes.config) if has_graphs else []


def planned_bytes(sizes: Sizes, kernels: Kernels, captured: Sequence[int], num_activations: int) -> int:
    """Return the bytes that graphs will take, including graphs that are captured later.

    captured: a non-empty list from `planned_sizes`. num_activations: bytes of activations of the largest
        size.
    """
    num_tokens = most_graph_tokens(captured, sizes.max_run, sizes.config.num_seats)
    part = sizes.part
    num_layers = len(sizes.model.layers if part is None else part.layers)
    ways = WAYS_AT_START if part is None else WAYS_OF_STAGE
    lengths = 1 if sizes.max_model_len <= kernels.split_keys else 2
    of_layer = LAUNCHES_OF_LAYER
    if sizes.config.enable_lora:  # graphs of steps with adapters as well
        of_layer += LAUNCHES_OF_LAYER + LAUNCHES_OF_ADAPTERS
    launches = len(captured) * ways * lengths * of_layer * num_layers * LAUNCH_BYTES
    vocab_size = sizes.model.vocab_size if part is None or part.is_last else 0
    return num_activations + launches + RESERVE + 4 * num_tokens * vocab_size
