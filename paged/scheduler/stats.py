"""EngineStats: the state of an engine at one moment, and its totals so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import Any

from .schedule import HistogramCounts
from .scheduler import Scheduler

# What goes on when another engine takes the place of an earlier one.
TOTAL_FIELDS = frozenset(
    (
        *("prefix_hit_rate", "num_recompute_preemptions", "num_swap_preemptions", "num_steps"),
        *("num_prefill_tokens", "num_decode_tokens", "num_cached_tokens", "num_queried_tokens"),
        "num_cut_tokens",
        *("num_prompt_tokens", "num_generated_tokens", "num_drafts", "num_draft_tokens"),
        *("num_accepted_tokens", "num_accepted_at", "draft_seconds_won"),
        *("step_seconds", "step_tokens", "num_restarts", "num_resumed"),
        "exchange_seconds",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts of requests, blocks and tokens.

    A block is free, used (held by a running request or pinned), or cached (held by no request, found by its
    tokens). A block that a step in flight may still read counts as used.

    num_prompt_tokens: the prompt tokens of the requests that ran so far, including num_cached_tokens.
    num_queried_tokens: equals num_prompt_tokens, or 0 if there is no prefix cache.
    num_cut_tokens: prompt tokens whose blocks were cached but which were computed, as no snapshot of states
        was behind them. num_snapshots, max_snapshots: those that there are, and that may be.
    num_prefill_tokens, num_decode_tokens: tokens computed so far; tokens recomputed after a preemption count
        again.
    num_generated_tokens: tokens drawn so far.
    step_seconds, step_tokens: histograms over all steps, with the bounds SECONDS_OF_STEP and TOKENS_OF_STEP.
    num_restarts: how many times the process of the engine was replaced.
    num_resumed: requests that a new process continued after the process that began them had ended.
    exchange_seconds: how long steps waited for the model's other processes.
    num_graphs, graph_bytes, graph_seconds: the number of CUDA graphs, and the memory and time that capturing
        at the start took.
    weight_bytes: the bytes of the weights in their files, by the name of the format.
    num_parameters: the number of weights of the model; num_active_parameters: the number that take part in
        computing one token.
    """

    num_running: int
    num_waiting: int
    num_queued_tokens: int  # of the waiting requests
    num_blocks: int
    num_free_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_pinned_blocks: int
    num_host_blocks: int
    num_used_host_blocks: int
    utilization: float  # share of the blocks that are used
    waste: float  # share of the running requests' slots that hold no token
    prefix_hit_rate: float  # share of the tokens looked up that were in the prefix cache, so far
    num_recompute_preemptions: int
    num_swap_preemptions: int
    num_steps: int
    step_prefill_tokens: int  # of the last step
    step_decode_tokens: int
    num_prefill_tokens: int  # so far
    num_decode_tokens: int
    num_cached_tokens: int
    num_queried_tokens: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_drafts: int  # runs of guessed tokens that steps verified
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_at: tuple[int, ...]  # by their place in the run
    draft_seconds_won: float  # estimated against steps without drafts; below 0 if time was lost
    step_seconds: HistogramCounts
    step_tokens: HistogramCounts
    # Sizes of the engine.
    block_size: int
    enable_prefix_caching: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    weight_bytes: Mapping[str, int]
    num_parameters: int = 0
    num_active_parameters: int = 0
    num_cut_tokens: int = 0
    num_snapshots: int = 0
    max_snapshots: int = 0
    num_restarts: int = 0
    num_resumed: int = 0
    exchange_seconds: float = 0.0
    num_graphs: int = 0
    graph_bytes: int = 0
    graph_seconds: float = 0.0

    def after(self, earlier: EngineStats) -> EngineStats:
        """Return these stats with the totals of the engine that this engine replaced added to them."""
        whole = EngineStats.total([earlier, self])
        totals: dict[str, Any] = {name: getattr(whole, name) for name in TOTAL_FIELDS}
        return replace(self, **totals)

    @property
    def exchange_share(self) -> float:
        """The fraction of step time spent waiting for the model's other processes."""
        return self.exchange_seconds / max(self.step_seconds.total, self.exchange_seconds, 1e-9)

    @property
    def mean_acceptance_length(self) -> float:
        """The mean number of tokens that a verified draft gives: the accepted ones and one more."""
        return 1 + self.num_accepted_tokens / max(1, self.num_drafts)

    def at_rest(self) -> EngineStats:
        """Return the stats of an engine that has ended: its totals, without requests and used blocks."""
        gauges = ("num_running", "num_waiting", "num_queued_tokens", "num_used_blocks", "num_cached_blocks")
        zeros: dict[str, Any] = dict.fromkeys(
            (*gauges, "num_snapshots", "num_pinned_blocks", "num_used_host_blocks", "utilization", "waste"), 0
        )
        return replace(self, num_free_blocks=self.num_blocks, **zeros)

    @classmethod
    def total(cls, several: Sequence[EngineStats]) -> EngineStats:
        """Return the stats of several engines as if they were one engine."""
        (first, *others) = several
        if not others:
            return first
        values = {f.name: [getattr(each, f.name) for each in several] for f in fields(cls)}
        weights = sum(map(Counter, values.pop("weight_bytes")), Counter[str]())
        histograms = {name: values.pop(name) for name in ("step_seconds", "step_tokens")}
        accepted = zip_longest(*values.pop("num_accepted_at"), fillvalue=0)
        totals: dict[str, Any] = {name: sum(each) for name, each in values.items()}
        used = totals["num_used_blocks"]
        totals["utilization"] = used / totals["num_blocks"]
        totals["waste"] = sum(each.waste * each.num_used_blocks for each in several) / max(1, used)
        totals["prefix_hit_rate"] = totals["num_cached_tokens"] / max(1, totals["num_queried_tokens"])
        totals |= {name: HistogramCounts.total_of(each) for name, each in histograms.items()}
        totals["num_accepted_at"] = tuple(map(sum, accepted))
        same = {
            name: getattr(first, name) for name in ("block_size", "num_parameters", "num_active_parameters")
        }
        return cls(**{**totals, **same, "weight_bytes": weights})

    @classmethod
    def of(
        cls,
        scheduler: Scheduler,
        weight_bytes: Mapping[str, int] | None = None,
        parameters: tuple[int, int] = (0, 0),
        exchange_seconds: float = 0.0,
        graphs: tuple[int, int, float] = (0, 0, 0.0),
    ) -> EngineStats:
        """Collect the stats of a scheduler and its block manager.

        parameters: the model's number of parameters, and the number of active ones.
        exchange_seconds: how long steps waited for the model's other processes.
        graphs: the number of CUDA graphs, and the bytes and seconds that capturing at the start took.
        """
        manager = scheduler.block_manager
        counters = scheduler.counters
        pool = manager.pool
        host = manager.host_pool
        snapshots = manager.snapshots
        slots = manager.block_size * sum(r.blocks.num_blocks for r in scheduler.running)
        filled = sum(manager.num_filled_slots(r.blocks, r.num_computed_tokens) for r in scheduler.running)
        used = pool.num_used + pool.num_deferred
        return cls(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_queued_tokens=scheduler.num_queued_tokens,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_used_blocks=used,
            num_cached_blocks=pool.num_cached,
            num_pinned_blocks=manager.num_pinned,
            num_host_blocks=host.num_blocks,
            num_used_host_blocks=host.num_used,
            utilization=used / pool.num_blocks,
            waste=1 - filled / slots if slots else 0.0,
            prefix_hit_rate=counters.num_cached_tokens / max(1, counters.num_prompt_tokens),
            num_recompute_preemptions=counters.num_recomputed,
            num_swap_preemptions=counters.num_swapped,
            num_steps=counters.num_steps,
            step_prefill_tokens=counters.step_prefill_tokens,
            step_decode_tokens=counters.step_decode_tokens,
            num_prefill_tokens=counters.num_prefill_tokens,
            num_decode_tokens=counters.num_decode_tokens,
            num_cached_tokens=counters.num_cached_tokens,
            num_queried_tokens=counters.num_prompt_tokens if manager.enable_prefix_caching else 0,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_cut_tokens=counters.num_cut_tokens,
            num_snapshots=0 if snapshots is None else len(snapshots),
            max_snapshots=0 if snapshots is None else snapshots.num_kept,
            num_generated_tokens=counters.num_generated_tokens,
            num_drafts=counters.num_drafts,
            num_draft_tokens=counters.num_draft_tokens,
            num_accepted_tokens=sum(counters.num_accepted_at),
            num_accepted_at=tuple(counters.num_accepted_at),
            draft_seconds_won=0.0 if scheduler.drafts is None else scheduler.drafts.seconds_won,
            step_seconds=counters.step_seconds.snapshot(),
            step_tokens=counters.step_tokens.snapshot(),
            weight_bytes=weight_bytes or {},
            exchange_seconds=exchange_seconds,
            num_graphs=graphs[0],
            graph_bytes=graphs[1],
            graph_seconds=graphs[2],
            num_parameters=parameters[0],
            num_active_parameters=parameters[1],
            block_size=manager.block_size,
            enable_prefix_caching=manager.enable_prefix_caching,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
        )
