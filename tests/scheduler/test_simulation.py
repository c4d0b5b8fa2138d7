"""The simulation's first worlds. `python -m tests.simulation` runs as many as one likes."""

from itertools import count

import pytest

from paged.errors import RankError
from tests.simulation import World, run_world


def test_every_invariant_holds_for_twenty_thousand_steps():
    done, seeds = 0, count()
    while done < 20_000:
        done += run_world(next(seeds))  # an error names its seed and the command that runs it again


RANKED = 3  # the first world of several ranks; so is every eighth behind it
AT = 40  # the message that something happens to


def lost(_: bytes) -> list[bytes]:
    return []


def doubled(message: bytes) -> list[bytes]:
    return [message, message]


def wrong(message: bytes) -> list[bytes]:
    """Change its last number, a token or an entry of a block table."""
    return [message[:-4] + (int.from_bytes(message[-4:], "little") ^ 1).to_bytes(4, "little")]


@pytest.mark.parametrize("fault", [lost, doubled, wrong, "late"])
def test_a_step_that_is_lost_or_late_or_doubled_or_wrong_is_caught(fault):
    for seed in range(RANKED, RANKED + 8 * 12, 8):
        world = World(seed)
        assert world.followers
        kept, numbers = list[bytes](), count(1)

        def deliver(message, kept=kept, numbers=numbers):
            if kept:  # behind the next one
                return [message, kept.pop()]
            if next(numbers) != AT:
                return [message]
            if fault == "late":
                kept.append(message)
            return [] if kept else fault(message)

        world.deliver = deliver
        with pytest.raises((AssertionError, RankError, IndexError)):
            world.run(120)
        assert next(numbers) > AT
