"""Drafts are as many as make tokens come fastest, and lose little, in worlds with a made-up clock."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import pytest

from paged.drafting.acceptance import Acceptance
from paged.drafting.drafter import CERTAIN, Draft
from paged.drafting.lengths import ALLOWANCE, DraftLengths
from paged.drafting.step_times import SIZES

MOST = 8
Seconds = Callable[[int, int], float]  # of a step, by its requests and rows


def staircase(num_requests: int, rows: int) -> float:
    """As on a CPU: tiles of 6 rows, the first few for free, and more for each row above 64."""
    return 1.0 + 0.2 * (-(-rows // 6) - 1) + 0.05 * max(0, rows - 64) + 0.01 * num_requests


def steep(_: int, rows: int) -> float:
    """Each row costs as much as the first."""
    return float(rows)


class World:
    """Requests whose drafts turn out right by chance, and steps that take a given time.

    share: returns the probability of a draft token to be right, by the number of the step.
    noise: the mean of what a step takes longer by chance, as a share of it.
    guessing, of_token: the seconds of the drafter, and those for each token of a draft.
    """

    def __init__(
        self,
        seconds: Seconds,
        share: Callable[[int], float],
        noise: float = 0.0,
        guessing: float = 0.0,
        of_token: float = 0.0,
    ) -> None:
        self.now = 0.0
        self.rows = Counter[int]()  # how many steps had so many
        self._seconds = seconds
        self._share = share
        self._noise = noise
        self._guessing = guessing
        self._of_token = of_token
        self._rng = random.Random(0)
        self._lengths = DraftLengths(MOST, lambda rows: 1 + rows / 24, lambda: self.now)

    def run(self, num_steps: int, num_requests: int) -> float:
        """Run steps. Return how much faster tokens came than without drafts."""
        requests: list[Any] = [SimpleNamespace(token_ids=[]) for _ in range(num_requests)]
        started = self.now
        num_tokens = sum(self._step(requests, step) for step in range(num_steps))
        plain = self._seconds(num_requests, num_requests) * (1 + self._noise)
        return num_tokens / num_requests * plain / (self.now - started)

    def _step(self, requests: list[Any], step: int) -> int:
        """Run a step. Return the number of its tokens. A draft's token is right if it is 1."""
        num = len(requests)
        start = self.now
        share = self._share(step)
        drafts = [Draft([])] * num
        counts = [0] * num
        lengths = self._lengths
        if lengths.begin_step() and lengths.wants_guesses(num, 100):
            drafts = [self._draft(share) for _ in requests]
            self.now += self._guessing + self._of_token * lengths.limit
            counts = lengths.choose(requests, drafts, num, 100, 512)
        rows = num + sum(counts)
        assert rows == num or rows in SIZES
        self.rows[rows] += 1
        self.now += self._seconds(num, rows) * (1 + self._noise * self._rng.expovariate(1))
        num_accepted = 0
        for request, draft, count in zip(requests, drafts, counts, strict=True):
            # Behind a draft that is right, the next token is what it goes on with.
            run = [*takewhile(lambda token: token == 1, draft.tokens)]
            num_accepted += min(count, len(run))
            request.token_ids += [*run, 0][: 1 + min(count, len(run))]
        if rows > num or not lengths.is_idle:
            lengths.end_step(num, 100, rows, self.now - start, num_accepted)
        return num + num_accepted

    def _draft(self, share: float) -> Draft:
        return Draft([1 if self._rng.random() < share else 2 for _ in range(self._lengths.limit)], 3.0)


def best_speed(seconds: Seconds, share: float, num_requests: int) -> float:
    """Return how much faster tokens can come with full drafts, of all numbers of rows."""
    gains = [share ** (1 + i // num_requests) for i in range(MOST * num_requests)]
    plain = seconds(num_requests, num_requests)
    return max(
        (1 + sum(gains[: rows - num_requests]) / num_requests) * plain / seconds(num_requests, rows)
        for rows in SIZES
        if num_requests <= rows <= num_requests * (1 + MOST)
    )


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("num_requests", [1, 4, 16])
@pytest.mark.parametrize("seconds", [staircase, steep])
def test_lengths_come_close_to_the_best(seconds, num_requests, share):
    world = World(seconds, lambda _: share, noise=0.1)
    world.run(300, num_requests)
    speed = world.run(1000, num_requests)
    assert seconds is steep or speed > 0.93 * best_speed(seconds, share, num_requests)
    assert speed > 0.97  # the allowance counts most in so few steps


def mixture(_: int, rows: int) -> float:
    """Each row reads experts of its own: 8 of 128, until most are read."""
    read = 128 * (1 - (1 - 8 / 128) ** rows)
    return 0.4 + 0.6 * read / 8


def test_a_mixture_of_experts_drafts_less():
    """Where steps take as long as reading the weights, and the guesses are as good."""
    means = []
    for seconds in (staircase, mixture):
        world = World(seconds, lambda _: 0.7)
        world.run(500, 1)
        world.rows.clear()
        assert world.run(500, 1) > 0.97
        means.append(sum(rows * count for rows, count in world.rows.items()) / 500)
    assert means[1] < 0.6 * means[0]


def test_lengths_follow_acceptance():
    world = World(staircase, lambda step: 0.9 if step % 1000 < 500 else 0.0)
    world.run(1000, 4)
    world.rows.clear()
    assert world.run(500, 4) > 0.9 * best_speed(staircase, 0.9, 4)


def test_a_certain_draft_is_verified_at_once_and_says_nothing_of_others():
    acceptance = Acceptance(MOST)
    request: Any = SimpleNamespace(token_ids=[])
    certain = Draft([1, 1, 1], CERTAIN)
    for _ in range(20):
        assert acceptance.chances(certain) == [1.0] * 3
        acceptance.watch([request], [certain])
        request.token_ids += [1, 1, 1]
        acceptance.learn()
    assert acceptance.chances(Draft([1], 3.0)) == [0.0]


def hostile(seed: int) -> Seconds:
    """Return steps that take one time when they are tried, and another one later."""
    rng = random.Random(seed)
    num_calls = Counter[int]()
    slow = {rows: rng.choice((1.0, 1.3, 3.0, 30.0)) for rows in SIZES}
    after = {rows: rng.choice((0, 3, 20, 100)) for rows in SIZES}

    def seconds(num_requests: int, rows: int) -> float:
        num_calls[rows] += rows > num_requests
        is_slow = rows > num_requests and num_calls[rows] % 128 >= after[rows]
        return slow[rows] if is_slow else 1.0

    return seconds


@pytest.mark.parametrize("seed", range(6))
def test_losses_stay_below_one_percent(seed):
    rng = random.Random(seed)
    period = rng.choice((7, 40, 300))
    high = rng.choice((0.2, 0.6, 1.0))
    world = World(
        hostile(seed), lambda step: high if step // period % 2 else 0.0, guessing=rng.choice((0.0, 0.01, 0.3))
    )
    num_steps = 10_000
    speed = world.run(num_steps, rng.choice((1, 3, 16)))
    assert speed > 1 / (1.01 + ALLOWANCE / num_steps)


def test_the_ledger_ends_losses_that_medians_do_not_show():
    num_calls = Counter[int]()

    def seconds(num_requests: int, rows: int) -> float:
        num_calls[rows] += 1
        return 30.0 if rows > num_requests and num_calls[rows] % 3 == 0 else 1.0

    num_steps = 5000
    assert World(seconds, lambda _: 1.0).run(num_steps, 1) > 1 / (1.01 + ALLOWANCE / num_steps)


@pytest.mark.parametrize(("share", "of_token"), [(0.5, 0.1), (0.8, 0.1), (0.6, 0.03), (0.5, 0.6)])
def test_a_slow_drafter_guesses_no_more_than_pays(share, of_token):
    world = World(staircase, lambda _: share, guessing=of_token, of_token=of_token)
    world.run(500, 1)
    best = max(
        sum(share**i for i in range(rows)) * staircase(1, 1) / (staircase(1, rows) + of_token * rows)
        for rows in (2, 3, 4, 6, 8)
    )
    assert world.run(1000, 1) > 0.92 * max(1.0, best)


@pytest.mark.parametrize("share", [0.5, 0.95])
def test_a_drafter_as_slow_as_the_model_is_soon_left_alone(share):
    """Its first guesses are short, and count more than those of a fast one."""
    assert World(staircase, lambda _: share, of_token=1.0).run(100, 1) > 0.8
