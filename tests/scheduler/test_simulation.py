"""The simulation's first worlds. `python -m tests.simulation` runs as many as one likes."""

from itertools import count

import pytest

from paged.base.errors import RankError
from paged.ranks.messages import MessageKind
from tests.simulation import World, run_world


def test_every_invariant_holds_for_eight_thousand_steps():
    done, seeds = 0, count()
    while done < 8_000:
        done += run_world(next(seeds))  # an error names its seed and the command that runs it again


RANKED = 3  # the first world of several ranks; so is every eighth behind it
AT = 9  # the decode that something happens to


def lost(_: bytes) -> list[bytes]:
    return []


def doubled(message: bytes) -> list[bytes]:
    return [message, message]


def wrong(message: bytes) -> list[bytes]:
    """Change its last number, a token or an entry of a block table."""
    return [message[:-4] + (int.from_bytes(message[-4:], "little") ^ 1).to_bytes(4, "little")]


@pytest.mark.parametrize("fault", [lost, doubled, wrong, "late"])
def test_a_step_that_is_lost_or_late_or_doubled_or_wrong_is_caught(fault):
    num_caught = 0
    for seed in range(RANKED, RANKED + 8 * 12, 8):
        world = World(seed)
        assert world.followers
        kept, numbers = list[bytes](), count(1)

        def deliver(message, kept=kept, numbers=numbers):
            if kept:  # behind the next one
                return [message, kept.pop()]
            if message[0] != MessageKind.REPEATED_STEP or next(numbers) != AT:
                return [message]
            if fault == "late":
                kept.append(message)
            return [] if kept else fault(message)

        world.deliver = deliver
        world.wait_share = 1.0
        try:
            world.run(120)
        except (AssertionError, RankError, IndexError):
            num_caught += 1
        else:
            assert next(numbers) <= AT, f"{fault} was not caught in world {seed}"
    assert num_caught > 6
