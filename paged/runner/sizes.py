"""Sizes: the values of options that depend on the model, the kind of device and the dtype.

Free of torch, so that the simulator gets the same sizes, block manager and scheduler as the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

from ..architectures.config import ModelConfig
from ..base.errors import ConfigError, UnsupportedModelError
from ..blocks.manager import BlockManager
from ..model.cache.layout import CacheLayout
from ..model.part import UNDIVIDED, ModelPart, Shard
from ..options.config import EngineConfig
from ..scheduler.policy import FirstComeFirstServed, Policy
from ..scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from ..blocks.snapshots import Snapshots
    from ..drafting.drafter import Drafter
    from ..requests.request import Request

GIB = 2**30
# The default of block_size, and where the kernels load whole tiles of a larger block by descriptors: see
# kernels/gpu/attention/descriptors.py, which must agree.
BLOCK_SIZE = 16
TMA_BLOCK_SIZE = 64
TMA_TARGETS = ("sm_90", "sm_100", "sm_103")
TMA_HEAD_DIMS = (128, 256)
# Defaults by device: the token budget of a step, and host memory for swapping in GiB.
STEP_TOKENS = {"cuda": 8192, "cpu": 512}
MOST_IMAGE_BYTES = {"cuda": 256 * 2**20}  # of embeddings that are kept; elsewhere as many as the options say
SWAP_SPACE = {"cuda": 4.0, "cpu": 0.0}
# Under a sliding window, sequences may be far longer than the KV cache. Beyond this, each step computes
# cos and sin of its positions. Room for Gemma 4 with 256K positions.
MAX_ROPE_TABLE_BYTES = 3 * GIB // 4

# Rows of a step that take as long to compute as the weights take to read, roughly.
ROWS_OF_READ = {"cuda": 256, "cpu": 24}


class HostRates(NamedTuple):
    """The rates of a device, roughly: half of what the slowest device of its type promises."""

    flops_per_s: float
    bytes_per_s: float  # to or from the host


# A quantised cache also has one scale per token and head.
ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
QUANTIZED_ELEMENT_BYTES = {"int8": 1, "float8_e4m3fn": 1}
SCALE_BYTES = 4
FP8_NAMES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}

HOST_RATES = {"cuda": HostRates(100e12, 12e9), "cpu": HostRates(100e9, 5e9)}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of an engine: the values of options that depend on model, device and dtype.

    device: "cuda" or "cpu".
    dtype: the dtype of activations.
    target: what kernels are compiled for on a GPU, for example "sm_90".
    host_bytes_per_s: the measured rate of swapping; None takes an estimate.
    draft: the sizes of the draft model, if there is one; see `draft_sizes`. Its K and V lie in the same
        blocks.
    is_draft: whether these are the sizes of a draft model. Its layers share one block table.
    part: the part of the model that this process computes; None computes the whole model.

    Raises ConfigError for an option that contradicts the model, the device or the dtype, and
    UnsupportedModelError for a dtype that no kernel computes in.
    """

    config: EngineConfig
    model: ModelConfig
    device: str
    dtype: str
    target: str = ""
    host_bytes_per_s: float | None = None
    draft: Sizes | None = None
    is_draft: bool = False
    part: ModelPart | None = None

    def __post_init__(self) -> None:
        config = self.config
        if self.model.states or config.state_snapshots is not None or config.state_interval is not None:
            from .state_options import check_options

            check_options(config, self.model, is_draft=self.is_draft)
        longest = self.model.max_context
        if self.max_model_len > longest:
            raise ConfigError(f"max_model_len {self.max_model_len} is more than the {longest} of the model")
        for name in ("max_num_batched_tokens", "long_prefill_token_threshold"):
            given = getattr(config, name)
            if given is not None and given < self.uncut_tokens:
                raise ConfigError(
                    f"{name} {given} is less than the {self.uncut_tokens} tokens of an image, which see each "
                    "other and are computed in one step; raise it, or set language_model_only=True"
                )
        num_groups = len(self.layout.groups)
        if config.num_blocks is not None and config.num_blocks < num_groups:
            raise ConfigError(
                f"num_blocks {config.num_blocks} holds no token: one takes a block in each of the model's "
                f"{num_groups} layer groups"
            )
        if self.dtype not in ELEMENT_BYTES:
            raise UnsupportedModelError(
                f"dtype {self.dtype} is not supported; supported are {', '.join(ELEMENT_BYTES)}"
            )
        if self.dtype != "float32" and self.kv_dtype not in (self.dtype, *QUANTIZED_ELEMENT_BYTES):
            raise ConfigError(
                f"kv_cache_dtype {config.kv_cache_dtype!r} needs dtype float32, this model's is "
                f"{self.dtype}: use 'auto', 'int8' or 'fp8'"
            )
        if not self.num_host_blocks and (config.preemption_mode == "swap" or config.swap_space):
            space = f"swap_space {self.swap_space:g} GiB"
            if config.swap_space is None:
                space += f" (the default on {self.device})"
            state = f" beside a state of {self.state_bytes:,} bytes" if self.state_bytes else ""
            raise ConfigError(
                f"preemption_mode {config.preemption_mode!r} cannot swap: {space} holds no block of "
                f"{self.block_bytes:,} bytes{state}; raise it, or leave both out"
            )

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt and output together."""
        return self.config.max_model_len or self.model.max_context

    @property
    def block_size(self) -> int:
        """Number of tokens per block."""
        if self.config.block_size is not None:
            return self.config.block_size
        dims = {shape.key_dim for shape in self.model.kv_shapes.values()}
        has_tiles = self.target in TMA_TARGETS and not dims.isdisjoint(TMA_HEAD_DIMS)
        return TMA_BLOCK_SIZE if has_tiles and self.dtype != "float32" else BLOCK_SIZE

    @property
    def max_num_batched_tokens(self) -> int:
        """The token budget of a step."""
        return self.config.max_num_batched_tokens or max(STEP_TOKENS[self.device], self.uncut_tokens)

    @property
    def uncut_tokens(self) -> int:
        """The most image tokens that attend to each other and must be computed in one step; 0 if none do."""
        vision = self.model.vision
        if vision is None or not vision.sees_itself:
            return 0
        assert vision.most_tokens is not None, "tokens that see each other are of a known number"
        return vision.most_tokens

    @property
    def image_cache_bytes(self) -> int:
        """The memory for embeddings of images that later prompts may have."""
        num_bytes = int(self.config.mm_processor_cache_gb * GIB)
        return min(num_bytes, MOST_IMAGE_BYTES.get(self.device, num_bytes))

    @property
    def max_step_tokens(self) -> int:
        """Maximum number of tokens of one request in a step."""
        budget = self.max_num_batched_tokens
        return min(self.config.long_prefill_token_threshold or budget, budget)

    @property
    def max_run(self) -> int:
        """Maximum number of tokens of a request in a step of decodes: more than one with drafts.

        For a draft model it is two: after a step whose guesses were all right, it computes the last guess and
        the token behind it.
        """
        speculation = self.config.speculation
        if speculation is None:
            return 1 + self.is_draft
        return 1 + speculation.num_speculative_tokens

    @property
    def max_sampled_rows(self) -> int:
        """Maximum number of rows that a step with drafts samples. On a GPU, memory is measured for them."""
        return self.config.num_seats if self.device == "cuda" else self.max_num_batched_tokens

    @property
    def kv_dtype(self) -> str:
        """The dtype of K and V in the cache, as torch names it."""
        name = self.config.kv_cache_dtype
        return self.dtype if name == "auto" else FP8_NAMES.get(name, name)

    @property
    def shard(self) -> Shard:
        """The share of each layer that this process computes."""
        return UNDIVIDED if self.part is None else self.part.shard

    @property
    def num_heads(self) -> int:
        """The largest number of query heads of any layer in this process."""
        return len(self.shard.share(self.model.num_heads))

    @property
    def layout(self) -> CacheLayout:
        """The layout of blocks: where K and V of each layer lie."""
        if self.is_draft:
            return CacheLayout.of_draft(self.model, self.block_size)
        return CacheLayout.of(self.model, self.block_size, self.part)

    @property
    def block_bytes(self) -> int:
        """The bytes of one block: K, V and scales of all layers of its group, and of the draft model."""
        is_quantized = self.kv_dtype in QUANTIZED_ELEMENT_BYTES
        element = (ELEMENT_BYTES | QUANTIZED_ELEMENT_BYTES)[self.kv_dtype]
        own = self.layout.block_bytes(element, SCALE_BYTES if is_quantized else 0)
        return own + (0 if self.draft is None else self.draft.block_bytes)

    @property
    def state_bytes(self) -> int:
        """The bytes of one sequence's recurrent states."""
        return self._bytes_of_states(0)

    @property
    def seat_bytes(self) -> int:
        """The size of a running sequence's states and of the inputs of its runs of drafts, in bytes."""
        return (self.states_of_seat - 1) * self.state_bytes + self._bytes_of_states(self.num_run_places)

    def _bytes_of_states(self, num_run_places: int) -> int:
        states = self.model.states.items()
        own = [self.shard.state(spec) for i, spec in states if self.part is None or i in self.part.layers]
        return sum(spec.num_bytes(ELEMENT_BYTES[self.dtype], num_run_places) for spec in own)

    @property
    def num_run_places(self) -> int:
        """The number of tokens whose inputs a seat stores: of a run of drafts, and of the run before it.

        It is 0 without drafts or without states.
        """
        speculation = self.config.speculation if self.model.states else None
        return 0 if speculation is None else 2 * (1 + speculation.num_speculative_tokens)

    @property
    def states_of_seat(self) -> int:
        """The number of states of a running sequence: its own and, with a prefix cache, a rolling state."""
        return 2 if self.enable_prefix_caching else 1

    @property
    def num_states(self) -> int:
        """The number of states on the device, of running sequences and snapshots."""
        return self.config.num_seats * self.states_of_seat + self.num_snapshots

    @property
    def all_state_bytes(self) -> int:
        """The size of all states on the device and of the inputs of runs, in bytes."""
        return self.num_snapshots * self.state_bytes + self.config.num_seats * self.seat_bytes

    @property
    def num_snapshots(self) -> int:
        """The maximum number of snapshots of states; 0 until it is decided."""
        return self.config.state_snapshots or 0

    @property
    def enable_prefix_caching(self) -> bool:
        """Whether blocks are reused for prompts with the same beginning."""
        if self.config.state_snapshots == 0:
            return False
        return self.config.enable_prefix_caching is not False

    @property
    def kv_bytes_per_token(self) -> float:
        """The bytes of one token's K and V in all layers."""
        return self.block_bytes * len(self.layout.groups) / self.block_size

    @property
    def max_useful_blocks(self) -> int:
        """The number of blocks that max_num_seqs requests of full length take."""
        blocks = -(-self.max_model_len // self.block_size)
        return self.config.num_seats * blocks * len(self.layout.groups)

    def blocks_in(self, room: int) -> int:
        """Return how many blocks fit in `room` bytes with the rope tables; at most `max_useful_blocks`.

        Return 0 if not even one token fits, which takes a block in each layer group.
        """
        size = self.block_bytes
        if not size:  # a stage whose layers all keep states
            return self.max_useful_blocks
        # The tables are no larger than for this many blocks, although fewer remain.
        room -= self.all_rope_bytes(max(1, room // size))
        num_blocks = max(0, room // size)
        return min(num_blocks, self.max_useful_blocks) if num_blocks >= len(self.layout.groups) else 0

    def all_rope_bytes(self, num_blocks: int) -> int:
        """Return the bytes of the rope tables for num_blocks blocks, including the draft model's tables."""
        own = self.rope_table_bytes(self.num_tabulated_positions(num_blocks))
        return own + (0 if self.draft is None else self.draft.all_rope_bytes(num_blocks))

    def num_tabulated_positions(self, num_blocks: int) -> int:
        """Return how many positions the rope tables cover: all that one sequence in num_blocks blocks can
        reach.

        Return 0 if there are no tables, so that each step computes cos and sin: with dynamic RoPE, or if the
        tables would be too large.
        """
        if self.model.rope.type == "dynamic":
            return 0
        blocks_of_one = self.max_useful_blocks // self.config.num_seats
        manager = self.new_block_manager(min(num_blocks, blocks_of_one))
        reached = manager.longest_fit(self.max_model_len)
        return reached if self.rope_table_bytes(reached) <= MAX_ROPE_TABLE_BYTES else 0

    def rope_table_bytes(self, num_positions: int) -> int:
        """Return the size of the rope tables in bytes. With longrope, long requests have further rows."""
        long = self.model.for_context(self.max_model_len).long_context
        num_rows = num_positions + (long.offset if long and num_positions else 0)
        return num_rows * self._rope_bytes_per_position

    @property
    def _rope_bytes_per_position(self) -> int:
        """The bytes of one position in the rope tables: cos, sin and the factor of queries, in float32."""
        return 4 * sum(head_dim + bool(rope.query_scaling_beta) for rope, head_dim in self.model.ropes)

    @property
    def swap_space(self) -> float:
        """The host memory for swapping, in GiB."""
        if self.config.preemption_mode == "recompute":
            return 0.0
        return SWAP_SPACE[self.device] if self.config.swap_space is None else self.config.swap_space

    @property
    def num_host_blocks(self) -> int:
        """The number of blocks in host memory."""
        space = int(self.swap_space * GIB) - self.num_host_states * self.state_bytes
        return max(0, space) // max(1, self.block_bytes)

    @property
    def num_host_states(self) -> int:
        """The number of sequences whose recurrent states fit in half of the host memory for swapping."""
        if not self.state_bytes:
            return 0
        return min(self.config.num_seats, int(self.swap_space * GIB) // 2 // self.state_bytes)

    def swap_pays(self, num_tokens: int) -> bool:
        """Estimate whether swapping a sequence's KV out and in takes less time than recomputing it.

        Recomputing takes the FLOPs of linear layers and attention. Swapping transfers the bytes twice, at the
        measured rate if there is one.
        """
        if self.config.preemption_mode != "auto":
            return self.config.preemption_mode == "swap"
        model = self.model
        rates = HOST_RATES[self.device]
        kv_bytes = num_tokens * self.kv_bytes_per_token + self.state_bytes
        attention = num_tokens**2 * model.num_attention_dims
        recompute_s = (2 * model.num_active_layer_params * num_tokens + attention) / rates.flops_per_s
        return 2 * kv_bytes / (self.host_bytes_per_s or rates.bytes_per_s) < recompute_s

    def relative_step_time(self, rows: int) -> float:
        """Estimate the duration of a decode step with `rows` rows, relative to reading the weights once.

        In a mixture of experts, each further row reads more experts.
        """
        model = self.model
        read = model.num_read_layer_params(rows) / model.num_read_layer_params(1)
        return read + rows / ROWS_OF_READ[self.device]

    def new_block_manager(
        self, num_blocks: int, num_host_blocks: int = 0, *, keeps_prefixes: bool = True
    ) -> BlockManager:
        """Make a block manager for this model.

        keeps_prefixes: False makes a manager without a prefix cache, whatever the options say. A model with
            states has a prefix cache only once the number of snapshots is known.
        """
        snapshots = None
        caches = self.enable_prefix_caching and keeps_prefixes
        if self.model.states:
            caches = caches and self.num_snapshots > 0
            snapshots = self._new_snapshots() if caches else None
        return BlockManager(
            num_blocks,
            self.block_size,
            windows=[group.window for group in self.layout.groups],
            max_step_tokens=self.max_step_tokens,
            num_host_blocks=num_host_blocks,
            enable_prefix_caching=caches,
            snapshots=snapshots,
            num_host_states=self.num_host_states if self.model.states else None,
        )

    def _new_snapshots(self) -> Snapshots:
        from ..blocks.snapshots import Snapshots
        from .state_options import interval_of

        size = self.block_size
        rate = HOST_RATES[self.device].flops_per_s / (2 * self.model.num_active_layer_params)
        alike = self.state_bytes / max(1.0, self.kv_bytes_per_token)
        interval = interval_of(self.config.state_interval, size, self.max_step_tokens, rate, alike)
        return Snapshots(self.num_snapshots, self.config.num_seats, size, interval)

    def _new_policy(self, manager: BlockManager) -> Policy:
        """Return the policy of the options, whose weights and name were checked."""
        name = self.config.scheduling_policy
        if not isinstance(name, str):
            return cast("Policy", name)
        if name == "fcfs":
            return FirstComeFirstServed()
        from ..scheduler.policies import new_policy

        def num_cached(request: Request) -> int:
            return manager.num_matched(request.blocks, request.token_ids, request.first_needed)

        return new_policy(name, num_cached, self.config.tenant_weights)

    def new_scheduler(
        self,
        manager: BlockManager,
        clock: Callable[[], float] = time.perf_counter,
        draft_model: Drafter | None = None,
        num_in_flight: int = 1,
        *,
        runs_ahead: bool = False,
    ) -> Scheduler:
        """Make a scheduler that allocates from this block manager.

        draft_model: the drafter that runs the draft model, if there is one.
        num_in_flight: how many steps are in flight at once.
        runs_ahead: whether steps in flight may compute the same requests; otherwise the requests are divided
            among the steps.
        """
        config = self.config
        scheduler = Scheduler(
            manager,
            policy=self._new_policy(manager),
            max_num_seqs=config.num_seats,
            max_num_batched_tokens=self.max_num_batched_tokens,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            max_num_partial_prefills=config.max_num_partial_prefills,
            watermark=config.watermark,
            max_waiting=config.max_waiting,
            max_preemptions=config.max_preemptions,
            swap_pays=self.swap_pays if manager.host_pool.num_blocks else None,
            clock=clock,
        )
        scheduler.max_queued_tokens = config.max_queued_tokens
        if self.model.vision is not None:
            from ..scheduler.towers import TowerQueue, costs_of

            costs = costs_of(self.model, ELEMENT_BYTES[self.dtype])
            scheduler.towers = TowerQueue(costs, self.image_cache_bytes)
        if runs_ahead:
            scheduler.run_ahead()
        else:
            scheduler.num_in_flight = num_in_flight
        speculation = config.speculation
        if speculation is not None:
            from ..drafting.drafters import new_drafter
            from ..drafting.lengths import DraftLengths
            from ..scheduler.drafts import Drafts

            most = speculation.num_speculative_tokens
            lengths = DraftLengths(most, self.relative_step_time, clock) if speculation.adaptive else None
            scheduler.drafts = Drafts(
                new_drafter(speculation, draft_model),
                most,
                self.model.vocab_size,
                self.max_sampled_rows,
                lengths,
                in_blocks=draft_model is not None,
            )
        return scheduler
