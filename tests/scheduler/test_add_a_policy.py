"""docs/add-a-policy.md: its example runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from paged import ConfigError, EngineConfig, SamplingParams
from paged.scheduler.policy import FirstComeFirstServed, Policy
from paged.simulate.fleet import Fleet, FleetConfig
from tests.support.scheduler_cases import added, finish, new_request, new_scheduler

PAGE = Path(__file__).parents[2] / "docs" / "add-a-policy.md"


@pytest.fixture
def policy() -> Policy:
    policy: Policy = run_page()["ShortestPromptFirst"]()
    return policy


def run_page(num_examples: int = 1) -> dict[str, Any]:
    """Run the first examples of the page. Return the names that they define."""
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[:num_examples]
    namespace: dict[str, Any] = {"__name__": "add_a_policy"}
    exec(compile("".join(code), str(PAGE), "exec"), namespace)
    return namespace


def test_short_prompts_run_first(policy):
    scheduler = new_scheduler(max_num_seqs=1, policy=policy)
    added(scheduler, *(new_request(name, size, 1) for name, size in [("a", 9), ("b", 3), ("c", 9), ("d", 1)]))
    assert finish(scheduler) == [{"d": 1}, {"b": 3}, {"a": 9}, {"c": 9}]


def test_a_waiting_request_may_be_aborted(policy):
    scheduler = new_scheduler(max_num_seqs=1, policy=policy)
    _, middle, _ = added(scheduler, *(new_request(str(size), size, 1) for size in (1, 2, 3)))
    scheduler.abort(middle)
    assert finish(scheduler) == [{"1": 1}, {"3": 3}]


def test_the_longest_prompt_is_preempted_and_finishes_later(policy):
    scheduler = new_scheduler(num_blocks=4, policy=policy)
    long, short = added(scheduler, new_request("long", 14, 8), new_request("short", 6, 20))
    finish(scheduler)
    assert long.metrics.num_preemptions > 0
    assert short.metrics.num_preemptions == 0


def test_an_engine_takes_it():
    names = run_page(num_examples=2)
    engine, policy = names["engine"], names["engine"].scheduler.policy
    assert type(policy) is names["ShortestPromptFirst"]
    for name, prompt in (("long", "def f(x):\n    return x"), ("short", "a")):
        engine.add_request(name, prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    assert policy.peek().request_id == "short"
    # Requests of a policy of one's own may have priorities, which it alone knows the use of.
    engine.add_request("first", "a", SamplingParams(max_tokens=1, priority=3))
    with pytest.raises(ConfigError, match="a new Policy without requests"):
        EngineConfig("demo", scheduling_policy=policy)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "must be one of fcfs, .* or a Policy, got 3, which has no 'preempts'"),
        (FirstComeFirstServed, "a new Policy without requests, got <class"),
        ("sjf", "must be one of fcfs"),
    ],
    ids=["number", "class", "unknown"],
)
def test_what_is_no_policy_is_refused(value, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig("demo", scheduling_policy=value)


def test_a_fleet_takes_names_alone(policy):
    with pytest.raises(ConfigError, match="must be a name in a simulation"):
        Fleet(FleetConfig(), EngineConfig("demo", scheduling_policy=policy))
