"""Limits of keys over a fake clock: they hold exactly, and everything that is not used comes back."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from paged import SamplingParams
from paged.base.errors import RequestError
from paged.server.access import limits
from paged.server.access.key_file import parse_keys
from paged.server.access.limits import WINDOW_S, Admission, KeyUsage, RateLimitError, num_new_tokens


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def usage_of(clock: Clock, **limits: Any) -> KeyUsage:
    line = {"sha256": hashlib.sha256(b"k").hexdigest(), "tenant": "a", **limits}
    (entry,) = parse_keys("", json.dumps(line))
    return KeyUsage(entry, clock)


@dataclass
class Model:
    """All that ever was used, each with its time: what counts is added up anew for every question."""

    clock: Clock
    requests: list[list[float]] = field(default_factory=list)
    tokens: list[list[float]] = field(default_factory=list)
    num_open: int = 0

    def used(self, uses: list[list[float]]) -> int:
        return int(sum(amount for at, amount in uses if at + WINDOW_S > self.clock.now))

    def fits(self, uses: list[list[float]], amount: int, limit: int) -> bool:
        return self.used(uses) + amount <= limit

    def retry_after_s(self, uses: list[list[float]], amount: int, limit: int) -> int:
        now = self.clock.now
        ends = sorted(at + WINDOW_S for at, _ in uses if at + WINDOW_S > now)
        for end in ends:
            if amount + sum(a for at, a in uses if at + WINDOW_S > end) <= limit:
                return max(1, math.ceil(end - now))
        raise AssertionError("it never fits")


def outcome_of(function: Callable[[], Any]) -> tuple[Any, RequestError | None]:
    try:
        return function(), None
    except RequestError as error:
        return None, error


@dataclass
class Open:
    admission: Admission
    request: list[float]
    reserved: dict[str, tuple[list[float], int]] = field(default_factory=dict)


@pytest.fixture(params=[0, 5, limits.MOST_EXPIRED], autouse=True)
def _few_expired(request, monkeypatch):
    monkeypatch.setattr(limits, "MOST_EXPIRED", request.param)


@pytest.mark.parametrize("seed", range(10))
def test_limits_are_those_of_a_model_that_adds_everything_up(seed):
    choose = random.Random(seed)
    clock = Clock()
    most = {"requests": choose.choice([1, 3, 10]), "tokens": choose.choice([40, 200]), "open": 4}
    usage = usage_of(
        clock,
        requests_per_minute=most["requests"],
        tokens_per_minute=most["tokens"],
        concurrent_requests=most["open"],
    )
    model = Model(clock)
    in_progress: list[Open] = []
    for number in range(300):
        clock.now += choose.choice([0.0, 0.1, 1.0, 7.0, WINDOW_S / 3])
        event = choose.choice(["begin", "begin", "reserve", "reserve", "end"])
        if event == "begin":
            fits = model.num_open < most["open"] and model.fits(model.requests, 1, most["requests"])
            admission, error = outcome_of(usage.admit)
            assert (error is None) == fits
            if isinstance(error, RateLimitError):
                if model.num_open < most["open"]:
                    assert error.retry_after_s == model.retry_after_s(model.requests, 1, most["requests"])
                continue
            model.requests.append([clock.now, 1])
            model.num_open += 1
            in_progress.append(Open(admission, model.requests[-1]))
        elif event == "reserve" and in_progress:
            request = choose.choice(in_progress)
            num_prompt = choose.randint(1, 30)
            num_new = choose.randint(0, 30)
            wanted = num_prompt + num_new
            fits = model.fits(model.tokens, wanted, most["tokens"])
            reserve = partial(request.admission.reserve, str(number), num_prompt, num_new)
            _, error = outcome_of(reserve)
            assert (error is None) == fits
            if error is not None:
                assert isinstance(error, RateLimitError) == (wanted <= most["tokens"])
                if isinstance(error, RateLimitError):
                    assert error.retry_after_s == model.retry_after_s(model.tokens, wanted, most["tokens"])
                continue
            model.tokens.append([clock.now, wanted])
            request.reserved[str(number)] = model.tokens[-1], num_prompt
        elif event == "end" and in_progress:
            request = in_progress.pop(choose.randrange(len(in_progress)))
            how = choose.choice(["done", "client gone", "refused"])
            known = {name: choose.randint(0, 50) for name in request.reserved if choose.random() < 0.7}
            request.admission.close(known, was_refused=how == "refused", is_counted=how != "refused")
            model.num_open -= 1
            if how == "refused":
                request.request[1] = 0
            for name, (use, num_prompt) in request.reserved.items():
                used = num_prompt + known.get(name, 0) if name in known or how != "refused" else 0
                if used > use[1]:
                    model.tokens.append([clock.now, used - use[1]])
                else:
                    use[1] = used
        usage.check()
        headers = {
            name.decode().removeprefix("x-ratelimit-"): value.decode() for name, value in usage.headers()
        }
        for name, uses in (("requests", model.requests), ("tokens", model.tokens)):
            assert headers[f"limit-{name}"] == str(most[name])
            assert headers[f"remaining-{name}"] == str(max(0, most[name] - model.used(uses)))
            left = [at + WINDOW_S - clock.now for at, _ in uses if at + WINDOW_S > clock.now]
            assert headers[f"reset-{name}"] == f"{max(left, default=0):.3f}s"
    assert usage.num_open == model.num_open


def test_a_request_is_closed_once_and_a_key_without_limits_counts_nothing():
    clock = Clock()
    usage = usage_of(clock)
    admission = usage.admit()
    admission.reserve("a", 10**9, 10**9)
    assert usage.headers() == []
    assert usage.num_open == 1
    for _ in range(2):
        admission.close({}, was_refused=False, is_counted=True)
    assert usage.num_open == 0


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        (SamplingParams(max_tokens=5), 5),
        (SamplingParams(max_tokens=50), 20),
        (SamplingParams(max_tokens=None), 20),
        (SamplingParams(max_tokens=5, n=3), 15),
        (SamplingParams(max_tokens=5, n=2, best_of=4), 20),
    ],
)
def test_what_is_reserved_for_an_output(params, wanted):
    assert num_new_tokens(params, 10, 20, 100) == wanted
    assert num_new_tokens(params, 98, 20, 100) == 2 * params.num_samples  # up to the end of the context
