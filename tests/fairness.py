"""The policy "fair" over seats and blocks: the real scheduler, up to 500 tenants on 64 seats.

    python -m tests.fairness [WORLDS] [--seed S]    # CI runs the first ones

In each world tenants come and go, flood, or send short requests one after the other. After each step:

- While a tenant below its share waits, which is not ahead in service, none above its share is admitted.
- Such a tenant waits for a seat for at most 2 + 2 N L / (T - S) steps: N tenants, L the longest prompt, T
  tokens a step, S seats. In that many steps all prompts fit that may be before its own. Not counted are steps
  in which the head of the queue waits for blocks that tenants do not hold above their shares.
- Of tenants that wait all the while, none gets more service than another by more than 3 M; see `Fair`.

A tenant alone is computed in the same steps as under "fcfs".
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from itertools import count

from paged.requests.request import Request, RequestStatus
from paged.scheduler.policies import Fair, new_policy
from tests.support.scheduler_cases import BLOCK_SIZE, new_request, new_scheduler

SEATS = 64
LONGEST_PROMPT = 40


class FairWorld:
    """An engine with its tenants; everything depends on the seed.

    longest_wait: of a tenant below its share, in steps; bound: what it may be.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        num_tenants = (2, 3, 10, 64, 65, 200, 500)[seed % 7]
        self.tenants = [f"t{i}" for i in range(num_tenants)]
        weights = {t: rng.choice([0.5, 1.0, 3.0]) for t in self.tenants} if rng.random() < 0.5 else {}
        self.weights = weights
        self.policy = Fair(weights)
        self.budget = rng.choice([SEATS + 40, 512, 8192])
        num_blocks = rng.choice([150, 400, 4000])
        self.scheduler = new_scheduler(num_blocks, SEATS, self.budget, policy=self.policy, watermark=0.0)
        self.kinds = {t: rng.choice(["flood", "flood", "short", "samples"]) for t in self.tenants}
        self.activity = rng.choice([0.02, 0.3])
        self.names = count()
        self.bound = 2 + math.ceil(2 * num_tenants * LONGEST_PROMPT / (self.budget - SEATS))
        self.waits = Counter[str]()
        self.longest_wait = 0
        heaviest = 1 / min(weights.values(), default=1.0)
        capacity = num_blocks * BLOCK_SIZE
        self.most_service = 3 * heaviest * max(Fair.INPUT_COST * LONGEST_PROMPT, Fair.OUTPUT_COST * capacity)
        self.both_since: dict[tuple[str, str], float] = {}  # the lead of one when both began to wait
        self.num_preempted = 0

    def run(self, num_steps: int) -> None:
        """Run steps with arrivals, and check each."""
        for _ in range(num_steps):
            self.arrive()
            self.step()

    def arrive(self) -> None:
        """Let some tenants send requests."""
        num_waiting = Counter(r.inputs.tenant for r in self.scheduler.waiting())
        for tenant in self.tenants:
            if num_waiting[tenant] > 5 or self.rng.random() > self.activity:
                continue
            kind = self.kinds[tenant]
            for _ in range(self.rng.choice([1, 70]) if kind == "flood" else 1):
                prompt_len = self.rng.randint(1, LONGEST_PROMPT)
                max_tokens = self.rng.randint(1, 4) if kind == "short" else self.rng.randint(20, 100)
                self.add(tenant, prompt_len, max_tokens, self.rng.choice([2, 9]) if kind == "samples" else 1)

    def add(self, tenant: str, prompt_len: int, max_tokens: int, num_samples: int) -> None:
        name = str(next(self.names))
        first, *others = [
            new_request(name, prompt_len, max_tokens, tenant=tenant) for _ in range(num_samples)
        ]
        first.siblings = others
        self.scheduler.add(first)

    def step(self) -> None:
        """Run a step."""
        before = {*self.scheduler.running}
        schedule = self.scheduler.schedule()
        self.num_preempted += schedule.num_preempted
        self.check_seats(before, [r for r in self.scheduler.running if r not in before])
        if len(self.tenants) <= 10:
            self.check_service()
        if not schedule.is_empty:
            self.scheduler.update(schedule, [1] * len(schedule.sampled))

    def entitled(self) -> list[str]:
        """Return the waiting tenants below their share whose next request fits it, and who are not ahead."""
        policy = self.policy
        holdings = self.scheduler._running.holdings()
        lowest = min((policy.service[t] for t in policy._queues), default=0.0)
        found = []
        for tenant, queue in policy._queues.items():
            fits = policy._may_begin(next(iter(queue.values())), holdings)
            if fits and policy.service[tenant] <= lowest + LONGEST_PROMPT:
                found.append(tenant)
        return found

    def check_seats(self, before: set[Request], admitted: list[Request]) -> None:
        """Check that tenants below their share are preferred, and how long they wait."""
        running = self.scheduler._running
        running.count_anew()
        holdings = running.holdings()
        policy = self.policy
        waiting = self.entitled()
        above = {t for t in holdings.seats if policy.is_above(t, holdings, of_seats=True)}
        if waiting:
            known = {r.request_id for r in before}  # samples join the first one, which has their seats
            new = {r.inputs.tenant for r in admitted if not r.protected and r.request_id not in known}
            assert not above & new & {r.inputs.tenant for r in before}, "one above its share was preferred"
        got = {r.inputs.tenant for r in admitted}
        waits = self.waits
        self.waits = Counter[str]()
        if not above or self.is_blocked():
            return
        for tenant in waiting:
            if tenant not in got:
                self.waits[tenant] = waits[tenant] + 1
                self.longest_wait = max(self.longest_wait, self.waits[tenant])
                assert self.waits[tenant] <= self.bound, f"{tenant} waits for more than {self.bound} steps"

    def is_blocked(self) -> bool:
        """Return whether the head waits for blocks that tenants do not hold above their shares.

        Those are of one request each, or of requests that are protected, or running requests need them now.
        """
        scheduler = self.scheduler
        running = scheduler._running
        if any(r.protected for r in (*running.requests, *scheduler.waiting())):
            return True
        head = self.policy.peek()
        if head is None:
            return False
        holdings = running.holdings()
        oldest = {r.inputs.tenant: r for r in reversed(running.requests)}
        spare = scheduler.block_manager.pool.num_available - len(running.requests)  # each may grow by one
        for request in running.requests:
            tenant = request.inputs.tenant
            if request is not oldest[tenant] and self.policy.is_above(tenant, holdings, of_seats=False):
                spare += request.blocks.num_blocks
        return scheduler._queue.need(head).num_blocks > spare

    def check_service(self) -> None:
        """Check the service of each two tenants that both wait."""
        service = self.policy.service
        waiting = sorted(self.policy._queues)
        pairs = {(a, b) for i, a in enumerate(waiting) for b in waiting[i + 1 :]}
        self.both_since = {pair: lead for pair, lead in self.both_since.items() if pair in pairs}
        for a, b in pairs:
            lead = service[a] - service[b]
            since = self.both_since.setdefault((a, b), lead)
            assert abs(lead - since) <= self.most_service, f"{a} and {b} are {lead - since} apart"


def steps_alone(policy: str, seed: int) -> int:
    """Return in how many steps the requests of a tenant that is alone are computed."""
    rng = random.Random(seed)
    scheduler = new_scheduler(
        rng.choice([60, 300]), SEATS, rng.choice([128, 2048]), policy=new_policy(policy, lambda _: 0)
    )
    requests = [new_request(str(i), rng.randint(1, 60), rng.randint(1, 60), tenant="one") for i in range(200)]
    num_steps = 0
    while scheduler.has_unfinished() or requests:
        for _ in range(min(len(requests), rng.choice([0, 0, 3, 90]))):
            scheduler.add(requests.pop())
        schedule = scheduler.schedule()
        if not schedule.is_empty:
            scheduler.update(schedule, [1] * len(schedule.sampled))
        num_steps += 1
    return num_steps


def run_world(seed: int, num_steps: int = 150) -> FairWorld:
    """Run a world; an error names its seed."""
    world = FairWorld(seed)
    try:
        world.run(num_steps)
    except Exception as error:
        raise AssertionError(f"world {seed} (python -m tests.fairness 1 --seed {seed}): {error!r}") from error
    assert all(r.status is RequestStatus.RUNNING for r in world.scheduler.running)
    return world


def main() -> None:
    """Run worlds, and print how long tenants below their share waited."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("worlds", type=int, nargs="?", default=210)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for seed in range(args.seed, args.seed + args.worlds):
        world = run_world(seed)
        alone = steps_alone("fcfs", seed) / steps_alone("fair", seed)
        assert alone >= 0.99, alone
        print(
            f"world {seed}: {len(world.tenants)} tenants, {world.budget} tokens a step: waited "
            f"{world.longest_wait} of {world.bound} steps at most; {world.num_preempted} preemptions; "
            f"alone {alone:.3f} of the throughput of fcfs",
            flush=True,
        )


if __name__ == "__main__":
    main()
