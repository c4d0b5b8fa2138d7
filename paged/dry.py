"""DRY: penalties on tokens that would go on with a repetition (p-e-w, "Don't Repeat Yourself", 2024)."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from .sampling_params import SamplingParams
from .token_rules import Breakers

# The largest power that is still far from what a float32 holds.
MAX_LOG_PENALTY = math.log(1e30)


def dry_penalties(token_ids: Sequence[int], params: SamplingParams, breakers: Breakers) -> dict[int, float]:
    """What is taken off the logits of which tokens after these ones.

    A token that followed an earlier occurrence of the last n tokens costs
    dry_multiplier * dry_base ** (n - dry_allowed_length), for the largest such n. Tokens that are breakers by
    themselves cost nothing.
    """
    last_n = params.dry_penalty_last_n
    if not last_n:
        return {}
    # The newest first.
    recent = token_ids[::-1] if last_n < 0 else token_ids[: -last_n - 1 : -1]
    longest = _num_after_breaker(recent, breakers)
    if longest < params.dry_allowed_length:
        return {}
    # Longer repetitions cost no more than the largest power.
    power = math.log(params.dry_base)
    most = int(MAX_LOG_PENALTY / power) if power > 0 else 0
    longest = min(longest, params.dry_allowed_length + most)
    lengths = _repetitions(recent, longest)
    costs = {}
    for token, n in lengths.items():
        if n >= params.dry_allowed_length and () not in breakers.get(token, ()):
            cost = params.dry_multiplier * params.dry_base ** (n - params.dry_allowed_length)
            costs[token] = min(cost, sys.float_info.max)
    return costs


def _num_after_breaker(recent: Sequence[int], breakers: Breakers) -> int:
    """How many tokens came after the last breaker; recent has the newest first."""
    if not breakers:
        return len(recent)
    for i, token in enumerate(recent):
        for tail in sorted(breakers.get(token, ()), key=len, reverse=True):
            # What follows a token lies before it here.
            if len(tail) <= i and all(recent[i - 1 - j] == part for j, part in enumerate(tail)):
                return i - len(tail)
    return len(recent)


def _repetitions(recent: Sequence[int], longest: int) -> dict[int, int]:
    """For each token that followed an earlier occurrence of the last tokens, of how many at most.

    recent has the newest first. By Z-boxes (Gusfield, 1997): linear, however repetitive the text is.
    """
    recent = list(recent)
    lengths: dict[int, int] = {}  # by distance
    followers: dict[int, int] = {}
    start = end = 0  # the match that reaches furthest back: [start, end) equals [0, end - start)
    distance, num = 0, len(recent)
    while True:
        try:
            distance = recent.index(recent[0], distance + 1)
        except ValueError:
            return followers
        n = min(lengths.get(distance - start, 0), end - distance) if distance < end else 0
        while n < longest and distance + n < num and recent[n] == recent[distance + n]:
            n += 1
        lengths[distance] = n
        if distance + n > end:
            start, end = distance, distance + n
        follower = recent[distance - 1]
        followers[follower] = max(n, followers.get(follower, 0))
