"""Fleet: an event loop over replicas behind a router, on one virtual clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..base.validation import changed, check_int, check_number, shown
from ..config import EngineConfig
from ..errors import ConfigError
from ..routing.router import ROUTERS, new_router
from ..runner.sizes import Sizes
from .cost import DATA_SHEETS, Coefficients, Roofline, StepCost, blocks_that_fit
from .model import read_model
from .replica import Refusal, Replica
from .statistics import Statistics
from .timeline import Timeline
from .workload import Arrival

# Order of events at the same time: steps begin after all arrivals.
ARRIVAL, NEXT_TURN, STEP = range(3)
# Time, kind, number of the request (NEXT_TURN) or replica (STEP), and the arrival unless it is a STEP.
Event = tuple[float, int, int, Arrival | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """The hardware of a fleet, its router, and the assumptions of the cost model.

    gpu: name of a GPU, in any case; its data sheet gives compute, bandwidth, memory and link to the host.
    replicas: number of engines, each with a GPU of its own.
    router: "round-robin"; "least-loaded", the fewest outstanding tokens; "prefix-aware", the replica that
        was sent most of the prompt before, unless its load is too high.
    coefficients: a JSON file with step_s, token_s, seq_s, context_s and pair_s, measured seconds that replace
        those of the data sheet; None takes the data sheet.
    flops_efficiency: share of the data sheet's compute that kernels reach.
    bandwidth_efficiency: share of the data sheet's bandwidth that kernels reach.
    step_overhead: milliseconds per step for launches, scheduling and sampling.
    speculative_acceptance: the shares of guessed tokens that are accepted, by their place, such as
        0.8,0.6,0.4: then each decode verifies as many guesses. They do not rise, as in vLLM's acceptance per
        position: a guess counts where all before it are right.

    The defaults of the last three are assumptions, not measurements. Raises ConfigError.
    """

    gpu: str = "H100"
    replicas: int = 1
    router: str = "round-robin"
    coefficients: str | None = None
    flops_efficiency: float = 0.6
    bandwidth_efficiency: float = 0.8
    step_overhead: float = 1.0
    speculative_acceptance: str | None = None

    def __post_init__(self) -> None:
        known = {name.casefold(): name for name in DATA_SHEETS}
        object.__setattr__(self, "gpu", known.get(str(self.gpu).casefold(), self.gpu))
        if self.gpu not in DATA_SHEETS:
            raise ConfigError(f"gpu must be one of {', '.join(DATA_SHEETS)}; got {self.gpu!r}")
        if self.router not in ROUTERS:
            raise ConfigError(f"router must be one of {', '.join(ROUTERS)}; got {self.router!r}")
        check_int(ConfigError, "replicas", self.replicas, 1)
        for name in ("flops_efficiency", "bandwidth_efficiency"):
            check_number(ConfigError, name, getattr(self, name), 0.0, 1.0, above=True)
        check_number(ConfigError, "step_overhead", self.step_overhead, 0.0)
        if self.speculative_acceptance is not None:
            read_acceptance(self.speculative_acceptance)
        replaced = {"flops_efficiency", "bandwidth_efficiency", "step_overhead"}.intersection(changed(self))
        if self.coefficients is not None and replaced:
            raise ConfigError(
                f"coefficients give the time of a step; {min(replaced)} must be left out with them"
            )

    def step_cost(self, sizes: Sizes) -> StepCost:
        """Return the cost model of a step on one of these GPUs."""
        compute: Coefficients | Roofline
        if self.coefficients is not None:
            compute = Coefficients.read(Path(self.coefficients))
        else:
            compute = self.roofline(sizes)
        return StepCost(compute, sizes.model, DATA_SHEETS[self.gpu], sizes.block_bytes)

    def roofline(self, sizes: Sizes, weight_bytes: float | None = None) -> Roofline:
        """Return the roofline of one of these GPUs. weight_bytes: see `Roofline`."""
        return Roofline(
            sizes.model,
            DATA_SHEETS[self.gpu],
            sizes.kv_bytes_per_token,
            overhead=self.step_overhead / 1e3,
            flops_efficiency=self.flops_efficiency,
            bandwidth_efficiency=self.bandwidth_efficiency,
            weight_bytes=weight_bytes,
        )


def read_acceptance(text: str) -> list[float]:
    """Read shares of accepted tokens by place. Raises ConfigError."""
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError:
        shares = []
    if not shares or any(
        not later <= share <= 1 for share, later in zip(shares, [*shares[1:], 0.0], strict=True)
    ):
        raise ConfigError(
            "speculative_acceptance must be shares from 1 to 0 that do not rise, such as 0.8,0.6,0.4; "
            f"got {shown(text)}"
        )
    return shares


class Fleet:
    """Runs all arriving requests to their end, replica by replica and step by step."""

    def __init__(self, fleet: FleetConfig, engine: EngineConfig, timeline: Timeline | None = None) -> None:
        if not isinstance(engine.scheduling_policy, str):
            raise ConfigError(
                "scheduling_policy must be a name in a simulation, where every replica has its own"
            )
        model = read_model(engine.model, engine.revision)
        sizes = Sizes(engine, model, "cuda", model.dtype, DATA_SHEETS[fleet.gpu].target)
        if sizes.kv_dtype == "float8_e4m3fn" and not DATA_SHEETS[fleet.gpu].has_e4m3:
            asked = f"kv_cache_dtype {engine.kv_cache_dtype!r}"
            raise ConfigError(f"{asked} is not supported on {fleet.gpu}; take 'int8'")
        self.num_blocks = engine.num_blocks or min(
            blocks_that_fit(model, DATA_SHEETS[fleet.gpu], engine.gpu_memory_utilization, sizes.block_bytes),
            sizes.max_useful_blocks,
        )
        cost = fleet.step_cost(sizes)
        shares = read_acceptance(fleet.speculative_acceptance) if fleet.speculative_acceptance else []
        self.replicas = [Replica(sizes, self.num_blocks, cost, shares) for _ in range(fleet.replicas)]
        self._router = new_router(fleet.router, sizes.block_size)
        self._loads = [0] * fleet.replicas  # tokens of each replica's unfinished requests
        self._events: list[Event] = []
        self._num_requests = 0
        self._conversations: dict[str, Arrival] = {}  # unfinished turns with a following one, by request id
        self.statistics = Statistics(self.num_blocks, fleet.replicas, timeline)

    def run(
        self, arrivals: Iterator[Arrival], think_time: float = 0.0, done: Callable[[int], object] = bool
    ) -> Statistics:
        """Serve all arrivals. Return the statistics.

        think_time: seconds from an answer to the next turn of a conversation.
        done: called with the number of requests that are newly done.
        """
        self._expect(arrivals)
        while self._events:
            now, kind, number, arrival = heapq.heappop(self._events)
            if arrival is None:
                replica = self.replicas[number]
                if replica.step is not None:
                    done(self._end_step(number, now, think_time))
                if replica.scheduler.has_unfinished():
                    seconds = replica.begin_step(now)
                    self.statistics.step(replica, now, seconds)
                    heapq.heappush(self._events, (now + seconds, STEP, number, None))
                else:
                    replica.awake = False
                continue
            if kind == ARRIVAL:
                self._expect(arrivals)
            if (refusal := self._admit(arrival)) is not None:
                num_later = len(arrival.following)
                self.statistics.refuse(refusal)
                self.statistics.refuse(Refusal.EARLIER_TURN, num_later)
                done(1 + num_later)
        return self.statistics

    def _expect(self, arrivals: Iterator[Arrival]) -> None:
        arrival = next(arrivals, None)
        if arrival is not None:
            heapq.heappush(self._events, (arrival.time, ARRIVAL, 0, arrival))

    def _admit(self, arrival: Arrival) -> Refusal | None:
        """Give a request to a replica. Return the reason if the replica refuses it."""
        number = self._router.choose(arrival.token_ids, self._loads)
        replica = self.replicas[number]
        request_id = str(self._num_requests)
        self._num_requests += 1
        request = replica.add(request_id, arrival)
        if isinstance(request, Refusal):
            return request
        self._loads[number] += request.num_prompt_tokens
        if arrival.following:
            self._conversations[request_id] = arrival
        if not replica.awake:
            replica.awake = True
            heapq.heappush(self._events, (arrival.time, STEP, number, None))
        return None

    def _end_step(self, number: int, now: float, think_time: float) -> int:
        """End the step of a replica. Return how many requests finished."""
        num_sampled, finished = self.replicas[number].end_step(now)
        self._loads[number] += num_sampled
        for request in finished:
            self._loads[number] -= request.num_tokens
            self.statistics.finish(request)
            arrival = self._conversations.pop(request.request_id, None)
            if arrival is not None:
                turn = arrival.next_turn(request.token_ids, now + think_time)
                heapq.heappush(self._events, (turn.time, NEXT_TURN, int(request.request_id), turn))
        return len(finished)
