"""Statistics: counts of a simulation and the figures derived from them."""

from __future__ import annotations

import itertools
import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from ..requests.request import Request
from .replica import Refusal, Replica
from .timeline import Timeline

PERCENTILES = (50, 90, 99)


class Latencies:
    """Latencies of finished requests, in seconds.

    ttft: the time from arrival to the first token.
    tpot: the mean time between tokens, for requests with several tokens. e2e: the time from arrival to the
        last token.
    """

    def __init__(self) -> None:
        self.ttft = array("d")
        self.tpot = array("d")
        self.e2e = array("d")

    def add(self, request: Request) -> None:
        """Add the latencies of a finished request."""
        metrics = request.metrics
        num_output = request.num_output_tokens
        first = metrics.first_token_time
        last = metrics.finished_time
        assert first is not None, "a request that finished without a token"
        assert last is not None, "a request that has not finished"
        self.ttft.append(first - metrics.arrival_time)
        self.e2e.append(last - metrics.arrival_time)
        if num_output > 1:
            self.tpot.append((last - first) / (num_output - 1))


class Statistics:
    """Totals of a fleet. Times are in seconds of the virtual clock, which begins at 0.

    num_simulated: the number of simulated replicas, if they also represent others.
    timeline: records every step, for a plot.
    """

    def __init__(
        self,
        num_blocks: int,
        num_replicas: int,
        num_simulated: int | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_replicas = num_replicas
        self.num_simulated = num_simulated or num_replicas
        self.timeline = timeline
        self.latencies = defaultdict[str, Latencies](Latencies)  # by tenant
        self.refused = Counter[Refusal]()
        self.num_finished = self.num_steps = self.num_preemptions = 0
        self.num_prompt_tokens = self.num_output_tokens = self.num_cached_tokens = 0
        self.duration = self.busy_seconds = self.used_block_seconds = 0.0
        self.num_step_tokens = self.peak_used_blocks = 0
        self.num_deaths = self.num_moved = 0
        self._hits_before: dict[str, int] = {}  # of moved requests, where they ran first

    def step(self, replica: Replica, start: float) -> None:
        """Count a step that a replica has begun, even if a death will interrupt it."""
        schedule, end = replica.in_flight[-1]
        if len(replica.in_flight) > 1:  # the time is counted once
            start = max(start, replica.in_flight[-2].end)
        seconds = end - start
        used = replica.manager.pool.num_used
        self.num_steps += 1
        self.num_step_tokens += schedule.num_tokens
        self.busy_seconds += seconds
        self.used_block_seconds += used * seconds
        self.peak_used_blocks = max(self.peak_used_blocks, used)
        self.duration = max(self.duration, end)
        if self.timeline is not None:
            scheduler = replica.scheduler
            self.timeline.add(
                start, end, used, len(scheduler.running), scheduler.num_waiting, schedule.num_tokens
            )

    def refuse(self, refusal: Refusal, number: int = 1) -> None:
        """Count refused requests."""
        self.refused[refusal] += number

    def die(self, requests: Iterable[Request]) -> None:
        """Count the death of a replica, and its requests, which move to other replicas."""
        self.num_deaths += 1
        for request in requests:
            self.num_moved += 1
            if request.num_cached_tokens is not None:
                self._hits_before.setdefault(request.request_id, request.num_cached_tokens)

    def finish(self, request: Request) -> None:
        """Count a finished request."""
        self.num_finished += 1
        self.num_prompt_tokens += request.num_prompt_tokens
        self.num_output_tokens += request.num_output_tokens
        self.num_cached_tokens += self._hits_before.pop(request.request_id, request.num_cached_tokens or 0)
        self.num_preemptions += request.metrics.num_preemptions
        self.latencies[request.inputs.tenant].add(request)

    def summary(self) -> dict[str, Any]:
        """Return all figures by name. Times are in seconds, and shares are from 0 to 1."""
        duration = self.duration or math.inf  # without a step the throughput is 0
        num_refused = self.refused.total()
        capacity = self.num_blocks * self.num_simulated * duration
        per_s = self.num_replicas / self.num_simulated / duration
        return {
            "requests": self.num_finished + num_refused,
            "finished": self.num_finished,
            "refused": num_refused,
            "refused_because": {reason.value: self.refused[reason] for reason in Refusal},
            "duration_s": self.duration,
            "requests_per_s": self.num_finished * per_s,
            "output_tokens_per_s": self.num_output_tokens * per_s,
            "total_tokens_per_s": (self.num_prompt_tokens + self.num_output_tokens) * per_s,
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            **_percentiles(self.latencies.values()),
            "tenants": {
                tenant: {"finished": len(latencies.e2e), **_percentiles([latencies])}
                for tenant, latencies in sorted(self.latencies.items())
                if tenant
            },
            "busy_share": self.busy_seconds / (duration * self.num_simulated),
            "block_share_mean": self.used_block_seconds / capacity,
            "block_share_peak": self.peak_used_blocks / self.num_blocks,
            "num_blocks": self.num_blocks,
            "replicas": self.num_replicas,
            "simulated_replicas": self.num_simulated,
            "deaths": self.num_deaths,
            "moved_requests": self.num_moved,
            "preemptions": self.num_preemptions,
            "hit_rate": self.num_cached_tokens / max(1, self.num_prompt_tokens),
            "steps": self.num_steps,
            "tokens_per_step": self.num_step_tokens / max(1, self.num_steps),
        }


def _percentiles(groups: Iterable[Latencies]) -> dict[str, dict[str, float] | None]:
    """Return mean and percentiles of each latency; None where no request has it."""
    merged = [*groups]
    return {
        f"{name}_s": _of(sorted(itertools.chain.from_iterable(getattr(group, name) for group in merged)))
        for name in ("ttft", "tpot", "e2e")
    }


def _of(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    found = {f"p{p}": percentile(values, p) for p in PERCENTILES}
    return {**found, "mean": math.fsum(values) / len(values)}


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile of sorted values by linear interpolation, as numpy does."""
    place = (len(values) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)
