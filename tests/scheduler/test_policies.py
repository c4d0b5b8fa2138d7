"""Each policy's order and its bounds, which keep any request from waiting for ever."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from dataclasses import replace

import pytest

from paged.base.errors import ConfigError
from paged.blocks.manager import BlockManager
from paged.requests.request import Request, RequestInputs, RequestStatus
from paged.scheduler.policies import POLICIES, Fair, LongestPrefixMatch, Priority, new_policy
from paged.scheduler.policy import Policy
from paged.scheduler.scheduler import Scheduler

ARRIVALS = itertools.count()


def new_request(name: str, prompt_len: int = 4, tenant: str = "", priority: float = 0.0) -> Request:
    prompt = [sum(name.encode()) + i for i in range(prompt_len)]
    inputs = RequestInputs(
        request_id=name,
        prompt_token_ids=prompt,
        max_total_tokens=prompt_len + 8,
        tenant=tenant,
        priority=priority,
    )
    return Request(inputs)


def queued(policy: Policy, *requests: Request) -> list[Request]:
    """Let requests arrive, one after the other."""
    for request in requests:
        request.arrival = next(ARRIVALS)
        request.rank = policy.rank(request)
        policy.push(request)
    return list(requests)


def popped(policy: Policy) -> str | None:
    head = policy.peek()
    if head is None:
        return None
    policy.pop(head)
    return head.request_id


def order(policy: Policy) -> str:
    """Pop all waiting requests, and return their names in order."""
    return "".join(iter(lambda: popped(policy), None))


def again(policy: Policy, request: Request) -> None:
    """Queue a request that ran before."""
    request.num_cached_tokens = 0
    policy.push(request)


def gone(policy: Policy, request: Request) -> None:
    policy.remove(request)
    request.status = RequestStatus.FINISHED


@pytest.mark.parametrize("name", POLICIES)
def test_equals_run_in_order_of_arrival_and_preempted_requests_before_later_ones(name):
    policy = new_policy(name, lambda _: 0)
    a, b, c, d = queued(policy, *(new_request(n) for n in "abcd"))
    assert (popped(policy), popped(policy)) == ("a", "b")
    again(policy, b)
    assert [r.request_id for r in policy] == ["b", "c", "d"]
    gone(policy, c)
    assert len(policy) == 2
    assert [r.request_id for r in policy] == ["b", "d"]
    assert order(policy) == "bd"
    assert len(policy) == 0
    assert policy.peek() is None
    assert a.rank < b.rank < d.rank


@pytest.mark.parametrize("name", POLICIES)
def test_aborts_may_empty_a_queue(name):
    policy = new_policy(name, lambda _: 0)
    a, b = queued(policy, new_request("a"), new_request("b"))
    gone(policy, a)
    gone(policy, b)
    assert (len(policy), [*policy], policy.peek()) == (0, [], None)
    queued(policy, new_request("c"))
    assert order(policy) == "c"


class Watched(Request):
    """A request with weak references, which show when it is deleted."""


@pytest.mark.parametrize("name", POLICIES)
def test_aborted_requests_behind_a_waiting_head_are_not_kept(name):
    policy = new_policy(name, lambda _: 0)
    queued(policy, new_request("a", tenant="one"), new_request("b", tenant="two"))
    watched = []
    for i in range(100):
        request = Watched(new_request(str(i), tenant="two").inputs)
        queued(policy, request)
        gone(policy, request)
        watched.append(weakref.ref(request))
        del request
    assert sum(ref() is not None for ref in watched) <= 3
    assert (len(policy), order(policy)) == (2, "ab")


def test_lower_priority_number_goes_first():
    policy = Priority()
    queued(policy, *(new_request(n, priority=p) for n, p in [("a", 2), ("b", 0), ("c", 2), ("d", -1.5)]))
    assert order(policy) == "dbac"


# Longest prefix match


def test_longest_match_within_the_window_goes_first():
    cached = {"b": 8, "c": 16, "d": 8}
    policy = LongestPrefixMatch(lambda request: cached.get(request.request_id, 0))
    queued(policy, *(new_request(n) for n in "abcd"))
    assert order(policy) == "cbda"
    queued(policy, *(new_request("a") for _ in range(policy.WINDOW)), new_request("c"))
    assert popped(policy) == "a"  # c is too young to be looked at
    assert popped(policy) == "c"


def test_the_oldest_is_overtaken_max_overtakes_times():
    policy = LongestPrefixMatch(lambda request: request.request_id == "lucky")
    queued(policy, new_request("first"), new_request("second"))
    for _ in range(2):
        oldest = next(iter(policy)).request_id
        queued(policy, new_request("lucky"), new_request("lucky"))
        overtakes = 0
        while popped(policy) != oldest:
            overtakes += 1
            assert overtakes <= policy.MAX_OVERTAKES
            queued(policy, new_request("lucky"))
        assert overtakes == policy.MAX_OVERTAKES
        for request in [r for r in policy if r.request_id == "lucky"]:
            gone(policy, request)


@pytest.mark.parametrize("end", ["runs", "is aborted"])
def test_a_request_that_ran_before_does_not_reset_the_count_of_overtakes(end):
    policy = LongestPrefixMatch(lambda request: request.request_id == "lucky")
    (before,) = queued(policy, new_request("before"))
    assert popped(policy) == "before"
    queued(policy, new_request("oldest"), new_request("lucky"))
    for i in range(policy.MAX_OVERTAKES):
        if i == 100:
            again(policy, before)  # to the front
            policy.pop(before) if end == "runs" else gone(policy, before)
        assert popped(policy) == "lucky"
        queued(policy, new_request("lucky"))
    assert popped(policy) == "oldest"


# Fair


def served(policy: Fair, request: Request, num_tokens: int) -> None:
    for _ in range(num_tokens):
        policy.generated([request])


def test_tenant_with_the_least_service_goes_first_in_its_own_order():
    policy = Fair()
    a, *_ = queued(policy, *(new_request(n, 10, tenant="one") for n in "abc"))
    queued(policy, *(new_request(n, 4, tenant="two") for n in "xyz"))
    assert popped(policy) == "a"  # one: 10
    assert popped(policy) + popped(policy) == "xy"  # two: 8
    served(policy, a, 1)  # one: 12
    assert popped(policy) == "z"  # two: 12, and gone
    assert order(policy) == "bc"
    assert policy.service == {"one": 32.0, "two": 12.0}


def test_weights_count_and_a_preempted_request_is_charged_once():
    policy = Fair({"heavy": 4.0})
    (request,) = queued(policy, new_request("a", 12, tenant="heavy"))
    popped(policy)
    assert policy.service["heavy"] == 3.0
    again(policy, request)
    popped(policy)
    served(policy, request, 2)
    assert policy.service["heavy"] == 4.0


def test_a_resumed_prompt_is_charged_once():
    """The engine that had the request before has charged its tenant; the tokens are new."""
    policy = Fair()
    request = new_request("a", 12, tenant="one")
    request.inputs = replace(request.inputs, is_resumed=True)
    queued(policy, request)
    popped(policy)
    served(policy, request, 2)
    assert policy.service["one"] == 4.0


def test_time_away_earns_no_credit():
    policy = Fair()
    queued(policy, *(new_request("a", 10, tenant="old") for _ in range(20)))
    for _ in range(10):
        popped(policy)
    queued(policy, *(new_request("b", 10, tenant="new") for _ in range(5)))
    assert policy.service["new"] == policy.service["old"] == 100.0
    assert Counter(popped(policy) for _ in range(6)) == {"a": 3, "b": 3}
    order(policy)
    queued(
        policy, new_request("c", 10, tenant="late")
    )  # the queue is empty: level with the tenant that left last
    assert policy.service["late"] == policy.service["old"]


def test_tenant_that_comes_and_goes_leaves_nothing_behind():
    policy = Fair()
    for _ in range(100):
        queued(policy, new_request("a", 10, tenant="one"), new_request("b", 10, tenant="two"))
        assert popped(policy) + popped(policy) in ("ab", "ba")
    assert len(policy._heap) <= 2


def test_tenant_whose_fork_never_waited_is_charged():
    policy = Fair()
    queued(policy, *(new_request("a", 10, tenant="other") for _ in range(2)))
    popped(policy)
    served(policy, new_request("fork", tenant="unseen"), 3)
    assert policy.service["unseen"] == 10.0 + 6.0


@pytest.mark.parametrize("end", ["run", "are aborted"])
def test_tenants_that_would_come_back_at_the_floor_are_forgotten(end):
    policy = Fair()
    ahead, _ = queued(policy, new_request("a", 1000, tenant="ahead"), new_request("b", 1, tenant="behind"))
    assert popped(policy) == "a"
    if end == "run":
        assert popped(policy) == "b"
    for i in range(500):
        (request,) = queued(policy, new_request("visitor", 1, tenant=str(i)))
        popped(policy) if end == "run" else gone(policy, request)
        assert max(len(policy.service), len(policy._heap)) < 140
    assert policy.service["ahead"] == 1000.0
    served(policy, ahead, 1)
    assert policy.service["ahead"] == 1002.0


def test_of_tenants_with_equal_service_the_first_to_arrive_goes_first():
    policy = Fair()
    queued(policy, new_request("last by name", tenant="z"), new_request("visitor", tenant="a"))
    assert popped(policy) == "last by name"
    queued(policy, new_request("last by name", tenant="z"))
    assert popped(policy) == "visitor"
    for name in "bcd":
        queued(policy, new_request("visitor", tenant=name))
    assert popped(policy) == "last by name"


def test_arrival_reads_the_counters_of_few_waiting_tenants():
    class Counters(dict[str, float]):
        num_read = 0

        def __getitem__(self, tenant: str) -> float:
            self.num_read += 1
            return super().__getitem__(tenant)

    policy = Fair()
    queued(policy, *(new_request("a", tenant=str(i)) for i in range(1000)))
    policy.service = counters = Counters(policy.service)
    queued(policy, new_request("b", tenant="late"))
    assert counters.num_read < 10


@pytest.mark.parametrize("visitors", [False, True], ids=["alone", "among visitors"])
@pytest.mark.parametrize("weights", [{}, {"long": 3.0}], ids=["equal", "three-to-one"])
def test_service_of_backlogged_tenants_differs_by_no_more_than_the_bound(weights, visitors):
    """Theorem 4.4 of Sheng et al.: |W_i - W_j| <= 2 max(w_p L_input, w_q M), here over weights."""
    num_blocks, block_size, longest = 24, 8, 60
    policy = Fair(weights)
    manager = BlockManager(num_blocks, block_size)
    scheduler = Scheduler(manager, max_num_seqs=8, max_num_batched_tokens=64, policy=policy)
    lengths = {"long": longest, "short": 6}
    service: Counter[str] = Counter()
    charged: set[str] = set()
    bound = 2 * max(policy.INPUT_COST * longest, policy.OUTPUT_COST * num_blocks * block_size)
    numbers = itertools.count()
    for step in range(3000):
        waiting = Counter(request.inputs.tenant for request in scheduler.waiting())
        for tenant, length in lengths.items():
            for _ in range(9 - waiting[tenant]):
                scheduler.add(new_request(f"{tenant}{next(numbers)}", length, tenant))
        if visitors and step % 4 == 0:
            scheduler.add(new_request(f"visitor{step}", 6, f"visitor{step % 1200}"))
        schedule = scheduler.schedule()
        for request in scheduler.running:
            if request.request_id not in charged:
                charged.add(request.request_id)
                tenant = request.inputs.tenant
                service[tenant] += request.num_prompt_tokens / weights.get(tenant, 1.0)
        for request in schedule.sampled_requests:
            tenant = request.inputs.tenant
            service[tenant] += 2.0 / weights.get(tenant, 1.0)
        scheduler.update(schedule, [1] * len(schedule.sampled))
        assert abs(service["long"] - service["short"]) <= bound
    assert min(service[tenant] for tenant in lengths) > 20 * bound
    assert {t: service[t] for t in lengths} == pytest.approx({t: policy.service[t] for t in lengths})


def test_weights_that_change_while_requests_run_divide_the_tokens():
    """Under overload, tenants of weights 3 and 1 get tokens 3:1, from the change of their weights on."""
    policy = Fair({"a": 1.0, "b": 3.0})
    scheduler = Scheduler(BlockManager(64, 8), max_num_seqs=8, max_num_batched_tokens=64, policy=policy)
    names = map(str, itertools.count())
    tokens: Counter[str] = Counter()
    for step in range(6000):
        if step == 1000:
            policy.set_weights({"a": 3.0})
            tokens.clear()
        waiting = Counter(request.inputs.tenant for request in scheduler.waiting())
        for tenant in "ab":
            for _ in range(9 - waiting[tenant]):
                scheduler.add(new_request(next(names), 6, tenant))
        schedule = scheduler.schedule()
        tokens.update(request.inputs.tenant for request in schedule.sampled_requests)
        scheduler.update(schedule, [1] * len(schedule.sampled))
    assert tokens["a"] / tokens["b"] == pytest.approx(3, rel=0.05)


# By name


def test_policy_by_name_and_wrong_names_and_weights():
    assert [type(new_policy(name, len)).__name__ for name in POLICIES] == [
        "FirstComeFirstServed",
        "Priority",
        "LongestPrefixMatch",
        "Fair",
    ]
    with pytest.raises(ConfigError, match=r"policy must be one of fcfs, priority.*; got 'lifo'"):
        new_policy("lifo", len)
    with pytest.raises(ConfigError, match=r"tenant_weights go with .*'fair', got .*'fcfs'"):
        new_policy("fcfs", len, {"a": 1.0})
    for weight in (0, -1.0, True, float("inf"), "2"):
        with pytest.raises(ConfigError, match=r"tenant_weights\['a'\] must be"):
            new_policy("fair", len, {"a": weight})


@pytest.mark.parametrize("name", POLICIES)
def test_scheduler_uses_the_policy_it_is_given(name):
    """An empty policy has length 0 and is false; it must not be replaced by the default."""
    policy = new_policy(name, lambda _: 0)
    assert (
        Scheduler(BlockManager(1, 1), max_num_seqs=1, max_num_batched_tokens=1, policy=policy).policy
        is policy
    )
