"""The sizes of a draft model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..architectures.config import ModelConfig
from .sizes import Sizes


def draft_sizes(sizes: Sizes, model: ModelConfig, directory: Path) -> Sizes:
    """Return the sizes of a draft model for the model of `sizes`, with the same blocks and dtypes.

    directory: the directory of the draft model's checkpoint.

    The draft model guesses for requests up to its own context length, and only while the cache holds all of
    their K and V. If every layer of the target model has a sliding window, that is up to the widest window.
    If the draft model's longrope changes factors at another length than the target's, it guesses up to that
    length.
    """
    speculation = sizes.config.speculation
    assert speculation is not None, "a draft model comes from a speculative_config"
    windows = [group.window for group in sizes.layout.groups]
    widest = sizes.max_model_len if None in windows else max(window or 0 for window in windows)
    longest = min(sizes.max_model_len, model.max_context, widest)
    long = model.for_context(longest).long_context
    if long is not None:
        own = sizes.model.for_context(sizes.max_model_len).long_context
        if own is None or own.num_tokens != long.num_tokens:
            longest = min(longest, long.num_tokens - 1)
    config = replace(
        sizes.config,
        model=str(directory),
        revision=None,
        quantization=speculation.quantization,
        speculative_config=None,
        scheduling_policy="fcfs",
        tenant_weights=None,
        block_size=sizes.block_size,
        max_model_len=longest,
        num_blocks=None,
        swap_space=None,
        preemption_mode="recompute",
        state_snapshots=None,
        state_interval=None,
        enable_lora=False,
        max_loras=1,
        max_lora_rank=16,
        max_cpu_loras=None,
        lora_target_modules=None,
    )
    return Sizes(config, model, sizes.device, sizes.dtype, sizes.target, is_draft=True)
