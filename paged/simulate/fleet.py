"""Fleet: an event loop over replicas behind a router, on one virtual clock."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ..base.errors import ConfigError, ResourceError
from ..base.validation import changed, check_int, check_number, shown
from ..blocks.pool import bytes_of_pool
from ..device.host_memory import free_on_cpu
from ..options.config import EngineConfig
from ..requests.request import Request
from ..runner.sizes import GIB, Sizes
from ..server.router import ROUTERS, choose_among, new_router
from .cost import DATA_SHEETS, Coefficients, Portion, Roofline, blocks_that_fit
from .model import read_model
from .pipeline import Pipeline, RankLink, StageCost, rank_sizes, with_seats
from .replica import Refusal, Replica
from .statistics import Statistics
from .timeline import Timeline
from .workload import Arrival

# Order of events at the same time: steps begin after all arrivals.
ARRIVAL, NEXT_TURN, DEATH, RESTART, STEP = range(5)
_MOST_VAIN_DEATHS = 1000  # of replicas with requests, one after another, without a token


class Event(NamedTuple):
    """A future event. Events are ordered by time, then by the other fields.

    number: the number of the request (NEXT_TURN) or replica (DEATH, RESTART, STEP).
    life: how many times the replica had died. A step that began before a death is lost.
    arrival: the arrival, for ARRIVAL and NEXT_TURN.
    """

    time: float
    kind: int
    number: int = 0
    life: int = 0
    arrival: Arrival | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """The hardware of a fleet, its router, and the assumptions of the cost model.

    gpu: name of a GPU, in upper or lower case; its data sheet gives compute, bandwidth, memory and link to
        the host.
    replicas: number of engines, each with as many GPUs as it has ranks.
    slice: for fleets of hundreds: simulate only this many replicas, with their share of the rate, and scale
        the throughput up. None simulates all.
    router: "round-robin"; "least-loaded", the replica with the fewest tokens of unfinished requests, where
        requests without an output count four times; "prefix-aware", the replica that was sent most of the
        prompt before, unless its load is too high.
    coefficients: a JSON file with measured seconds step_s, token_s, seq_s, context_s and pair_s, to use
        instead of the data sheet; None takes the data sheet.
    flops_efficiency: share of the data sheet's compute that kernels reach.
    bandwidth_efficiency: share of the data sheet's bandwidth that kernels reach.
    step_overhead: milliseconds per step for launches, scheduling and sampling.
    speculative_acceptance: the share of guesses that are accepted at each position, such as 0.8,0.6,0.4. Each
        decode then verifies that many guesses. The shares must not rise, because a guess is accepted only if
        all guesses before it are (vLLM's acceptance per position).
    link: the link between the ranks of a replica: nvlink, pcie, 100gbe, 10gbe, or GB/s and microseconds such
        as 12.5,200. None takes nvlink if the GPU has it, else pcie.
    mtbf: mean seconds until a replica dies at random; its requests then move to other replicas. None lets
        none die.
    restart_s: seconds from a replica's death until it serves again, with an empty cache.

    The defaults of efficiencies and step_overhead are assumptions, not measurements. Raises ConfigError.
    """

    gpu: str = "H100"
    replicas: int = 1
    slice: int | None = None
    router: str = "round-robin"
    coefficients: str | None = None
    flops_efficiency: float = 0.6
    bandwidth_efficiency: float = 0.8
    step_overhead: float = 1.0
    speculative_acceptance: str | None = None
    link: str | None = None
    mtbf: float | None = None
    restart_s: float = 60.0

    def __post_init__(self) -> None:
        known = {name.casefold(): name for name in DATA_SHEETS}
        object.__setattr__(self, "gpu", known.get(str(self.gpu).casefold(), self.gpu))
        if self.gpu not in DATA_SHEETS:
            raise ConfigError(f"gpu must be one of {', '.join(DATA_SHEETS)}; got {self.gpu!r}")
        if self.router not in ROUTERS:
            raise ConfigError(f"router must be one of {', '.join(ROUTERS)}; got {self.router!r}")
        check_int(ConfigError, "replicas", self.replicas, 1)
        if self.slice is not None:
            check_int(ConfigError, "slice", self.slice, 1, self.replicas)
        RankLink.of(self.link, self.gpu)
        check_number(ConfigError, "restart_s", self.restart_s, 0.0)
        if self.mtbf is not None:
            check_number(ConfigError, "mtbf", self.mtbf, 0.0, above=True)
        elif "restart_s" in changed(self):
            raise ConfigError("restart_s needs mtbf, after which replicas die; leave it out, or give that")
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

    @property
    def num_simulated(self) -> int:
        """The number of replicas that are simulated."""
        return self.slice or self.replicas

    def stages(self, sizes: Sequence[Sizes]) -> list[StageCost]:
        """Return the stages of a replica on these GPUs.

        sizes: for each stage, the sizes of one of its ranks.
        """
        coefficients = None if self.coefficients is None else Coefficients.read(Path(self.coefficients))
        link = RankLink.of(self.link, self.gpu)
        stages = []
        for each in sizes:
            compute: Coefficients | Roofline
            if coefficients is None:
                compute = self.roofline(each)
            else:  # measured of one process: each rank takes its share of the weights
                whole = Portion.of(each.model).num_step_params
                share = Portion.of(each.model, each.part).num_step_params / whole
                compute = coefficients.divided(share)
            stages.append(StageCost.of(compute, each, DATA_SHEETS[self.gpu], link))
        return stages

    def roofline(self, sizes: Sizes, weight_bytes: float | None = None) -> Roofline:
        """Return the roofline of one of these GPUs.

        weight_bytes: see `Roofline`.
        """
        return Roofline(
            Portion.of(sizes.model, sizes.part),
            DATA_SHEETS[self.gpu],
            sizes.kv_bytes_per_token,
            overhead=self.step_overhead / 1e3,
            flops_efficiency=self.flops_efficiency,
            bandwidth_efficiency=self.bandwidth_efficiency,
            weight_bytes=weight_bytes,
        )


def read_acceptance(text: str) -> list[float]:
    """Read the shares of accepted guesses by position. Raises ConfigError."""
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
    """Runs all arriving requests to their end, replica by replica and step by step.

    seed: seed of the times at which replicas die.
    """

    def __init__(
        self, fleet: FleetConfig, engine: EngineConfig, timeline: Timeline | None = None, seed: int = 0
    ) -> None:
        if not isinstance(engine.scheduling_policy, str):
            raise ConfigError(
                "scheduling_policy must be a name in a simulation, where every replica has its own"
            )
        if fleet.link is not None and engine.num_ranks == 1:
            raise ConfigError(
                f"link {fleet.link!r} needs several ranks: give tensor_parallel_size or "
                "pipeline_parallel_size, or leave it out"
            )
        model = read_model(engine.model, engine.revision)
        sheet = DATA_SHEETS[fleet.gpu]
        ranks = with_seats(rank_sizes(engine, model, sheet.target), sheet)
        self._sizes = ranks[-1]  # the driver's
        if self._sizes.kv_dtype == "float8_e4m3fn" and not sheet.has_e4m3:
            asked = f"kv_cache_dtype {engine.kv_cache_dtype!r}"
            raise ConfigError(f"{asked} is not supported on {fleet.gpu}; take 'int8'")
        self.num_blocks = engine.num_blocks or min(
            self._sizes.max_useful_blocks,
            *(
                blocks_that_fit(
                    Portion.of(model, each.part),
                    sheet,
                    engine.gpu_memory_utilization,
                    each.block_bytes,
                    each.all_state_bytes,
                )
                for each in ranks
            ),
        )
        self._num_host_blocks = min(each.num_host_blocks for each in ranks)
        self._config = fleet
        self._engine = engine
        self._host_s: float | None = None
        if engine.async_scheduling:
            if fleet.coefficients is not None:
                raise ConfigError(
                    "coefficients do not tell the host's part of a step, which async_scheduling hides; "
                    "leave one of both out"
                )
            self._host_s = fleet.step_overhead / 1e3
            fleet = replace(fleet, step_overhead=0.0)  # no part of the device's time
        self._stages = fleet.stages(ranks)
        self._acceptance = (
            read_acceptance(fleet.speculative_acceptance) if fleet.speculative_acceptance else []
        )
        self._check_memory()
        self._rng = random.Random(seed)
        self.replicas = [self._new_replica() for _ in range(fleet.num_simulated)]
        self._lives = [0] * fleet.num_simulated
        self._router = new_router(fleet.router, self._sizes.block_size)
        self._dead: set[int] = set()
        self._events: list[Event] = []
        self._num_causes = 0  # events that are no deaths and restarts, which alone never end
        self._waiting: list[Request | Arrival] = []  # while all replicas are dead
        self._num_vain_deaths = 0
        self._num_requests = 0
        self._conversations: dict[str, Arrival] = {}  # unfinished turns with a following one, by request id
        self.statistics = Statistics(self.num_blocks, fleet.replicas, fleet.num_simulated, timeline)
        for number in range(fleet.num_simulated):
            self._expect_death(number, 0.0)

    def _check_memory(self) -> None:
        """Raise ResourceError if the block managers of all replicas take more memory than is free."""
        pools = (self.num_blocks, self._sizes.block_size), (self._num_host_blocks, 0)
        num_replicas = self._config.num_simulated
        needed = num_replicas * sum(bytes_of_pool(*pool) for pool in pools)
        if needed > (free := free_on_cpu()):
            raise ResourceError(
                f"{num_replicas:,} x {self.num_blocks:,} blocks take {needed / GIB:,.1f} GiB to simulate, "
                f"and {free / GIB:.1f} GiB are free here; let a slice of the replicas stand for all, such as "
                "64, or give fewer num_blocks or a smaller swap_space"
            )

    def _new_replica(self) -> Replica:
        link = RankLink.of(self._config.link, self._config.gpu)
        pipeline = Pipeline(self._stages, link, self._engine.num_ranks, self._host_s)
        return Replica(self._sizes, self.num_blocks, self._num_host_blocks, pipeline, self._acceptance)

    def run(
        self, arrivals: Iterator[Arrival], think_time: float = 0.0, done: Callable[[int], object] = bool
    ) -> Statistics:
        """Serve all arrivals. Return the statistics.

        think_time: seconds from an answer to the next turn of a conversation.
        done: called with the number of requests that have finished since the last call.
        """
        self._expect(arrivals)
        while self._num_causes or self._waiting:
            event = heapq.heappop(self._events)
            if event.kind == DEATH:
                self._die(event.number, event.time)
                continue
            if event.kind == RESTART:
                done(self._restart(event.number, event.time))
                continue
            self._num_causes -= 1
            if event.kind == STEP:
                if event.life == self._lives[event.number]:
                    done(self._turn(event.number, event.time, think_time))
                continue
            if event.kind == ARRIVAL:
                self._expect(arrivals)
            assert event.arrival is not None, "an arrival of nothing"
            done(self._admit(event.arrival, event.time))
        return self.statistics

    def _push(self, event: Event) -> None:
        self._num_causes += event.kind not in (DEATH, RESTART)
        heapq.heappush(self._events, event)

    def _expect(self, arrivals: Iterator[Arrival]) -> None:
        arrival = next(arrivals, None)
        if arrival is not None:
            self._push(Event(arrival.time, ARRIVAL, arrival=arrival))

    def _admit(self, arrival: Arrival, now: float) -> int:
        """Give a request to a replica, or refuse it. Return how many requests are done with that."""
        refusal = self._refusal(arrival, now)
        if refusal is None:
            return 0
        num_later = len(arrival.following)
        self.statistics.refuse(refusal)
        self.statistics.refuse(Refusal.EARLIER_TURN, num_later)
        return 1 + num_later

    def _refusal(self, arrival: Arrival, now: float) -> Refusal | None:
        """Give a request to a replica. Return the reason if that refuses it."""
        number = self._choose(arrival.token_ids)
        if number is None:
            most = self._engine.max_waiting
            if most is not None and len(self._waiting) >= most:
                return Refusal.QUEUE_FULL
            self._waiting.append(arrival)
            return None
        request_id = str(self._num_requests)
        self._num_requests += 1
        request = self.replicas[number].add(request_id, arrival)
        if isinstance(request, Refusal):
            return request
        if arrival.following:
            self._conversations[request_id] = arrival
        self._wake(number, now)
        return None

    def _choose(self, token_ids: Sequence[int]) -> int | None:
        """Return the number of a replica; None while all are dead."""
        if len(self._dead) == len(self.replicas):
            return None
        loads = [None if i in self._dead else each.load for i, each in enumerate(self.replicas)]
        return choose_among(self._router, token_ids, loads)

    def _wake(self, number: int, now: float) -> None:
        """Have a replica that has got a request begin a step unless one is in flight."""
        assert number not in self._dead, "a dead replica has got a request"
        if not self.replicas[number].awake:
            self.replicas[number].awake = True
            self._push(Event(now, STEP, number, self._lives[number]))

    def _turn(self, number: int, now: float, think_time: float) -> int:
        """End the oldest step of a replica, and begin others. Return how many requests finished."""
        replica = self.replicas[number]
        num_finished = self._end_step(number, now, think_time) if replica.in_flight else 0
        while replica.begin_step(now) is not None:
            self.statistics.step(replica, now)
        replica.awake = bool(replica.in_flight)
        if replica.awake:
            self._push(Event(replica.in_flight[0].end, STEP, number, self._lives[number]))
        return num_finished

    def _end_step(self, number: int, now: float, think_time: float) -> int:
        """End the step of a replica. Return how many requests finished."""
        num_sampled, finished = self.replicas[number].end_step(now)
        if num_sampled:
            self._num_vain_deaths = 0
        for request in finished:
            self.statistics.finish(request)
            arrival = self._conversations.pop(request.request_id, None)
            if arrival is not None:
                turn = arrival.next_turn(request.token_ids, now + think_time)
                self._push(Event(turn.time, NEXT_TURN, int(request.request_id), arrival=turn))
        return len(finished)

    # Deaths

    def _expect_death(self, number: int, now: float) -> None:
        if self._config.mtbf is not None:
            self._push(Event(now + self._rng.expovariate(1 / self._config.mtbf), DEATH, number))

    def _die(self, number: int, now: float) -> None:
        """Put a new replica in the place of one, and move its requests to the others."""
        requests = self.replicas[number].unfinished()
        self._num_vain_deaths += bool(requests)
        if self._num_vain_deaths > _MOST_VAIN_DEATHS:
            raise ConfigError(
                f"mtbf {self._config.mtbf:g}: {_MOST_VAIN_DEATHS:,} replicas died, one after another, before "
                "any request got a token; give a longer one"
            )
        self.statistics.die(requests)
        self.replicas[number] = self._new_replica()
        self._lives[number] += 1
        self._dead.add(number)
        self._router.forget(number)
        self._push(Event(now + self._config.restart_s, RESTART, number))
        for request in requests:
            self._move(request, now)

    def _move(self, request: Request, now: float) -> None:
        """Have another replica go on with a request, or let it wait for one."""
        number = self._choose(request.token_ids)
        if number is None:
            self._waiting.append(request)
        else:
            self.replicas[number].take_over(request)
            self._wake(number, now)

    def _restart(self, number: int, now: float) -> int:
        """Let a replica serve again. Return how many waiting requests it refuses."""
        self._dead.discard(number)
        self._expect_death(number, now)
        waiting = self._waiting
        self._waiting = []
        num_refused = 0
        for each in waiting:
            if isinstance(each, Request):
                self._move(each, now)
            else:
                num_refused += self._admit(each, now)
        return num_refused
