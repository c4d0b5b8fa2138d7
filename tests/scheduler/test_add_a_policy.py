"""docs/add-a-policy.md: its example runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from paged.scheduler.policies import Policy
from tests.support.scheduler_cases import added, finish, new_request, new_scheduler

PAGE = Path(__file__).parents[2] / "docs" / "add-a-policy.md"


@pytest.fixture
def policy() -> Policy:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    namespace: dict[str, Any] = {"__name__": "add_a_policy"}
    exec(compile(code, str(PAGE), "exec"), namespace)
    policy: Policy = namespace["ShortestPromptFirst"]()
    return policy


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
