"""Sizes: what the options leave open, settled for a model on a kind of device.

Without torch, so that the simulator has the very sizes, block manager and scheduler of the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..blocks.manager import BlockManager
from ..config import EngineConfig
from ..errors import ConfigError, UnsupportedModelError
from ..model.config import ModelConfig
from ..scheduler.policies import new_policy
from ..scheduler.scheduler import Scheduler

GIB = 2**30
# What a step computes at most, and host memory for swapping in GiB, unless the options say so.
STEP_TOKENS = {"cuda": 8192, "cpu": 512}
SWAP_SPACE = {"cuda": 4.0, "cpu": 0.0}


class HostRates(NamedTuple):
    """What a device does in a second, roughly: half of what the least of its kind promise."""

    flops_per_s: float
    bytes_per_s: float  # to or from the host


# Bytes of an element; in a quantised cache each token and head has a scale beside them.
DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}
QUANTIZED, SCALE_BYTES = {"int8": 1, "float8_e4m3fn": 1}, 4
FP8_NAMES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}

HOST_RATES = {"cuda": HostRates(100e12, 12e9), "cpu": HostRates(100e9, 5e9)}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of an engine.

    device: "cuda" or "cpu".
    dtype: of activations.

    Raises ConfigError for an option that does not go with the model, the device or the dtype, and
    UnsupportedModelError for a dtype that no kernel computes in.
    """

    config: EngineConfig
    model: ModelConfig
    device: str
    dtype: str

    def __post_init__(self) -> None:
        config, longest = self.config, self.model.max_context
        if self.max_model_len > longest:
            raise ConfigError(f"max_model_len {self.max_model_len} is more than the {longest} of the model")
        if self.dtype not in DTYPES:
            raise UnsupportedModelError(
                f"dtype {self.dtype} is not supported; supported are {', '.join(DTYPES)}"
            )
        if self.dtype != "float32" and self.kv_dtype not in (self.dtype, *QUANTIZED):
            raise ConfigError(
                f"kv_cache_dtype {config.kv_cache_dtype!r} goes with dtype float32, this model's is "
                f"{self.dtype}: take 'auto', 'int8' or 'fp8'"
            )
        if not self.num_host_blocks and (config.preemption_mode == "swap" or config.swap_space):
            space = f"swap_space {self.swap_space:g} GiB"
            if config.swap_space is None:
                space += f" (the default on {self.device})"
            raise ConfigError(
                f"preemption_mode {config.preemption_mode!r} cannot swap: {space} holds no block of "
                f"{self.block_bytes:,} bytes; raise it, or leave both out"
            )

    @property
    def max_model_len(self) -> int:
        """Prompt and output together at most, in tokens."""
        return self.config.max_model_len or self.model.max_context

    @property
    def max_num_batched_tokens(self) -> int:
        """The token budget of a step."""
        return self.config.max_num_batched_tokens or STEP_TOKENS[self.device]

    @property
    def max_step_tokens(self) -> int:
        """The most tokens of one request in a step."""
        budget = self.max_num_batched_tokens
        return min(self.config.long_prefill_token_threshold or budget, budget)

    @property
    def kv_dtype(self) -> str:
        """What K and V are held in, as torch names it."""
        name = self.config.kv_cache_dtype
        return self.dtype if name == "auto" else FP8_NAMES.get(name, name)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over the layers of its group, scales included."""
        head_bytes = self.model.head_dim * (DTYPES | QUANTIZED)[self.kv_dtype]
        if self.kv_dtype in QUANTIZED:
            head_bytes += SCALE_BYTES
        return self.model.kv_heads_per_slot * head_bytes * self.config.block_size

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of K and V of one token over all layers."""
        return self.block_bytes * len(self.model.layer_groups) / self.config.block_size

    @property
    def most_blocks(self) -> int:
        """What every request at full length could fill: more is of no use."""
        blocks = -(-self.max_model_len // self.config.block_size)
        return self.config.max_num_seqs * blocks * len(self.model.layer_groups)

    @property
    def swap_space(self) -> float:
        """Host memory for swapping, in GiB."""
        if self.config.preemption_mode == "recompute":
            return 0.0
        return SWAP_SPACE[self.device] if self.config.swap_space is None else self.config.swap_space

    @property
    def num_host_blocks(self) -> int:
        """Blocks of that memory."""
        return int(self.swap_space * GIB) // self.block_bytes

    def swap_pays(self, num_tokens: int) -> bool:
        """Whether moving a sequence's KV to the host and back takes less time than computing it again.

        By estimate: the FLOPs of its linears and attention, against its bytes twice over the host link.
        """
        if self.config.preemption_mode != "auto":
            return self.config.preemption_mode == "swap"
        model, rates = self.model, HOST_RATES[self.device]
        kv_bytes = num_tokens * self.kv_bytes_per_token
        attention = 2 * num_tokens**2 * model.num_layers * model.num_heads * model.head_dim
        recompute_s = (2 * model.num_layer_params * num_tokens + attention) / rates.flops_per_s
        return 2 * kv_bytes / rates.bytes_per_s < recompute_s

    def new_block_manager(self, num_blocks: int, num_host_blocks: int = 0) -> BlockManager:
        """A manager for so many blocks of this model."""
        return BlockManager(
            num_blocks,
            self.config.block_size,
            windows=[group.window for group in self.model.layer_groups],
            max_step_tokens=self.max_step_tokens,
            num_host_blocks=num_host_blocks,
            enable_prefix_caching=self.config.enable_prefix_caching,
        )

    def new_scheduler(
        self, manager: BlockManager, clock: Callable[[], float] = time.perf_counter
    ) -> Scheduler:
        """A scheduler over these blocks."""
        config = self.config
        return Scheduler(
            manager,
            policy=new_policy(
                config.scheduling_policy,
                lambda request: manager.num_matched(request.blocks, request.token_ids, request.first_needed),
                config.tenant_weights,
            ),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            max_num_partial_prefills=config.max_num_partial_prefills,
            watermark=config.watermark,
            max_waiting=config.max_waiting,
            max_preemptions=config.max_preemptions,
            swap_pays=self.swap_pays if manager.host_pool.num_blocks else None,
            clock=clock,
        )
